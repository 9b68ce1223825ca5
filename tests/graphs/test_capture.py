"""Capture and replay. On the CPU: order, ownership, addresses, errors, with graphs of CPU tensors (``cpu_graphs.py``).

Whether a device accepts a capture, and that memory of a real pool is reused and freed, only the ``gpu`` tests show.
"""

import gc
import logging

import pytest
import torch

from dsv4.graphs import capture as capture_module
from dsv4.graphs.capture import MOST_DRIVER_BYTES, StepPath, frozen_gc
from dsv4.graphs.pieces import (
    CapturedPieces,
    CaptureError,
)

from . import toy_step as toy
from .cpu_graphs import CpuGraph, CpuGraphs, ready
from .toy_step import LADDER, STEPS, compare, no_prewarm

MODES = ("piecewise", "full")


# --- replay ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("debug", [False, True], ids=["", "debug"])
@pytest.mark.parametrize("mode", MODES)
def test_replay_is_the_eager_step(mode, debug):
    step, model = ready(mode=mode, debug=debug)
    compare(step, model, toy.Model())
    assert step.path_counts == {mode: len(STEPS)}


def test_boundaries_that_return_tensors():
    """Later graphs read what the boundary returned at capture, so a replay copies into that."""
    step, model = ready(toy.FUNCTIONAL, mode="piecewise")
    compare(step, model, toy.Model())
    assert {b.copied_outputs for b in step.report.buckets} == {3}


def test_capture_leaves_the_caches_alone():
    for mode in MODES:
        _, model = ready(mode=mode)
        assert all(map(torch.equal, model.caches(), toy.Model().caches()))


def test_a_step_without_rows():
    step, _ = ready(mode="piecewise")
    logits, streams = step(toy.make_inputs(0, 0, 0))
    assert logits.shape == (0, toy.VOCAB) and streams.shape == (0, toy.HIDDEN)
    assert step.last_path.bucket == LADDER.buckets[0]


def test_a_plain_function_is_one_graph():
    model = toy.Model()
    step = toy.captured(model, CpuGraphs())
    report = step.capture(no_prewarm)
    compare(step, model, toy.Model())
    assert {b.mode for b in report.buckets} == {"full"} and report.graphs == len(LADDER.buckets)
    step = toy.captured(model, CpuGraphs(), mode="piecewise")
    with pytest.raises(CaptureError, match="a piecewise capture needs a compiled model with pieces, got Model"):
        step.capture(no_prewarm)


def test_two_models_in_turn():
    pairs = []
    for seed in (0, 1):
        step, model = ready(model={"seed": seed}, mode=MODES[seed])
        pairs.append((step, model, toy.Model(seed)))
    for sizes in STEPS:
        for pair in pairs:
            compare(*pair, steps=[sizes])


# --- order ----------------------------------------------------------------------------------------------------------


def test_prewarm_then_every_warm_up_then_capture_largest_first(monkeypatch):
    graphs = CpuGraphs()
    step = toy.captured(toy.shared()[1], graphs, mode="piecewise")
    problems, capture = CapturedPieces.problems, CapturedPieces.capture

    def spy_problems(self, args):
        assert graphs.on_side_stream
        graphs.events.append(f"warm-up {args[0].ids.shape[0]}")
        return problems(self, args)

    def spy_capture(self, label, mode, args, watched=()):
        graphs.events.append(f"bucket {args[0].ids.shape[0]}")
        return capture(self, label, mode, args, watched)

    monkeypatch.setattr(CapturedPieces, "problems", spy_problems)
    monkeypatch.setattr(CapturedPieces, "capture", spy_capture)
    step.capture(lambda: graphs.events.append("prewarm"))
    sizes, per_bucket = (16, 8, 4, 1), ["capture"] * 4
    assert graphs.events == [
        "prewarm",
        *(f"warm-up {n}" for n in sizes),
        "settle",
        *(event for n in sizes for event in (f"bucket {n}", *per_bucket)),
    ]


def test_a_failing_prewarm_stops_the_stage():
    graphs = CpuGraphs()
    step = toy.captured(toy.shared()[1], graphs)

    def prewarm() -> None:
        raise RuntimeError("no kernel was warmed")

    with pytest.raises(RuntimeError, match="no kernel was warmed"):
        step.capture(prewarm)
    assert graphs.events == []


def test_no_garbage_collection_during_capture(monkeypatch):
    seen, capture = [], CpuGraph.capture

    def spy(self, fn):
        seen.append((gc.isenabled(), gc.get_freeze_count() > 0))
        return capture(self, fn)

    monkeypatch.setattr(CpuGraph, "capture", spy)
    assert gc.isenabled()
    ready()
    assert set(seen) == {(False, True)} and gc.isenabled() and gc.get_freeze_count() == 0
    gc.disable()
    try:
        with frozen_gc():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_progress_and_report():
    seen = []
    step = toy.captured(toy.shared()[1], CpuGraphs(), mode="piecewise")
    report = step.capture(no_prewarm, seen.append)
    assert tuple(seen) == report.buckets and report is step.report
    assert [b.bucket for b in seen] == list(LADDER.largest_first)
    assert {(b.mode, b.graphs, b.boundary_calls, b.copied_outputs) for b in seen} == {("piecewise", 4, 3, 0)}
    assert report.graphs == 16 and report.problems == ()
    assert min(report.capture_seconds, report.warm_up_seconds, *(b.seconds for b in seen)) > 0
    assert report.static_mib * 2**20 == step.inputs.nbytes()


def test_the_mode_may_depend_on_the_bucket():
    step, model = ready(mode=lambda bucket: "full" if bucket.tokens <= 4 else "piecewise")
    assert [b.mode for b in step.report.buckets] == ["piecewise", "piecewise", "full", "full"]
    compare(step, model, toy.Model())
    assert step.path_counts == {"full": 4, "piecewise": 5}


# --- ownership ------------------------------------------------------------------------------------------------------


def test_smaller_buckets_and_layers_share_the_memory_of_the_pool():
    (step, _), (deep, _) = (ready(model={"layers": n}, mode="piecewise") for n in (3, 6))
    assert step.report.buckets[0].mib > 0 and {b.mib for b in step.report.buckets[1:]} == {0}
    assert deep.report.mib == step.report.mib  # memory of a layer's buffers serves the next layer


def test_buffers_dropped_before_their_boundary_ran_are_noticed(monkeypatch):
    """The arena behind the tests has teeth: a capture that holds nothing for the boundary gives wrong numbers."""
    graph = CapturedPieces._graph

    def forgetful(self, *args):
        _, borrowed, run = graph(self, *args)
        return borrowed, borrowed, run

    monkeypatch.setattr(CapturedPieces, "_graph", forgetful)
    step, model = ready(mode="piecewise")
    with pytest.raises(AssertionError):
        compare(step, model, toy.Model())


def test_static_inputs_and_outputs_keep_their_addresses():
    step, _ = ready(mode="piecewise")
    first = {}
    for sizes in STEPS * 2:
        outputs = step(toy.make_inputs(*sizes))
        pointers = [o.data_ptr() for o in outputs]
        assert first.setdefault(step.last_path.bucket, pointers) == pointers


def test_close_frees_graphs_and_pool():
    step, model = ready(mode="piecewise")
    graphs, num_graphs, other = step._graphs, step.report.graphs, toy.Model()
    compare(step, model, other)
    step.close()
    assert graphs.events[-num_graphs - 1 :] == ["reset"] * num_graphs + ["release"]
    assert not graphs.graphs and not graphs.arena.live and step.report is None
    with pytest.raises(RuntimeError, match="a step must be captured before a replay, got no graphs"):
        step(toy.make_inputs(5, 2, 3))
    step.close()
    step.capture(no_prewarm)
    compare(step, model, other)


# --- paths ----------------------------------------------------------------------------------------------------------


def test_a_step_beyond_the_largest_bucket_runs_eagerly_and_says_so(caplog):
    (step, model), other = ready(mode="piecewise"), toy.Model()
    assert step.last_path is None
    with caplog.at_level(logging.DEBUG, logger=capture_module.__name__):
        compare(step, model, other, steps=[(17, 4, 2), (5, 2, 3), (9, 5, 1)])
    reason = "the step is beyond the largest bucket: 5 requests, at most 4"
    assert step.last_path == StepPath("eager", (9, 5, 1), None, reason)
    assert step.path_counts == {"eager": 2, "piecewise": 1}
    assert [r.getMessage() for r in caplog.records] == [
        "step of (17, 4, 2): eager, the step is beyond the largest bucket: 17 tokens, at most 16",
        "step of (5, 2, 3): piecewise, 8 tokens, 4 requests, 4 logit rows",
        f"step of (9, 5, 1): eager, {reason}",
    ]


def test_the_eager_path_is_always_there():
    step, other = toy.captured(toy.shared()[1], CpuGraphs()), toy.Model()
    with pytest.raises(RuntimeError, match=r"got no graphs: capture\(\) it, or use eager\(\)"):
        step(toy.make_inputs(1, 1, 1))
    inputs = toy.make_inputs(5, 2, 3)
    assert all(map(torch.equal, step.eager(inputs), other(inputs)))
    assert step.last_path == StepPath("eager", (5, 2, 3), None, "the caller asked for it")


# --- stages apart ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_trial_leaves_nothing_and_is_what_the_largest_bucket_takes(mode):
    (model, compiled), graphs, calls = toy.shared(), CpuGraphs(), []
    step, limit = toy.captured(compiled, graphs, mode=mode), graphs.arena.limit
    with pytest.raises(RuntimeError, match=r"a trial must come after warm_up\(\), got a step that is cold"):
        step.trial()
    step.warm_up(lambda: calls.append("prewarm"))
    trial = step.trial()
    assert graphs.events[-1] == "release" and not graphs.arena.live and graphs.free_bytes() == limit
    assert all(map(torch.equal, model.caches(), toy.Model().caches())) and step.report is None
    with pytest.raises(RuntimeError, match="a step must be captured before a replay"):
        step(toy.make_inputs(1, 1, 1))
    report = step.capture(lambda: calls.append("prewarm"))
    first = report.buckets[0]
    assert (trial.bucket, trial.graphs, trial.pool_bytes) == (first.bucket, first.graphs, first.mib * 2**20)
    assert trial.driver_bytes == 0 and report.device_mib == report.mib
    assert trial.expected_bytes(4) == report.mib * 2**20
    assert calls == ["prewarm"] * 2
    compare(step, model, toy.Model())
    with pytest.raises(RuntimeError, match="a step must be captured once, got 4 buckets"):
        step.trial()


def test_memory_that_another_process_takes_meanwhile_is_not_the_drivers(monkeypatch):
    graphs = CpuGraphs()
    step = toy.captured(toy.shared()[1], graphs)
    step.warm_up(no_prewarm)
    free = iter((100 << 30, 20 << 30, 100 << 30))  # and frees it before the trial is over
    monkeypatch.setattr(graphs, "free_bytes", lambda: next(free))
    trial = step.trial()
    assert trial.driver_bytes == MOST_DRIVER_BYTES
    assert trial.expected_bytes(20) == trial.pool_bytes + 20 * MOST_DRIVER_BYTES


@pytest.mark.parametrize("others", [(5000, 0), (0, 5000), (5000, -5000), (-5000, 5000)])
def test_other_users_of_the_device_do_not_enter_a_trial(monkeypatch, others):
    """Another process takes, or gives back, memory while the trial is captured or while it is freed."""
    graphs = CpuGraphs()
    step, own = toy.captured(toy.shared()[1], graphs), graphs.free_bytes
    step.warm_up(no_prewarm)
    expected = step.trial()
    taken = iter((0, others[0], others[0] - others[1]))
    monkeypatch.setattr(graphs, "free_bytes", lambda: own() - next(taken))
    trial = step.trial()
    assert (trial.pool_bytes, trial.driver_bytes) == (expected.pool_bytes, 0)


def test_capture_warms_up_once(monkeypatch):
    step, warmed = toy.captured(toy.shared()[1], CpuGraphs()), []
    problems = CapturedPieces.problems
    monkeypatch.setattr(CapturedPieces, "problems", lambda self, args: warmed.append(1) or problems(self, args))
    step.warm_up(no_prewarm)
    step.trial()
    step.capture(no_prewarm)
    assert len(warmed) == len(LADDER.buckets) and step.report.warm_up_seconds > 0
