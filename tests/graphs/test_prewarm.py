"""The prewarm of one process: each cold key once, once per decision, and what it refuses; and how it shows progress."""

import importlib
import io
import json
import threading
import time
from datetime import timedelta

import filelock
import pytest
import torch
from rich.console import Console

from dsv4 import ops
from dsv4.graphs.jit_monitor import JitMonitor, KeyCounts
from dsv4.graphs.prewarm import PrewarmError
from dsv4.graphs.warmer import PrewarmProgress
from dsv4.ops.shapes import nano
from dsv4.prewarm_progress import stage_progress

from .rank_programs import FakeKernels

module = importlib.import_module("dsv4.graphs.prewarm")
NO_LIBRARIES = {"triton": "not part of this test", "tilelang": "not part of this test"}


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(module, "_done", {})


@pytest.fixture
def kernels(tmp_path) -> FakeKernels:
    return FakeKernels(tmp_path / "kernels", 0.0)


def test_runs_every_distinct_cold_key_once(kernels):
    kernels.warm.add(("b", 2))
    report = kernels.prewarm([("a", 1), ("b", 2), ("a", 1), ("c", "x")])
    assert kernels.run_keys == [("a", 1), ("c", "x")]
    assert kernels.warm == {("a", 1), ("b", 2), ("c", "x")}
    assert report.keys == (("a", 1), ("b", 2), ("c", "x")) and report.skipped == (("b", 2),)
    assert list(report.seconds) == [("a", 1), ("c", "x")] and all(s >= 0 for s in report.seconds.values())
    assert (report.enabled, report.repeated, report.device, report.jit) == (True, False, "cpu", None)
    assert json.loads(json.dumps(report.to_dict()))["skipped"] == ["b/2"]


def test_no_case_is_an_error(kernels):
    for enabled in (True, False):
        with pytest.raises(ValueError, match="prewarm must have at least 1 case, got 0: no op recognised the model"):
            kernels.prewarm([], enabled=enabled)


def test_once_per_decision_and_device(kernels, monkeypatch):
    monkeypatch.setattr(module, "_indexed", lambda device: device)  # "meta" stands for a second device
    keys = [("a", 1)]
    first = kernels.prewarm(keys, settings={"hidden": 1})
    kernels.warm.clear()  # even then: the decision is known
    again = kernels.prewarm(keys, settings={"hidden": 1})
    assert (first.repeated, again.repeated, again.decision) == (False, True, first.decision)
    assert len(kernels.run_keys) == 1
    other = kernels.prewarm(keys, settings={"hidden": 2})
    assert not other.repeated and other.decision != first.decision and len(kernels.run_keys) == 2
    assert ("a", 1) in kernels.warm
    here, kernels.warm = kernels.warm, set()
    elsewhere = kernels.prewarm(keys, settings={"hidden": 1}, device="meta")  # warm, but not there
    assert not elsewhere.repeated and elsewhere.skipped == () and len(kernels.run_keys) == 3
    assert kernels.prewarm(keys, settings={"hidden": 3}, device="meta").skipped == (("a", 1),)
    kernels.warm = here
    more = kernels.prewarm([*keys, ("b", 2)], settings={"hidden": 1})
    assert not more.repeated and more.skipped == (("a", 1),) and kernels.run_keys[3:] == [("b", 2)]


def test_the_switch_runs_nothing_and_does_not_count_as_done(kernels):
    off = kernels.prewarm([("a", 1)], enabled=False)
    assert kernels.run_keys == [] and kernels.warm == set() and off.seconds == {} and not off.enabled
    on = kernels.prewarm([("a", 1)])
    assert not on.repeated and kernels.run_keys == [("a", 1)] and on.decision != off.decision
    assert kernels.prewarm([("a", 1)], enabled=False).repeated is False


def test_a_failing_case_is_named_and_nothing_counts_as_done(kernels):
    def run(case):
        if case.key == ("b", 2):
            raise RuntimeError("ptxas died")
        return kernels.run(case)

    keys = [("a", 1), ("b", 2), ("c", 3)]
    with pytest.raises(PrewarmError, match="prewarm of b/2 must succeed, got RuntimeError: ptxas died") as error:
        kernels.prewarm(keys, run=run)
    assert str(error.value.__cause__) == "ptxas died"
    assert kernels.warm == {("a", 1)} and kernels.run_keys == [("a", 1)]
    report = kernels.prewarm(keys)
    assert not report.repeated and kernels.warm == set(keys) and report.skipped == (("a", 1),)


def test_refused_during_capture(kernels, monkeypatch):
    """The guard's logic; that a capturing stream is recognised can only be shown on a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="outside stream capture, .* call it after loading the weights, before the"):
        kernels.prewarm([("a", 1)], compile_ahead=lambda show: kernels.run_keys.append(("ahead",)))
    assert kernels.run_keys == []


def test_compiling_ahead_is_a_part_of_the_prewarm(kernels):
    """After the agreement, before the keys, inside the monitor; not again, and not if nothing is to run."""
    total, shown, order = {}, [], []

    def ahead(show):
        order.append(list(kernels.run_keys))
        total["x"] = KeyCounts(1, 0, 0.5)
        show(PrewarmProgress("x", "compiled", 1, 1, 0.5))
        time.sleep(0.2)

    options = {
        "compile_ahead": ahead, "progress": shown.append,
        "monitor": lambda: JitMonitor(libraries=NO_LIBRARIES, counters={"fake": lambda: total}),
    }  # fmt: skip
    kernels.prewarm([("a", 1)], enabled=False, **options)
    assert order == []
    report = kernels.prewarm([("a", 1)], **options)
    assert order == [[]] and report.jit.total("fake") == KeyCounts(1, 0, 0.5) and report.wall_seconds >= 0.2
    assert [(event.key, event.state) for event in shown] == [("x", "compiled"), ("a/1", "started"), ("a/1", "done")]
    assert kernels.prewarm([("a", 1)], **options).repeated and len(order) == 1


def test_refused_arguments(kernels):
    for key in ("a", (), ("a", 1.5), ("a", True), ("a", ("b",))):
        with pytest.raises(ValueError, match="key of fake must be a tuple of strings and integers, got"):
            kernels.prewarm([key])
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        kernels.prewarm([("a", 1)], workers=0)
    with pytest.raises(ValueError, match="settings must be JSON-ready, got"):
        kernels.prewarm([("a", 1)], settings={"dtype": torch.float32})


def test_workers_share_the_keys(kernels):
    kernels.seconds = 0.2
    keys = [("k", n) for n in range(6)]
    inside, most, mutex, grads = set(), [0], threading.Lock(), set()

    def run(case):
        with mutex:
            inside.add(case.key)
            most[0] = max(most[0], len(inside))
            grads.add(torch.is_grad_enabled())
        kernels.run(case)
        with mutex:
            inside.discard(case.key)

    report = kernels.prewarm(keys, run=run, workers=3)
    assert sorted(kernels.run_keys) == keys and kernels.warm == set(keys)
    assert most[0] == 3 and grads == {False}
    assert sum(report.seconds.values()) >= 6 * 0.2  # each key's own, three at a time
    assert list(report.seconds) == keys
    with pytest.raises(PrewarmError, match="prewarm of bad must succeed"):
        kernels.prewarm([("bad",), *keys], run=lambda case: 1 // 0, workers=2)


def test_a_key_that_another_process_compiles_comes_last(kernels):
    """What is busy is put off; the rest does not wait for it."""
    events: list[PrewarmProgress] = []
    other = {}

    def progress(event: PrewarmProgress) -> None:
        events.append(event)
        if event.state == "waiting":
            other["timer"] = threading.Timer(0.3, other["lock"].release)
            other["timer"].start()

    locks = kernels.directory / "locks"
    locks.mkdir()
    kernels.prewarm([("busy", 1)], enabled=True)
    (path,) = locks.iterdir()
    kernels.warm.clear()
    kernels.run_keys.clear()
    other["lock"] = filelock.FileLock(path, thread_local=False)
    other["lock"].acquire()
    report = kernels.prewarm([("busy", 1), ("a", 1), ("b", 2)], progress=progress)
    assert kernels.run_keys == [("a", 1), ("b", 2), ("busy", 1)]
    assert report.lock_seconds >= 0.25 and report.seconds["busy", 1] < 0.25
    assert [(e.key, e.state, e.num_done) for e in events] == [
        ("a/1", "started", 0), ("a/1", "done", 1), ("b/2", "started", 1), ("b/2", "done", 2),
        ("busy/1", "waiting", 2), ("busy/1", "started", 2), ("busy/1", "done", 3),
    ]  # fmt: skip
    assert {e.num_keys for e in events} == {3}


def test_a_lock_that_stays_taken_is_an_error(kernels):
    kernels.prewarm([("busy", 1)])
    (path,) = (kernels.directory / "locks").iterdir()
    kernels.warm.clear()
    with (
        filelock.FileLock(path),
        pytest.raises(PrewarmError, match="prewarm of busy/1 .* must be free within 0:00:00.2"),
    ):
        kernels.prewarm([("busy", 1)], settings={"n": 2}, timeout=timedelta(seconds=0.2))


def test_the_monitor_is_in_the_report(kernels):
    total = {}

    def run(case):
        total[str(case.key)] = KeyCounts(1, 0, 0.5)

    total["before"] = KeyCounts(7, 7, 7.0)
    monitor = JitMonitor(libraries=NO_LIBRARIES, counters={"fake": lambda: total})
    report = kernels.prewarm([("a", 1), ("b", 2)], run=run, monitor=lambda: monitor)
    assert report.jit.total("fake") == KeyCounts(2, 0, 1.0)
    assert set(report.jit.libraries["fake"]) == {"('a', 1)", "('b', 2)"}
    assert set(report.to_dict()["jit"]["absent"]) == {"triton", "tilelang"}


def test_the_cases_of_the_ops(tmp_path):
    """The registry's cases fit as they are: the references of every op run, each under its key."""
    cases = [c for spec in ops.specs().values() for c in spec.prewarm_cases(nano, torch.device("cpu"), 2)]
    ran, warm = [], set()

    def run(case):
        args, kwargs = case.arguments()
        ops.spec(case.op).overload(*args, **kwargs)
        ran.append(case.op)

    chosen = [c for c in cases if c.op in ("rms_norm", "mhc_pre", "mhc_post")]
    report = module.prewarm(
        lambda: chosen, run=run, is_warm=warm.__contains__, mark_warm=warm.add, lock_dir=tmp_path,
        settings={"shape": nano.name}, device="cpu",
    )  # fmt: skip
    assert sorted(ran) == ["mhc_post", "mhc_pre", "rms_norm"] and warm == set(report.keys) == {c.key for c in chosen}


# --- progress -------------------------------------------------------------------------------------------------------


def test_progress_lines():
    out = io.StringIO()
    with stage_progress("prewarm", Console(file=out, force_terminal=False)) as show:
        show(PrewarmProgress("linear/[4096]/bf16", "started", 0, 2, 0.0))
        show(PrewarmProgress("linear/[4096]/bf16", "done", 1, 2, 2.34))
    lines = ["prewarm 0/2 started linear/[4096]/bf16", "prewarm 1/2 done linear/[4096]/bf16 2.3 s"]
    assert out.getvalue().splitlines() == lines


def test_progress_bar():
    out = io.StringIO()
    with stage_progress("prewarm", Console(file=out, force_terminal=True, width=120)) as show:
        show(PrewarmProgress("rms_norm/64", "waiting", 1, 3, 0.0))
    assert "1/3" in out.getvalue() and "rms_norm/64 (another process compiles it)" in out.getvalue()
