"""The order in which a run of the GPU report gives its processes their turns, and what happens when time is over."""

import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from tools.gpu_check import running
from tools.gpu_check.place import DEEP_GEMM_CACHE, Place, shared_caches
from tools.gpu_check.running import NOT_BEGUN, Run, run_stages
from tools.gpu_check.runs import SWEEPS
from tools.gpu_check.sections import Section, processes

PROGRAM = """
import json, os, pathlib, sys, time
out, ready, names, seconds = sys.argv[1:]
made = {"imported": time.time()}
pathlib.Path(ready).touch()
if not sys.stdin.readline():
    sys.exit(1)
for name in names.split():
    made["began"] = time.time()
    time.sleep(float(seconds))
    kernels = pathlib.Path(os.environ["DG_JIT_CACHE_DIR"], "cache")
    kernels.mkdir(parents=True, exist_ok=True)
    (kernels / name).touch()
    if name == "bad":
        sys.exit(7)
    path = pathlib.Path(out, name + ".json")
    path.write_text(json.dumps(made | {"ended": time.time(), "finished": True}))
"""
STAGES = {
    "prewarm": "first", "speed": "alone", "flash": "alone", "a": "together", "b": "together", "bad": "together",
    "c": "together", "d": "together", "requests": "last",
}  # fmt: skip


class ShortRun(Run):
    """Processes that import nothing and sleep instead of measuring."""

    seconds_of: dict[str, float] = {}

    def command(self, names: tuple[str, ...], ready: Path) -> list[str]:
        seconds = self.seconds_of.get(names[0], 0.05)
        return [sys.executable, "-S", "-c", PROGRAM, str(self.out), str(ready), " ".join(names), str(seconds)]


@pytest.fixture
def run(tmp_path, monkeypatch) -> ShortRun:
    sections = {name: Section("none.none", (), stage) for name, stage in STAGES.items()}
    monkeypatch.setattr(running, "SECTIONS", sections)
    monkeypatch.setattr(running, "TOGETHER", 2)
    monkeypatch.setattr(running, "AHEAD", 1)
    monkeypatch.setattr(
        running, "processes", lambda stages, only: [(name,) for name, s in sections.items() if s.stage in stages]
    )
    return ShortRun(Place(cache=tmp_path / "caches"), tmp_path)


def times(run: ShortRun) -> dict[str, dict[str, float]]:
    return {name: json.loads(path.read_text()) for name in STAGES if (path := run.out / f"{name}.json").exists()}


def test_turns(run):
    run.seconds_of = {"a": 1, "d": 1}
    run_stages(run, ())
    found = times(run)
    assert run.outcomes.pop("bad")[0] == "ended with 7" and not run.alive
    assert {name: error for name, (error, _) in run.outcomes.items()} == dict.fromkeys(set(STAGES) - {"bad"})
    assert max(found[name]["imported"] for name in ("prewarm", "speed", "flash")) < found["prewarm"]["began"]
    for one, other in (("prewarm", "speed"), ("speed", "flash"), ("flash", "a"), ("a", "requests"), ("d", "requests")):
        assert found[one]["ended"] <= found[other]["began"], (one, other, found)
    assert (
        found["a"]["imported"] < found["flash"]["ended"] + 0.5 and found["requests"]["imported"] < found["d"]["ended"]
    )
    moments = [(found[name]["began"], 1) for name in "abcd"] + [(found[name]["ended"], -1) for name in "abcd"]
    at_once = most = 0
    for _, change in sorted(moments):
        at_once += change
        most = max(most, at_once)
    assert most == 2  # no more than TOGETHER, although three are ready


def test_the_prewarms_deep_gemm_kernels_are_kept(run, monkeypatch):
    """A copy holds what the first stage compiled and nothing later; who wants a cache of its own begins with that."""
    run_stages(run, ())
    shared = Path(shared_caches(run.place)[DEEP_GEMM_CACHE])
    assert {path.name for path in shared.rglob("*") if path.is_file()} == set(STAGES)
    monkeypatch.setenv(DEEP_GEMM_CACHE, str(shared))
    own = run.place.own_deep_gemm_cache("one")
    assert Path(os.environ[DEEP_GEMM_CACHE]) == own != run.place.prewarmed
    assert [path.name for path in own.rglob("*") if path.is_file()] == ["prewarm"]
    (own / "cache" / "more").touch()
    other = run.place.own_deep_gemm_cache("other")
    assert [path.name for path in other.rglob("*") if path.is_file()] == ["prewarm"]


def test_without_a_prewarm_an_own_deep_gemm_cache_is_empty(tmp_path, monkeypatch):
    """Single sections; and a process that may have read the variable already is refused."""
    monkeypatch.setenv(DEEP_GEMM_CACHE, "elsewhere")
    place = Place(cache=tmp_path)
    place.keep_prewarmed()
    own = place.own_deep_gemm_cache("flash.full.libraries")
    assert list(own.iterdir()) == [] and os.environ[DEEP_GEMM_CACHE] == str(own)
    monkeypatch.setitem(sys.modules, "deep_gemm", ModuleType("deep_gemm"))
    with pytest.raises(RuntimeError, match="of one must be chosen before deep_gemm is imported, got it after"):
        place.own_deep_gemm_cache("one")


def test_sweeps_of_libraries_have_processes_of_their_own():
    """Whoever ran before one in its process would have imported DeepGEMM."""
    every = processes(("together",))
    sweeps = [names for names in every if any(n.startswith("sweep.") and n.endswith("libraries") for n in names)]
    assert sorted(sweeps) == [(f"sweep.{run}",) for run in sorted(SWEEPS) if run.endswith("libraries")]


def test_the_last_stage_keeps_its_time(run, monkeypatch):
    """What runs together is stopped, or does not begin, so that those that come last still measure."""
    run.seconds_of = {"a": 60, "b": 60}
    began = time.perf_counter()
    run_stages_began = run.seconds()
    monkeypatch.setattr(running, "TOGETHER_BEGIN_S", run_stages_began + 2)
    monkeypatch.setattr(running, "TOGETHER_END_S", run_stages_began + 3)
    run_stages(run, ())
    assert time.perf_counter() - began < 20
    assert all(run.outcomes[name][0].startswith("killed after") for name in "ab")
    assert all(run.outcomes[name] == (NOT_BEGUN, 0.0) for name in "cd")
    assert run.outcomes["requests"][0] is None and "ended" in times(run)["requests"]


def test_a_section_that_takes_too_long_is_killed(run, monkeypatch):
    run.seconds_of = {"speed": 60}
    monkeypatch.setitem(running.SECTIONS, "speed", Section("none.none", (), "alone", 1))
    run_stages(run, ())
    error, taken = run.outcomes["speed"]
    assert error == "killed after 1 s" and 1 <= taken < 5 and run.outcomes["flash"][0] is None


def test_what_a_process_finished_before_it_was_killed_counts(run, monkeypatch):
    run.seconds_of = {"speed": 1.0}
    for name in ("speed", "flash"):
        monkeypatch.setitem(running.SECTIONS, name, Section("none.none", (), "alone", 1.8))
    one = run.start(("speed", "flash"))
    run.finish(one)
    assert run.outcomes["speed"][0] is None and run.outcomes["flash"][0] == "killed after 2 s", run.outcomes


def test_a_process_that_never_gets_ready_is_given_up(run, monkeypatch):
    monkeypatch.setattr(running, "PREPARE_S", 1)
    command = run.command
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    run.command = lambda names, ready: sleep if names == ("speed",) else command(names, ready)
    run_stages(run, ())
    assert run.outcomes["speed"] == ("not ready after 1 s", 0.0) and run.outcomes["requests"][0] is None


def test_stopping_ends_all(run):
    run.seconds_of = {"prewarm": 60}
    one = run.start(("prewarm",))
    run.wait_ready([one])
    one.go()
    run.stop()
    assert one.process.returncode == -9 and run.outcomes["prewarm"][0] == "the run was stopped" and not run.alive
