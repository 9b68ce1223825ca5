"""The committed GPU report says what its raw samples say, and no tampering with a report goes unnoticed."""

import ast
import inspect
import json
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest

from dsv4.evaluate import KINDS
from tools.gpu_check import children, report as joining, suites
from tools.gpu_check.children import FUNCTIONS
from tools.gpu_check.place import Place
from tools.gpu_check.points import OFFICIAL_KINDS, POINTS
from tools.gpu_check.rules import FAILED, RULES, SampleError
from tools.gpu_check.sections import GROUPS, SECTIONS, processes
from tools.gpu_check.validate import POINT_KEYS, TOP_KEYS, problems, validate

from .conftest import ROOT
from .gpu_report_samples import samples_of

REPORT, MISSED = ROOT / "bench" / "h200_check.json", ROOT / "bench" / "missed.json"


@pytest.fixture
def report() -> dict[str, Any]:
    points = {name: joining.entry(name, samples_of(name), [], 1.0, ["section"]) for name in POINTS}
    return {
        "gpu": "NVIDIA GPU", "torch": "2.11.0", "triton": "3.6.0", "python": "3.12.3", "commit": 40 * "a",
        "clean_tree": True,
        "started": "2026-01-01T00:00:00+00:00", "seconds": points["whole_run_s"]["value"], "kernels": ["kernel"],
        "warm_keys": [["op", 1]], "sections": dict.fromkeys(SECTIONS, {"seconds": 1.0}), "details": {},
        "points": points,
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
    samples["full"]["request_s"] = [[18.0, *[2.0] * 9]] * 3
    report["points"]["first_request"] = joining.entry("first_request", samples, [], 1.0, []) | {"pass": True}


def move_a_bar(report):
    report["points"]["official_attn_out_triton"]["bar"] = 1.0


def remove_a_point(report):
    del report["points"]["mhc_compilations"]


def add_a_point(report):
    report["points"]["invented"] = report["points"]["poison"]


def measure_less(report):
    del report["points"]["zero_loads"]["samples"]["pro.full.triton"]["unpadded prefill"]["4224"]


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


def no_python(report):
    del report["python"]


def another_key(report):
    report["note"] = "all is well"


def a_section_that_was_killed(report):
    report["sections"]["decode"] = {"seconds": 1.0, "end": "killed after 100 s"}


TAMPERINGS = {
    no_python: "python: the report lacks it",
    another_key: "note: not a known key",
    a_section_that_was_killed: "sections: decode must have ended well for decode_speed_up to pass",
    change_a_sample: "exact_nll: value must be",
    change_a_small_sample: "exact_nll: value must be",
    change_a_value: "decode_speed_up: value must be",
    flip_a_pass: "poison: pass must be True",
    pass_what_fails: "first_request: pass must be False",
    move_a_bar: "official_attn_out_triton: bar must be 0.01, got 1.0",
    remove_a_point: "mhc_compilations: the report lacks the point",
    add_a_point: "invented: not a known point",
    measure_less: "zero_loads: samples must hold pro.full.triton/unpadded prefill/4224",
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


@pytest.mark.parametrize(
    "key, value",
    [
        ("gpu", "none (dry run)"), ("started", "yesterday"), ("started", None), ("seconds", -1), ("sections", None),
        ("details", 7), ("kernels", 5),
    ],
)  # fmt: skip
def test_a_wrong_description_is_found(report, key, value):
    report[key] = value
    assert any(text.startswith((f"{key}: must be", f"{key}: must name")) for text in problems(report, {}))


@pytest.mark.parametrize("key, value", [("seconds", "x"), ("seconds", -1), ("command", "make test")])
def test_a_wrong_description_of_a_point_is_found(report, key, value):
    report["points"]["poison"][key] = value
    assert any(text.startswith(f"poison: {key} must be") for text in problems(report, {}))


def test_the_readme_counts_as_the_report_does():
    points = json.loads(REPORT.read_text())["points"]
    passed = sum(point["pass"] for point in points.values())
    text = " ".join((REPORT.parent.parent / "README.md").read_text().split())
    assert f"{passed} of the {len(points)} points of [bench/h200_check.json]" in text


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
    samples["triton"]["kernel_us"] = [1.25] * 30
    report["points"]["mhc_post_copy_share"] = joining.entry("mhc_post_copy_share", samples, [], 1.0, [])
    assert problems(report, {}) == ["mhc_post_copy_share: failed: 0.8 is not >= 0.85"]
    stated = {"mhc_post_copy_share": {"value": 0.8, "reason": "measured"}}
    assert problems(report, stated) == []
    stated["mhc_post_copy_share"]["value"] = 0.84
    assert problems(report, stated) == [
        "mhc_post_copy_share: the value stated as missed must be the measured 0.8, got 0.84"
    ]
    assert problems(report, {"mhc_post_copy_share": {"value": 0.8}})[0].endswith("without a reason")
    assert problems(report, {"mhc_post_copy_share": {"reason": "slow"}})[-1].endswith("null if none was measured")
    assert problems(report, stated | {"poison": {"value": 0, "reason": "none"}})[-1].endswith("but it passes")


def test_what_was_not_measured_must_be_stated(report, tmp_path, capsys):
    """Nothing measured, no such point in the report, or an answer to another question: null; never beside a value."""
    stated = {"poison": {"value": None, "reason": "no time was left"}}
    measured = report["points"]["poison"]
    assert "poison: stated as missed, but it passes" in problems(report, stated)
    for entry in (
        joining.entry("poison", {}, ["poison: not begun"], 0.0, []), None,
        measured | {"question": "Something else?", "pass": False},
    ):  # fmt: skip
        report["points"]["poison"] = entry
        if entry is None:
            del report["points"]["poison"]
        assert problems(report, stated) == []
        assert problems(report, {}) and problems(report, {"poison": {"value": 0, "reason": "no time was left"}})
        path, missed = tmp_path / "report.json", tmp_path / "missed.json"
        path.write_text(joining.as_text(report))
        missed.write_text(json.dumps(stated))
        assert validate(path, missed) == 0
        assert "NO VALUE poison: None, no time was left" in capsys.readouterr().out
    samples = samples_of("poison")
    samples["exact.bf16"]["full"]["decode"]["differing"] = 3
    report["points"]["poison"] = joining.entry("poison", samples, [], 1.0, [])
    assert problems(report, stated) == ["poison: stated as not measured, but the report holds 3"]


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
    every = [name for group in processes(("first", "alone", "together", "last")) for name in group]
    assert sorted(every) == sorted(SECTIONS)
    for group in GROUPS:
        assert len({SECTIONS[name].stage for name in group}) == 1, group
    order = processes(("together",))
    assert order.index(("suite.engine",)) < order.index(("suite.mhc",))  # who takes longest begins first
    assert ("exact",) in processes(("together",), ("exact",))


def test_samples_of_several_processes_are_joined(tmp_path):
    """One process failed, one left half of its samples, one ended well: nothing passes that was not measured."""
    chosen = {name: SECTIONS[name] for name in ("references", "prewarm_off", "cold_key")}
    recorded = {
        "references": {"samples": {"references_nll": {"0": 1e-6}}, "kernels": ["a"], "warm_keys": [["x", 1]]},
        "prewarm_off": {
            "samples": {"prewarm_off": samples_of("prewarm_off")},
            "kernels": ["b"],
            "warm_keys": [],
            "machine": {"gpu": "GPU"},
        },
    }
    for name, found in recorded.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"errors": {}, "seconds": {}} | found))
    outcomes = {"references": ("killed after 9 s", 9.0), "prewarm_off": (None, 1.0)}
    made = joining.join(tmp_path, chosen, outcomes, seconds=1.0, started="now", described=f"{40 * 'b'}-dirty")
    assert made["gpu"] == "GPU" and made["triton"] is None
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
        ("first_request", {"full": {"awake_s": [1.0], "request_s": [[1.0]]}}, "samples must hold eager/awake_s"),
        ("gpu_tests", {"mhc": {"passed": 1, "failed": 0, "errors": 0}}, "samples must hold mhc/functions"),
        ("prewarm_before_capture", {"nano": {"events": ["capture"] * 12}}, "must hold a prewarm and a capture"),
        ("prewarm_before_capture", {"nano": {"events": ["prewarm", "capture"]}}, "events must be at least 12, got 2"),
        ("whole_run_s", {"seconds": {}}, "samples must hold seconds, got an empty one"),
    ):
        with pytest.raises(SampleError, match=message):
            POINTS[name].judge(samples)
    late = {"nano": {"events": ["capture", "prewarm", *["capture"] * 10]}}
    assert POINTS["prewarm_before_capture"].judge(late) == (1, False)
    bytes_differ = samples_of("ops")
    bytes_differ["quant_fp8"]["triton.nano.float32"]["0.bytes_differ"] = 0.1
    assert POINTS["ops"].judge(bytes_differ) == (FAILED, False)


def test_tests_that_did_not_run_are_seen():
    parts = samples_of("gpu_tests")
    parts["rest"]["collected"] += 1
    assert POINTS["gpu_tests"].judge(parts) == (1, False)  # it was ended before its last test
    parts["rest"]["skipped"] = 1
    assert POINTS["gpu_tests"].judge(parts) == (1, False)
    parts["rest"]["passed"] -= 1
    with pytest.raises(SampleError, match="passed tests of rest must be those of its functions"):
        POINTS["gpu_tests"].judge(parts)


@pytest.mark.slow
def test_functions_of_the_suite_are_those_that_pytest_collects():
    """Read from the sources they are fewer to import; both ways must find the same."""
    arguments = ["-m", "gpu", "--collect-only", "-o", "addopts=", "-q", "-p", "no:cacheprovider"]
    files = [name for part in suites.PARTS for name in suites.files(part)]
    command = [sys.executable, "-m", "pytest", *arguments, *(f"--deselect={n}" for n in suites.MEASURED), *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = {suites.name_of(line) for line in done.stdout.splitlines() if "::" in line}
    assert found == {name for part in suites.PARTS for name in suites.functions(part)}, done.stdout


def test_names_lead_to_functions():
    """Sections and children are named by text: each must be what the run can call."""
    for section in SECTIONS.values():
        signature = inspect.signature(section.load(Place(dry=True)).func)
        given = {"place", "record", *section.arguments, *(["prepared"] if section.prepare else [])}
        assert set(signature.parameters) == given, section
        assert not section.prepare or callable(getattr(children, section.prepare))
    for name in FUNCTIONS.values():
        module, _, function = name.partition(".")
        assert callable(getattr(import_module(f"tools.gpu_check.{module}"), function))
    assert tuple(OFFICIAL_KINDS) == tuple(KINDS)


def test_a_run_starts_without_torch():
    """Its processes begin to import at once: so must whatever starts them."""
    program = "import sys, tools.gpu_check.report, tools.gpu_check.children; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


# ---- the suite -------------------------------------------------------------------------------------------------------


def test_every_file_with_a_gpu_test_is_in_one_part():
    found = [name for part in suites.PARTS for name in suites.files(part)]
    assert len(found) == len(set(found)) and all((ROOT / name).is_file() for name in found)
    assert "tests/test_gpu_steps.py" in suites.files("rest") and "tests/test_chat.py" not in found
    for name in suites.MEASURED:
        file, _, test = name.partition("::")
        function, _, case = test.strip("]").partition("[")
        marks = getattr(import_module(file.removesuffix(".py").replace("/", ".")), function).pytestmark if case else []
        cases = [each.__name__ for mark in marks if mark.name == "parametrize" for each in mark.args[1]]
        assert file in found and (case in cases or not case and f"def {function}(" in (ROOT / file).read_text()), name


def test_outcomes_are_written_down_test_by_test(tmp_path):
    (tmp_path / "test_a.py").write_text(
        "import pytest\n"
        "@pytest.fixture\ndef broken():\n    yield\n    raise ValueError('after')\n"
        "def test_good(): pass\ndef test_bad(): assert 1 == 2\ndef test_torn(broken): pass\n"
        "def test_skipped(): pytest.skip('no reason')\n"
    )
    program = (
        "import sys, types, pytest\nfrom tools.gpu_check.suites import Outcomes\nwritten = []\n"
        "one = Outcomes(types.SimpleNamespace(write=lambda: written.append(one.found['passed'])))\n"
        f"pytest.main(['-q', '-p', 'no:cacheprovider', '--rootdir={tmp_path}', {str(tmp_path)!r}], plugins=[one])\n"
        "print(); print('found', (one.found, len(written)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    found, written = ast.literal_eval(next(x for x in done.stdout.splitlines() if x.startswith("found "))[6:])
    names = found.pop("names")
    assert found.pop("functions") == {"test_a.test_good": 1, "test_a.test_torn": 1}
    assert found == {"collected": 4, "passed": 2, "failed": 1, "errors": 1, "skipped": 1} and written >= 4, done.stdout
    assert names[0].startswith("test_a.py::test_bad failed: E ") and "after" in names[1] and "skipped" in names[2]
