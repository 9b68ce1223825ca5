"""What a step must not see: rows of earlier requests, pages it does not own, pad rows and pad requests."""

import dataclasses

import pytest
import torch

from dsv4.caches import ModelCaches
from dsv4.inputs import StepInputs
from dsv4.model import DeepseekV4
from dsv4.runner import Runner, Sequence

from .engines import greedy, make_engine, record_steps
from .tiny_model import (
    Outputs,
    TinyCheckpoint,
    different_rows,
    joined,
    place,
    random_tokens,
    run_parts,
    runner_of,
    tiny_config,
)

KINDS = [("exact", "fp32"), ("official", "bf16"), ("official", "fp8")]
EXTREMES = [("exact", "fp32"), ("official", "fp8")]
ROW_COUNTS = (5, 32, 33, 64, 128, 250, 256)  # 32 and more: sizes at which graphs are captured, and their neighbours


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> dict[str, DeepseekV4]:
    """Ratios 0, 4, 128 with heads of 512, which the FP8 cache layout needs; deterministic, by numerics."""
    checkpoint = TinyCheckpoint.write(tiny_config(head_dim=512), tmp_path_factory.mktemp("tiny") / "checkpoint")
    return {numerics: checkpoint.model(numerics) for numerics in ("exact", "official")}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def check_equal_caches(got: ModelCaches, want: ModelCaches) -> None:
    for a, b in zip(got.tensors(), want.tensors(), strict=True):
        assert torch.equal(as_bytes(a), as_bytes(b))


def continued(runner: Runner, tokens: list[int], prompt: int) -> Outputs:
    """A prompt at the first pages, then token by token."""
    sequence = Sequence()
    steps = run_parts(runner, [(sequence, tokens[: prompt + 1])])
    steps += [run_parts(runner, [(sequence, tokens[t : t + 2])])[0] for t in range(prompt, len(tokens) - 1)]
    return joined(steps)


# ---- rows of earlier requests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("numerics, storage", KINDS)
def test_short_prompt_after_a_long_one(tiny, numerics, storage):
    """3 tokens and 7 decoded ones (two ratio-4 entries) in the slot and pages that 300 tokens have just left."""
    model = tiny[numerics]
    short = random_tokens(11, 61, seed=1)
    fresh = continued(runner_of(model, storage=storage), short, prompt=3)
    used = runner_of(model, storage=storage)
    run_parts(used, [(Sequence(), random_tokens(301, 61, seed=2))])
    assert different_rows(continued(used, short, prompt=3), fresh) == {}


@pytest.mark.parametrize("numerics", ["exact", pytest.param("official", marks=pytest.mark.slow)])
def test_short_prompt_after_a_long_one_in_the_engine(nano_model, numerics):
    """One slot and two blocks, so that the second request gets what the first one had."""

    def logits_of_last(prompts: list[list[int]]) -> list[torch.Tensor]:
        engine = make_engine(
            nano_model, numerics, deterministic=True, max_requests=1, max_seq_len=512, num_blocks=2, chunk_tokens=300,
            prefix_reuse=False,
        )  # fmt: skip
        steps = record_steps(engine)
        done = engine.generate(prompts, greedy(6))
        assert all(c.error is None for c in done)
        assert {s.state_slot for step in steps for s in step.segments} == {0}
        return [step.logits for step in steps[-6:]]

    long, short = random_tokens(300, 2048, seed=3), random_tokens(3, 2048, seed=4)
    for after, fresh in zip(logits_of_last([long, short]), logits_of_last([short]), strict=True):
        assert torch.equal(after, fresh)


# ---- pages that a request does not own -------------------------------------------------------------------------------


def poison(caches: ModelCaches, byte: int | None) -> None:
    """Fill every cache with a byte, or (dense ones only) with NaN."""
    for tensor in caches.tensors():
        if byte is None:
            tensor.fill_(torch.nan)
        else:
            tensor.view(torch.uint8).fill_(byte)


@pytest.mark.parametrize("numerics, storage, byte", [
    ("exact", "fp32", None), ("exact", "fp32", 0x7F), ("official", "bf16", None), ("official", "bf16", 0xFF),
    ("official", "fp8", 0x7F), ("official", "fp8", 0xFF),
])  # fmt: skip
def test_poisoned_caches(tiny, numerics, storage, byte):
    """Results do not change, and what no request owns is not written either."""

    def run(poisoned: bool) -> tuple[Outputs, Outputs, Runner]:
        runner = runner_of(tiny[numerics], num_requests=3, storage=storage)
        if poisoned:
            poison(runner.caches, byte)
        first, second = place(2), place(1)  # page 0 and slot 0, where a clamped index lands, belong to nobody
        whole, _ = run_parts(runner, [(first, tokens[:131]), (second, tokens[:6])])
        rest = [run_parts(runner, [(second, tokens[5:9]), (first, tokens[130:134])])]
        rest += [run_parts(runner, [(second, tokens[t : t + 2]), (first, tokens[t + 125 : t + 127])]) for t in (8, 9)]
        return joined([whole, *(step[1] for step in rest)]), joined(step[0] for step in rest), runner

    tokens = random_tokens(140, 61, seed=5)
    clean, poisoned = run(False), run(True)
    for got, want in zip(poisoned[:2], clean[:2], strict=True):
        assert different_rows(got, want) == {}
    reference = runner_of(tiny[numerics], num_requests=3, storage=storage)
    poison(reference.caches, byte)
    for cache, before in zip(poisoned[2].caches.tensors(), reference.caches.tensors(), strict=True):
        third = cache.shape[0] // 3
        assert torch.equal(as_bytes(cache[:third]), as_bytes(before[:third]))


def test_a_poisoned_row_that_is_read_is_seen(tiny):
    """One NaN in a row that the request owns reaches its results: nothing on the way hides it."""
    model = tiny["exact"]
    runner = runner_of(model)
    poison(runner.caches, None)
    sequence = Sequence()
    run_parts(runner, [(sequence, random_tokens(4, 61, seed=6))])
    runner.caches.layers[0].window[0, 1] = torch.nan
    (out,) = run_parts(runner, [(sequence, random_tokens(3, 61, seed=7))])
    assert not out["logits"].isfinite().all()


# ---- pads ------------------------------------------------------------------------------------------------------------


def step(model: DeepseekV4, runner: Runner, inputs: StepInputs) -> Outputs:
    with torch.no_grad():
        logits, streams = model.forward_streams(inputs, runner.caches)
        mtp_logits, mtp_streams = model.forward_mtp(inputs, runner.caches, streams)
    return {"logits": logits, "streams": streams, "mtp_logits": mtp_logits, "mtp_streams": mtp_streams}


@pytest.mark.parametrize("rows", ROW_COUNTS)
@pytest.mark.parametrize("numerics, storage", EXTREMES)
def test_pads_change_nothing(tiny, numerics, storage, rows):
    """A request of 5 rows beside pad requests of length 0, −1 and −4, padded to ``rows``."""
    model, tokens = tiny[numerics], random_tokens(5, 61, seed=8)
    plain, padded = (runner_of(model, storage=storage) for _ in range(2))
    want = step(model, plain, plain.inputs([Sequence().segment(tokens, range(5))]))
    inputs = padded.inputs([Sequence().segment(tokens, range(5))], num_rows=rows, num_requests=4)
    inputs = dataclasses.replace(inputs, seq_lens=torch.tensor([5, 0, -1, -4], dtype=torch.int32))
    got = step(model, padded, inputs)
    for name in ("streams", "mtp_streams"):
        assert got[name].shape[0] == rows and (got[name][5:] == 0).all()
        got[name] = got[name][:5]
    assert different_rows(got, want) == {}
    check_equal_caches(padded.caches, plain.caches)


@pytest.mark.parametrize("rows", ROW_COUNTS)
@pytest.mark.parametrize("numerics, storage", EXTREMES)
def test_dummy_rows(tiny, numerics, storage, rows):
    """Capture inputs of engines: rows of token 0 at position 0 without pages or slots, all lengths zero, int32."""
    model = tiny[numerics]
    runner = runner_of(model, storage=storage)
    poison(runner.caches, 0xFF)
    before = [as_bytes(t).clone() for t in runner.caches.tensors()]
    pads = runner.inputs([], num_rows=rows, num_requests=rows)
    inputs = dataclasses.replace(
        pads,
        token_ids=torch.zeros(rows, dtype=torch.int64),
        positions=torch.zeros(rows, dtype=torch.int64),
        row_requests=torch.arange(rows, dtype=torch.int32),
        query_starts=torch.arange(rows + 1, dtype=torch.int32),
        seq_lens=torch.zeros(rows, dtype=torch.int32),
        num_valid=torch.tensor([rows], dtype=torch.int32),
        logit_rows=torch.arange(rows),
    )
    out = step(model, runner, inputs)
    for value in out.values():
        assert value.isfinite().all() and torch.equal(value, value[:1].expand_as(value))
    for old, new in zip(before, runner.caches.tensors(), strict=True):
        assert torch.equal(old, as_bytes(new))
