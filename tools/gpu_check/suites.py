"""``pytest -m gpu`` in parts that run in parallel, inside their sections' processes.

What a test left is recorded as soon as it ends, so that a part that is stopped says how far it came.
"""

import ast
import sys
from typing import TYPE_CHECKING, Any

from .place import ROOT, Place

if TYPE_CHECKING:
    from .common import Record

_NAMED: dict[str, tuple[str, ...]] = {
    "mhc": ("tests/gpu/test_mhc_tilelang.py",),
    "deep_gemm": ("tests/gpu/test_deep_gemm.py",),
    "experts": ("tests/gpu/test_expert_formats.py", "tests/gpu/test_expert_memory.py"),
    "capture": ("tests/graphs/test_capture_device.py",),
    "engine": ("tests/graphs/test_gpu_engine.py",),
}
PARTS = (*_NAMED, "rest")
"""Parts of the suite; whatever has a GPU test and is not named belongs to the last."""
_ENGINE = "tests/graphs/test_gpu_engine.py::test_device_"
_CASES = "tests/test_gpu_cases.py::test_"
MEASURED = (
    *(f"{_CASES}case[{case}]" for case in ("c1", "c3", "c5", "c6", "c8", "c12")), f"{_CASES}c11",
    f"{_ENGINE}replay_is_eager_on_the_same_padded_batch", f"{_ENGINE}replay_is_the_unpadded_call_when_deterministic",
    f"{_ENGINE}poison_changes_nothing", f"{_ENGINE}rows_alone_and_among_others",
)  # fmt: skip
"""Tests whose functions other sections call too, with more requests, rows and settings, for points of the report
(``case_*``, ``replay_*``, ``poison``, ``batch_independence``): not run a second time. Names are beginnings."""
_SLOW_S = 1.0
_STACKS_AFTER_S = 60  # a test that takes longer shows where it is
OUTCOMES = ("passed", "failed", "errors", "skipped")


def files(part: str) -> list[str]:
    """Test files of a part, relative to the repository. Files without a GPU test would only cost their import."""
    if part != "rest":
        return list(_NAMED[part])
    named = {file for each in _NAMED.values() for file in each}
    every = (path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text())
    return [name for name in (path.relative_to(ROOT).as_posix() for path in every) if name not in named]


def functions(part: str) -> list[str]:
    """Functions of a part that need a GPU, as :class:`Outcomes` names them, without those of :data:`MEASURED`.

    Read from the sources, so that a report can be judged without importing the tests.
    """
    found = []
    for file in files(part):
        tree = ast.parse((ROOT / file).read_text())
        whole = any("mark.gpu" in ast.unparse(node) for node in tree.body if _assigns(node, "pytestmark"))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                marked = whole or any("mark.gpu" in ast.unparse(each) for each in node.decorator_list)
                if marked and not f"{file}::{node.name}".startswith(MEASURED):
                    found.append(name_of(f"{file}::{node.name}"))
    return found


def name_of(test: str) -> str:
    """The function of a test as pytest names it, with its module: what needs no slash."""
    return test.partition("[")[0].replace(".py::", ".").replace("/", ".")


def _assigns(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets)


def suite(place: Place, record: "Record", part: str) -> None:
    """One part; names of tests that did not pass go into the samples, slow ones into the details."""
    import pytest

    marks, where = ("not gpu and not slow", ["tests/ops/test_formats.py"]) if place.dry else ("gpu", files(part))
    options = ["-m", marks, "-q", "-rfE", "--durations=0", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    options += ["-o", f"faulthandler_timeout={_STACKS_AFTER_S}", *(f"--deselect={name}" for name in MEASURED)]
    with record.block("gpu_tests") as (samples,):
        outcomes = Outcomes(record)
        samples[part] = outcomes.found
        record.samples["suite_seconds"] = {part: outcomes.slow}
        code = pytest.main([*options, *(str(ROOT / name) for name in where)], plugins=[outcomes])
        sys.stdout.flush()
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            raise RuntimeError(f"pytest must run its tests, got {code!r}")


class Outcomes:
    """A plugin of pytest that counts outcomes in ``found`` and writes them down test by test.

    ``functions`` holds the passed tests of each, which a report must name; ``names`` whatever did not pass.
    """

    def __init__(self, record: "Record") -> None:
        self.found: dict[str, Any] = dict.fromkeys(("collected", *OUTCOMES), 0) | {"functions": {}}
        self.slow: dict[str, float] = {}
        self._record = record

    def pytest_collection_finish(self, session: Any) -> None:
        self.found["collected"] = len(session.items)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test passes in its call; it can fail or be skipped in any of its phases, and anew in its teardown."""
        if report.passed:
            self._count("passed" if report.when == "call" else None, report)
        elif report.skipped:
            self._count("skipped", report)
        else:
            self._count("failed" if report.when == "call" else "errors", report)

    def pytest_collectreport(self, report: Any) -> None:
        if not report.passed:
            self._count("skipped" if report.skipped else "errors", report)

    def _count(self, outcome: str | None, report: Any) -> None:
        if outcome is not None:
            self.found[outcome] += 1
            if outcome != "passed":
                names = self.found.setdefault("names", [])
                names.append(f"{report.nodeid} {outcome}: {_reason(report)}"[:200])
            else:
                function = name_of(report.nodeid)
                self.found["functions"][function] = self.found["functions"].get(function, 0) + 1
        seconds = getattr(report, "duration", 0.0)
        if seconds >= _SLOW_S:
            self.slow[f"{report.nodeid} {getattr(report, 'when', 'collect')}"] = round(seconds, 1)
        self._record.write()


def _reason(report: Any) -> str:
    lines = str(report.longrepr).strip().splitlines()
    return next((line for line in reversed(lines) if line.startswith("E ")), lines[-1] if lines else "").strip()
