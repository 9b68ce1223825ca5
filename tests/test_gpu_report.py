"""The committed GPU report says what its raw samples say, and no tampering with a report goes unnoticed."""

import copy
import json
from typing import Any

import pytest

from tools.gpu_check import report as joining
from tools.gpu_check.points import POINTS, SampleError
from tools.gpu_check.rules import RULES
from tools.gpu_check.sections import GROUPS, SECTIONS, processes
from tools.gpu_check.validate import POINT_KEYS, TOP_KEYS, problems, validate

from .conftest import ROOT

REPORT, MISSED = ROOT / "bench" / "h200_check.json", ROOT / "bench" / "missed.json"
# A passing leaf for every rule; points whose samples have another form are below.
LEAVES = {"largest": 0.0, "smallest": 100.0, "total": 0, "zeros": 1, "abs_mean": 0.0}
SHAPED: dict[str, Any] = {
    "agreement": {"agreed": 99, "rows": 100},
    "worst_error": {"0.rms": 0.0, "0.max": 0.0},
    "unnamed": {"message": "cold key a", "must_name": ["a"]},
    "captures_before_prewarm": {"events": ["prewarm", "capture"]},
    "first_over_tenth": {"first_s": [1.0, 1.1, 1.2], "tenth_s": [1.0, 1.0, 1.0]},
    "worst_memory": {"peak_bytes": 11, "before_bytes": 10, "unit_bytes": 10},
    "best_copy_share": {"kernel_us": [1.0] * 30, "copy_us": [1.0] * 30, "kernel_bytes": 9, "copy_bytes": 10},
}
WHOLE: dict[str, Any] = {
    "uncounted_kernels": {
        "triton": {"gemm_keys": 30, "deep_gemm_keys": 0, "deep_gemm_kernels": 0},
        "libraries": {"gemm_keys": 60, "deep_gemm_keys": 40, "deep_gemm_kernels": 40},
    },
    "speed_up": {"ours": [1.0, 2.0, 3.0], "theirs": [50.0, 60.0, 70.0]},
    "not_passed": {
        part: {"passed": 9, "failed": 0, "errors": 0, "skipped": 0, "names": []}
        for part in ("mhc", "kernels", "cases", "graphs", "rest")
    },
}


def samples_of(name: str) -> dict[str, Any]:
    """Samples under which the point passes."""
    point = POINTS[name]
    if point.rule in WHOLE:
        return copy.deepcopy(WHOLE[point.rule])
    leaf = SHAPED.get(point.rule, LEAVES.get(point.rule))
    made: dict[str, Any] = {}
    for path in point.needs or (("op/case.float32",) if point.rule == "worst_error" else ("one",)):
        *parents, last = path.split("/")
        inner = made
        for part in parents:
            inner = inner.setdefault(part, {})
        if point.rule == "worst_error" and not parents:
            inner, last = inner.setdefault(last, {}), "case.float32"
        inner[last] = copy.deepcopy(leaf)
    return made


@pytest.fixture
def report() -> dict[str, Any]:
    points = {name: joining.entry(name, samples_of(name), [], 1.0, ["section"]) for name in POINTS}
    return {
        "gpu": "GPU", "torch": "2", "triton": "3", "commit": 40 * "a", "clean_tree": True, "started": "now",
        "seconds": 1.0, "kernels": ["kernel"], "warm_keys": [["op", 1]], "points": points,
    }  # fmt: skip


def test_a_report_without_fault(report):
    assert problems(report, {}) == []
    assert all(entry["pass"] for entry in report["points"].values())
    assert {point.rule for point in POINTS.values()} <= set(RULES)


def test_the_committed_report(capsys):
    assert validate(REPORT, MISSED) == 0, capsys.readouterr().out


def change_a_sample(report):
    report["points"]["exact_nll"]["samples"]["7"] = 1.0


def change_a_small_sample(report):
    report["points"]["exact_nll"]["samples"]["7"] = 1e-4


def change_a_value(report):
    report["points"]["decode_speed_up"]["value"] = 61.0


def flip_a_pass(report):
    report["points"]["poison"]["pass"] = False


def pass_what_fails(report):
    samples = samples_of("first_request")
    samples["full"]["first_s"] = [9.0, 9.0, 9.0]
    report["points"]["first_request"] = joining.entry("first_request", samples, [], 1.0, []) | {"pass": True}


def move_a_bar(report):
    report["points"]["official_attn_out_triton"]["bar"] = 1.0


def remove_a_point(report):
    del report["points"]["mhc_compilations"]


def add_a_point(report):
    report["points"]["invented"] = report["points"]["poison"]


def measure_less(report):
    del report["points"]["zero_loads"]["samples"]["pro.full.triton"]["unpadded"]["4224"]


def empty_a_sample(report):
    report["points"]["replay_equals_padded"]["samples"]["exact.full"]["step"]["mixed"] = {}


def hide_an_error(report):
    report["points"]["ops"]["error"] = "a section ended with 1"


def not_a_number(report):
    report["points"]["exact_mtp_nll"]["samples"]["mean"] = float("nan")


def dirty_tree(report):
    report["clean_tree"] = False


def no_commit(report):
    report["commit"] = "HEAD"


def no_kernels(report):
    report["kernels"] = []


TAMPERINGS = {
    change_a_sample: "exact_nll: value must be",
    change_a_small_sample: "exact_nll: value must be",
    change_a_value: "decode_speed_up: value must be",
    flip_a_pass: "poison: pass must be True",
    pass_what_fails: "first_request: pass must be False",
    move_a_bar: "official_attn_out_triton: bar must be 0.01, got 1.0",
    remove_a_point: "mhc_compilations: the report lacks the point",
    add_a_point: "invented: not a known point",
    measure_less: "zero_loads: samples must hold pro.full.triton/unpadded/4224",
    empty_a_sample: "replay_equals_padded: samples must hold exact.full/step/mixed, got an empty one",
    hide_an_error: "ops: pass must be False",
    not_a_number: "exact_mtp_nll: samples must be finite",
    dirty_tree: "clean_tree: must be true",
    no_commit: "commit: must be 40 hex digits",
    no_kernels: "kernels: must name at least one",
}


@pytest.mark.parametrize("tampering", TAMPERINGS, ids=lambda f: f.__name__)
def test_tampering_is_found(report, tampering):
    tampering(report)
    found = problems(report, {})
    assert any(text.startswith(TAMPERINGS[tampering]) for text in found), found


@pytest.mark.parametrize("key", TOP_KEYS)
def test_a_lacking_key_is_found(report, key):
    del report[key]
    assert any(text.startswith(f"{key}: ") for text in problems(report, {}))


@pytest.mark.parametrize("key", POINT_KEYS)
def test_a_lacking_key_of_a_point_is_found(report, key):
    del report["points"]["poison"][key]
    assert f"poison: lacks {key}" in problems(report, {})


def test_a_failing_point_must_be_stated(report):
    samples = samples_of("mhc_post_copy_share")
    samples["triton"]["kernel_bytes"] = samples["tilelang"]["kernel_bytes"] = 8
    report["points"]["mhc_post_copy_share"] = joining.entry("mhc_post_copy_share", samples, [], 1.0, [])
    assert problems(report, {}) == ["mhc_post_copy_share: failed: 0.8 is not >= 0.85"]
    stated = {"mhc_post_copy_share": {"value": 0.8, "reason": "measured"}}
    assert problems(report, stated) == []
    stated["mhc_post_copy_share"]["value"] = 0.84
    assert problems(report, stated) == [
        "mhc_post_copy_share: the value stated as missed must be the measured 0.8, got 0.84"
    ]
    assert problems(report, {"mhc_post_copy_share": {"value": 0.8}})[0].endswith("without a reason")
    assert problems(report, stated | {"poison": {"value": 0, "reason": "none"}})[-1].endswith("but it passes")


def test_the_command_fails_and_names_the_point(report, tmp_path, capsys):
    remove_a_point(report)
    path = tmp_path / "report.json"
    path.write_text(joining.as_text(report))
    assert json.loads(path.read_text()) == report
    assert validate(path, tmp_path / "none.json") == 1
    assert "WRONG   mhc_compilations: the report lacks the point" in capsys.readouterr().out


# ---- the run ---------------------------------------------------------------------------------------------------------


def test_every_point_has_a_section():
    measured = {point for section in SECTIONS.values() for point in section.points} | {"whole_run_s"}
    assert measured == set(POINTS)


def test_every_section_has_a_process():
    every = [name for group in processes(("first", "together", "gated", "alone")) for name in group]
    assert sorted(every) == sorted(SECTIONS)
    for group in GROUPS:
        assert len({SECTIONS[name].stage for name in group}) == 1, group
    assert ("exact",) in processes(("together",), ("exact",))


def test_samples_of_several_processes_are_joined(tmp_path):
    """One process failed, one left half of its samples, one ended well: nothing passes that was not measured."""
    chosen = {name: SECTIONS[name] for name in ("references", "prewarm_off", "cold_key")}
    recorded = {
        "references": {"samples": {"references_nll": {"0": 1e-6}}, "kernels": ["a"], "warm_keys": [["x", 1]]},
        "prewarm_off": {"samples": {"prewarm_off": samples_of("prewarm_off")}, "kernels": ["b"], "warm_keys": []},
    }
    for name, found in recorded.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"errors": {}, "seconds": {}} | found))
    outcomes = {"references": ("killed after 9 s", 9.0), "prewarm_off": (None, 1.0)}
    made = joining.join(
        tmp_path, chosen, outcomes, seconds=1.0, started="now", described=f"{40 * 'b'}-dirty", dry=True
    )  # fmt: skip
    assert made["kernels"] == ["a", "b"] and made["warm_keys"] == [["x", 1]]
    assert made["commit"] == 40 * "b" and made["clean_tree"] is False
    points = made["points"]
    assert points["prewarm_off"]["pass"] is True
    assert points["references_nll"]["pass"] is False and "killed after 9 s" in points["references_nll"]["error"]
    assert points["cold_key_in_capture"]["pass"] is False and "did not run" in points["cold_key_in_capture"]["error"]
    assert points["exact_nll"]["value"] is None and points["exact_nll"]["pass"] is False
    text = joining.table(made, outcomes)
    assert len(text.splitlines()) <= 60 and len(text) <= 6000 and "FAIL exact_nll" in text


def test_two_sections_may_not_give_one_sample():
    with pytest.raises(ValueError, match="a sample must come from one section, got a second b"):
        joining.merge({"a": {"b": 1}}, {"a": {"b": 1}})


def test_rules_refuse_samples_that_show_nothing():
    for name, samples, message in (
        ("first_request", {"full": {"first_s": [1.0], "tenth_s": [1.0]}}, "samples must hold eager"),
        ("gpu_tests", {"mhc": {"passed": 0, "failed": 0, "errors": 0, "skipped": 0}}, "samples must hold kernels"),
        ("prewarm_before_capture", {"nano": {"events": ["capture"]}}, "must hold a prewarm and a capture"),
        ("whole_run_s", {"seconds": {}}, "samples must hold seconds, got an empty one"),
    ):
        with pytest.raises(SampleError, match=message):
            POINTS[name].judge(samples)
    assert POINTS["prewarm_before_capture"].judge({"nano": {"events": ["capture", "prewarm"]}}) == (1, False)
    assert POINTS["ops"].judge({"op": {"x.float32": {"0.rms": 1e-6, "0.bytes_differ": 0.1}}})[1] is False
    parts = samples_of("gpu_tests")
    parts["rest"] |= {"passed": 0, "skipped": 1}
    assert POINTS["gpu_tests"].judge(parts) == (1, False)
    for part in parts.values():
        part["passed"] = 0
    with pytest.raises(SampleError, match="must have a passed test, got none"):
        POINTS["gpu_tests"].judge(parts)
