"""For every point of the GPU report: samples that are emptied, that lack anything or that moved do not pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from dsv4.capture_stage import draft_ladder, step_ladder
from dsv4.engine_config import EngineConfig
from tools.gpu_check import replay, required
from tools.gpu_check.points import POINTS
from tools.gpu_check.rules import SampleError

from .gpu_report_samples import KEYS, samples_of
from .graphs import gpu_measure

LACKING = object()
MOST = 40  # of many alike, evenly spread


def places(samples: Any, at: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    """Every path into samples, and what is there."""
    items = samples.items() if isinstance(samples, dict) else enumerate(samples) if isinstance(samples, list) else ()
    for key, value in items:
        yield (*at, key), value
        yield from places(value, (*at, key))


@contextmanager
def changed(samples: Any, path: tuple, value: Any = LACKING) -> Iterator[Any]:
    """The samples with ``value`` in place of what is there, or without it."""
    parent = samples
    for key in path[:-1]:
        parent = parent[key]
    before = parent[path[-1]]
    if value is LACKING:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    try:
        yield samples
    finally:
        parent[path[-1]] = before


def still_passes(name: str, samples: Any, path: tuple, value: Any) -> bool:
    with changed(samples, path, value) as made:
        return passes(name, made)


def passes(name: str, samples: Any) -> bool:
    try:
        return POINTS[name].judge(samples)[1]
    except SampleError:
        return False


def some(found: list, most: int = MOST) -> list:
    return found[:: -(-len(found) // most)] if found else []


@pytest.mark.parametrize("name", POINTS)
def test_whole_samples_pass(name):
    samples = samples_of(name)
    assert passes(name, samples) and not passes(name, {})
    assert POINTS[name].required() and POINTS[name].question.endswith("?")


@pytest.mark.parametrize("name", POINTS)
def test_nothing_may_be_empty(name):
    """At any depth, a dict or a list, and nothing or a word in place of a number."""
    samples, point = samples_of(name), POINTS[name]
    found = list(places(samples))
    for path, value in some([place for place in found if isinstance(place[1], dict)]) + some(found):
        at = "/".join(map(str, path))
        if isinstance(value, dict | list) and at not in point.may_be_empty:
            assert not still_passes(name, samples, path, type(value)()), path
        if isinstance(value, dict) or isinstance(value, int | float):
            for other in (None, "", {}, [], True, float("nan"), float("inf")):
                assert not still_passes(name, samples, path, other), (path, other)


@pytest.mark.parametrize("name", POINTS)
def test_nothing_may_lack(name):
    samples = samples_of(name)
    for path in some(list(POINTS[name].required()), 400):
        with changed(samples, tuple(path.split("/"))) as lacking, pytest.raises(SampleError):
            POINTS[name].judge(lacking)
    assert passes(name, samples)


def moved(rule: str, bar: float, path: tuple, value: float) -> float | None:
    """A number that no samples with it may pass with; ``None`` for one that is shown, not judged, or of a list whose
    median counts."""
    last = path[-1]
    if rule == "worst_error":
        return None if last.endswith("max") else 1.0
    if rule == "worst_memory":
        return value + (1e12 if last == "peak_bytes" else -1e12)
    if rule in ("speed_up", "worst_copy_share", "first_over_tenth") and isinstance(last, int):
        return -value
    if rule == "longest_call":
        return bar + 1 if last == "call_s" else value - 1
    if rule == "abs_mean":
        return 1000 * bar
    if rule in ("zeros", "agreement", "not_passed", "uncounted_kernels"):
        return value - 1 if last not in ("failed", "errors", "skipped", "agreed") else 7 - value
    return bar + 1 if rule in ("largest", "total") else value - 1


@pytest.mark.parametrize("name", POINTS)
def test_no_number_may_move_beyond_the_bar(name):
    samples, point = samples_of(name), POINTS[name]
    numbers = [(path, value) for path, value in places(samples) if isinstance(value, int | float)]
    for path, value in some(numbers):
        other = moved(point.rule, point.bar, path, value)
        assert other is None or not still_passes(name, samples, path, other), (path, other)


def test_lists_that_moved_as_a_whole():
    for name, path, factor in (
        ("decode_speed_up", ("ours",), 3.1), ("decode_speed_up", ("theirs",), 0.3),
        ("mhc_post_copy_share", ("triton", "kernel_us"), 1.2), ("mhc_post_copy_share", ("tilelang", "copy_us"), 0.8),
    ):  # fmt: skip
        samples = samples_of(name)
        (values,) = (value for at, value in places(samples) if at == path)
        assert not still_passes(name, samples, path, [factor * value for value in values])
    slow = samples_of("first_request")
    slow["piecewise"]["request_s"] = [[3.0, *times[1:]] for times in slow["piecewise"]["request_s"]]
    assert POINTS["first_request"].judge(slow) == (1.5, False)


def test_a_mean_may_not_be_diluted():
    for name, more in (("exact_nll", 0.0), ("exact_mtp_nll", 0.0), ("exact_top1", {"agreed": 10**9, "rows": 10**9})):
        with pytest.raises(SampleError, match="must hold nothing but what is needed, got more"):
            POINTS[name].judge(samples_of(name) | {"more": more})
    few = samples_of("exact_top1")
    few["prompts"]["agreed"] = 0
    assert POINTS["exact_top1"].judge(few) == (0.0, False)  # 16 of 1,706 rows


def test_kernels_and_keys_are_compared_as_sets():
    samples = samples_of("gemm_keys")
    samples["libraries"]["deep_gemm_kernels"] = [*KEYS[1:], "another"]
    assert POINTS["gemm_keys"].judge(samples) == (2, False)


def test_one_wrong_element_is_seen():
    """1 in a million elements of bf16, whose RMS is below its tolerance; FP8 and FP4 steps are no errors."""
    samples = samples_of("ops_large")
    samples["linear"]["flash.8192.bfloat16"] |= {"0.rms": 1e-3, "0.max": 1.0, "0.peak": 1.0}
    assert POINTS["ops_large"].judge(samples) == (16.0, False)
    samples = samples_of("ops_large")
    for op, peak in (("linear", 2.0**-7), ("expert_ffn", 2.0**-3), ("indexer_query", 0.5)):
        samples[op]["flash.8192.bfloat16"]["0.peak"] = peak
    assert POINTS["ops_large"].judge(samples)[1] is True


def test_a_message_must_be_the_expected_one():
    for name in ("cold_key_in_capture", "case_C11"):
        for entry in samples_of(name):
            samples = samples_of(name)
            samples[entry] = {"message": "no error", "must_name": ["no error"]}
            assert POINTS[name].judge(samples) == (1, False)


def test_what_is_needed_is_what_is_measured():
    """Ladders as the engines of these sections have them, and bounds as the library states them."""
    settings = EngineConfig(
        device="cpu", compile="off", token_budget=replay.BUDGET, max_requests=replay.MAX_REQUESTS, draft_tokens=1,
        max_seq_len=replay.BLOCKS_EACH * 256, num_blocks=replay.BLOCKS_EACH * replay.MAX_REQUESTS,
    )  # fmt: skip
    for ladder, expected in ((step_ladder, required.STEP_BUCKETS), (draft_ladder, required.DRAFT_BUCKETS)):
        assert tuple(bucket.tokens for bucket in ladder(settings).buckets) == expected
    ladders = {"step": step_ladder(settings), "draft": draft_ladder(settings)}
    captured = {name: SimpleNamespace(ladder=ladder) for name, ladder in ladders.items()}
    engine: Any = SimpleNamespace(
        settings=settings, config=SimpleNamespace(vocab_size=2048), started=SimpleNamespace(captured=captured)
    )
    found = {
        f"{name}/{case.kind}/{case.bucket_tokens}" for name in ladders for case in gpu_measure._cases(engine, name)
    }
    assert found == set(required.REPLAY_CASES)
    wide = EngineConfig(device="cpu", compile="off", token_budget=8192, max_requests=256, max_seq_len=8448)
    assert tuple(bucket.tokens for bucket in step_ladder(wide).buckets) == required.WIDE_BUCKETS
    scores = import_module("dsv4.ops.indexer_logits").TEMPORARY_BYTES
    picks = import_module("dsv4.ops.indexer_picks").SCORE_BYTES
    for path, bound in POINTS["indexer_temporaries"].given.items():
        assert bound == (picks if path.startswith("picks.") else scores)
