"""The prewarm: agreement of the ranks, one compilation per key and machine, once per decision, and what it refuses."""

import importlib
import io
import json
import threading
import time
from collections import Counter
from datetime import timedelta

import filelock
import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from dsv4 import ops
from dsv4.graphs.jit_monitor import JitMonitor, KeyCounts
from dsv4.graphs.prewarm import PrewarmError
from dsv4.graphs.ranks import Ranks
from dsv4.graphs.warmer import PrewarmProgress
from dsv4.ops.shapes import nano
from dsv4.prewarm_progress import stage_progress

from .rank_programs import (
    FakeKernels,
    decisions,
    one_rank_anew,
    run_ranks,
    same_triton_key,
    shared_keys,
    shared_parts,
    skewed_compile,
    switched_off,
)

module = importlib.import_module("dsv4.graphs.prewarm")
NO_LIBRARIES = {"triton": "not part of this test", "tilelang": "not part of this test"}


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(module, "_done", {})


@pytest.fixture
def kernels(tmp_path) -> FakeKernels:
    return FakeKernels(tmp_path / "kernels", 0.0)


# --- one process ----------------------------------------------------------------------------------------------------


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


# --- ranks ----------------------------------------------------------------------------------------------------------


def test_missing_ranks_are_named():
    store = dist.HashStore()
    ranks = Ranks(0, 3, store, timedelta(seconds=0.2))
    other = threading.Thread(target=_ignoring_timeout, args=(Ranks(1, 3, store, timedelta(seconds=0.1)),))
    other.start()
    with pytest.raises(TimeoutError, match=r"every rank must reach 'warm' within 0 s, got none from ranks \[2\]"):
        ranks.exchange("warm", 0)
    other.join()


def _ignoring_timeout(ranks: Ranks) -> None:
    with pytest.raises(TimeoutError):
        ranks.exchange("warm", 1)


def test_exchange_returns_all_values_by_rank():
    store, found = dist.HashStore(), {}

    def rank(number: int) -> None:
        for turn in range(3):  # rounds do not read each other's values
            ranks = Ranks(number, 3, store, timedelta(seconds=20))
            found[number, turn] = (ranks.exchange("a", [number, turn]), ranks.exchange("b", {"rank": number}))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 9
    for (_, turn), (first, second) in found.items():
        assert first == [[0, turn], [1, turn], [2, turn]] and second == [{"rank": 0}, {"rank": 1}, {"rank": 2}]


def test_refused_ranks():
    with pytest.raises(ValueError, match="store must be given for a group of several ranks, got none for 2 ranks"):
        Ranks(0, 2, None, timedelta(seconds=1))
    with pytest.raises(ValueError, match="group must contain this process, got rank -1 of 2"):
        Ranks(-1, 2, dist.HashStore(), timedelta(seconds=1))


# --- processes ------------------------------------------------------------------------------------------------------


def test_skewed_compile(tmp_path):
    """One rank compiles longer than a collective may take: no rank enters a collective before all are warm."""
    limit = 2.0
    found = run_ranks(skewed_compile, 4, tmp_path, 2, limit)
    assert [f["total"] for f in found] == [6.0] * 4
    assert all(len(f["log"]) == 1 for f in found)
    last_warm = max(f["warm"] for f in found)
    assert found[2]["warm"] == last_warm and min(f["entered"] for f in found) >= last_warm
    assert all(f["wait_seconds"] > limit for rank, f in enumerate(found) if rank != 2)
    assert {f["rank_seconds"] for f in found} == {found[0]["rank_seconds"]}
    assert found[0]["rank_seconds"].index(max(found[0]["rank_seconds"])) == 2
    # Without the prewarm the same skew does break the collective.
    assert "RuntimeError" in {f["unguarded"] for f in found}


def test_ranks_that_decide_differently(tmp_path):
    found = run_ranks(decisions, 3, tmp_path)
    same = {name: {f[name] for f in found} for name in found[0] if isinstance(found[0][name], str)}
    head = "PrewarmError: every rank must prewarm the same as rank 0, got "
    assert same.pop("settings") == {head + "rank 2: settings.max_seq_len is 8192, not 4096"}
    assert same.pop("keys") == {head + "rank 1: adds keys c/3"}
    text = "lacks keys k/0, k/1, k/2, k/3, k/4 and 4 more; rank {0}: adds keys a/1, b/2"
    assert same.pop("many keys") == {head + "; ".join(f"rank {r}: {text.format(r)}" for r in (1, 2))}
    assert same.pop("none here") == {head + "rank 1: lacks keys a/1, b/2"}
    zero = "ValueError: prewarm must have at least 1 case, got 0: no op recognised the model, so nothing is warm"
    assert same.pop("none") == {zero}
    assert same.pop("switch") == {head + "rank 1: enabled is false, not true"}
    off = "rank 1: settings.seed is 1, not 0; rank 2: settings.seed is 1, not 0"
    assert same.pop("switch off") == {head + off}
    assert same.pop("bad argument") == {
        "ValueError: workers must be at least 1, got 0",
        "PrewarmError: every rank must be able to prewarm, got on rank 2: "
        "ValueError: workers must be at least 1, got 0",
    }
    assert same.pop("no cases") == {
        "ValueError: a library must be installed, got none",
        "PrewarmError: every rank must be able to prewarm, got on rank 1: "
        "ValueError: a library must be installed, got none",
    }
    assert all(f["ran before agreement"] == [] for f in found)
    own = "prewarm of b/2 must succeed, got RuntimeError: no such instruction"
    assert found[1]["failure"] == f"PrewarmError: {own}"
    assert found[0]["failure"] == found[2]["failure"] == f"PrewarmError: every rank must be warm, got rank 1: {own}"
    same.pop("failure")
    late = {"TimeoutError: lock must be free", "PrewarmError: every rank must be warm, got rank 2: lock must be free"}
    assert same.pop("ahead") == late
    assert same == {"all well": {"passed"}}
    assert all(f["run"] == f["run again"] == [("a", 1), ("b", 2)] and f["repeated"] for f in found)


def test_the_switch_keeps_the_meeting(tmp_path):
    found = run_ranks(switched_off, 2, tmp_path)
    assert found[0]["left"] >= found[1]["entered"] > found[0]["entered"] + 0.3
    assert all(f["run"] == [] and f["report"]["seconds"] == {} for f in found)
    assert found[0]["report"]["decision"] == found[1]["report"]["decision"]
    assert all(f["report"]["rank_seconds"] == [0.0, 0.0] for f in found)  # exchanged at the end


def test_a_repeated_call_waits_for_a_rank_that_is_not_warm(tmp_path):
    found = run_ranks(one_rank_anew, 2, tmp_path)
    assert [f["repeated"] for f in found] == [True, False]
    assert found[0]["wait"] > 0.5
    assert all(f["rank_seconds"][1] > 0.7 for f in found)


def test_one_compilation_per_key_and_machine(tmp_path):
    """Four processes, one cold Triton key, at the same moment: one compiles, three load, all get the same binary."""
    found = run_ranks(same_triton_key, 4, tmp_path)
    assert Counter(f["counts"] for f in found) == {(1, 0): 1, (0, 1): 3}
    key = ("scale_rows", 64)
    assert {f["binaries"][key] for f in found} == {found[0]["binaries"][key]} and len(found[0]["binaries"][key]) > 100
    assert all(f["warm"] == {key} for f in found)


def test_processes_share_the_compilations(tmp_path):
    found = run_ranks(shared_keys, 3, tmp_path, 6)
    log = FakeKernels(tmp_path / "kernels").log
    assert sorted(line.split(")")[0] for line in log) == [f"('k', {n}" for n in range(6)]  # each key once
    assert len({line.split()[-2] for line in log}) > 1  # no process compiled them all
    assert all(sorted(f["run"]) == [("k", n) for n in range(6)] for f in found)  # but each ran them all


def test_processes_share_kernels_that_several_cases_launch(tmp_path):
    """The first cases of all processes need the same kernel at the same moment, under locks of different cases."""
    found = run_ranks(shared_parts, 3, tmp_path, 6)
    log = FakeKernels(tmp_path / "kernels").log
    keys = [*(f"('k', {n}" for n in range(6)), "('part', 0"]
    assert sorted(line.split(")")[0] for line in log) == keys  # each once, or one would have read half a binary
    assert all(set(f["run"]) == {("part", 0), *(("k", n) for n in range(6))} for f in found)
    assert max(f["lock_seconds"] for f in found) > 0.2
