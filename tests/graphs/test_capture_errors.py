"""Capture that fails, and debug mode: what the errors name, and what is left. Graphs are those of ``cpu_graphs.py``."""

import gc

import pytest
import torch

from dsv4.graphs.buckets import Ladder
from dsv4.graphs.capture import CapturedStep
from dsv4.graphs.device_graphs import CudaGraphs
from dsv4.graphs.pieces import (
    CapturedPieces,
    CaptureError,
    CaptureMemoryError,
    StaleAddressError,
    capture_problem,
)

from . import toy_step as toy
from .cpu_graphs import CpuGraph, CpuGraphs, ready
from .toy_step import LADDER, compare, no_prewarm

MODES = ("piecewise", "full")


@pytest.fixture(autouse=True)
def no_trouble():
    yield
    toy.trouble.clear()


def ready_own(boundary=toy.BOUNDARY, **options) -> tuple[CapturedStep, toy.Model]:
    """The same of a model that the test may change."""
    model = toy.Model(layers=2)
    step = toy.captured(toy.compiled(model, boundary), CpuGraphs(), **options)
    step.capture(no_prewarm)
    return step, model


# --- debug ----------------------------------------------------------------------------------------------------------


def test_debug_finds_a_replaced_cache():
    step, model = ready_own(mode="piecewise", debug=True)
    step(toy.make_inputs(5, 2, 3))
    model.layers[1].cache = model.layers[1].cache.clone()
    shown = r"\[33, 8\] at 0x\w+"
    message = rf"compiled piece 2 \(.*toygraph::store\): input \w+ must be {shown} as captured, got {shown}"
    with pytest.raises(StaleAddressError, match=message):
        step(toy.make_inputs(5, 2, 3))


def test_debug_finds_a_boundary_that_returns_other_memory(monkeypatch):
    boundary = CapturedPieces._boundary

    def stale(self, *args):
        """What a tape without copies would hand on."""
        outputs, kept, run = boundary(self, *args)
        return outputs, tuple(k.clone() for k in kept), run

    monkeypatch.setattr(CapturedPieces, "_boundary", stale)
    step, _ = ready(toy.FUNCTIONAL, mode="piecewise", debug=True)
    with pytest.raises(StaleAddressError, match=r"compiled piece 2 .*: input \w+ must be \[8, 8\] at"):
        step(toy.make_inputs(5, 2, 3))


def test_debug_of_a_full_graph_compares_what_is_watched():
    model = toy.Model()
    step = toy.captured(model, CpuGraphs(), mode="full", debug=True, watch=lambda: model.buffers())
    step.capture(no_prewarm)
    step(toy.make_inputs(5, 2, 3))
    model.layers[2].cache = model.layers[2].cache.clone()
    with pytest.raises(StaleAddressError, match=r"bucket of 8 tokens.*: watched tensor 2 must be \[33, 8\] at"):
        step(toy.make_inputs(5, 2, 3))


def test_debug_notices_that_its_wrapper_is_gone():
    _, compiled = toy.shared()
    step = toy.captured(compiled, CpuGraphs(), mode="piecewise", debug=True)
    step.capture(no_prewarm)
    compiled.wrap_pieces(lambda piece, call: call)
    with pytest.raises(RuntimeError, match="the wrapper of a captured model's pieces must stay in place"):
        step(toy.make_inputs(5, 2, 3))


def test_outside_debug_the_pieces_are_unwrapped_again(monkeypatch):
    _, compiled = toy.shared()
    wrapped, original = [], compiled.wrap_pieces
    monkeypatch.setattr(compiled, "wrap_pieces", lambda wrap: (wrapped.append(wrap), original(wrap)))
    toy.captured(compiled, CpuGraphs()).capture(no_prewarm)
    assert len(wrapped) == 2 and wrapped[-1](None, len) is len


# --- errors ---------------------------------------------------------------------------------------------------------


def raising(error: Exception) -> None:
    raise error


def fragile_step(graphs: CpuGraphs, mode: str) -> tuple[CapturedStep, toy.Model]:
    model, compiled = toy.shared(extra="fragile")
    return toy.captured(compiled, graphs, mode=mode), model


@pytest.mark.parametrize("mode", MODES)
def test_a_failing_capture_names_piece_and_op_and_leaves_nothing(mode, monkeypatch):
    graphs = CpuGraphs()
    step, model = fragile_step(graphs, mode)
    capture = CpuGraph.capture

    def failing(self, fn):
        if graphs.events.count("capture") == (4 + 3 if mode == "piecewise" else 1):  # in the second bucket
            toy.trouble.append(lambda: raising(ValueError("cold key ('fragile', 8)")))
        return capture(self, fn)

    monkeypatch.setattr(CpuGraph, "capture", failing)
    message = (
        r"bucket of 8 tokens, .*: compiled piece 6 \(toygraph::fragile\) must be capturable, "
        r"got ValueError: cold key \('fragile', 8\); the 1 of 4 buckets captured before \(\d+ MiB\) were freed"
    )
    with pytest.raises(CaptureError, match=message) as error:
        step.capture(no_prewarm)
    assert isinstance(error.value.__cause__, ValueError)
    assert graphs.events[-1] == "release" and not graphs.arena.live and gc.isenabled()
    monkeypatch.undo()
    toy.trouble.clear()
    inputs, other = toy.make_inputs(5, 2, 3), toy.Model(extra="fragile")
    assert all(map(torch.equal, step.eager(inputs), other(inputs)))
    step.capture(no_prewarm)
    compare(step, model, other)


def test_a_failing_warm_up_names_piece_and_op():
    step, _ = fragile_step(CpuGraphs(), "piecewise")
    toy.trouble.append(lambda: raising(ValueError("no kernel")))
    with pytest.raises(CaptureError, match=r"warm-up of compiled piece 6 \(toygraph::fragile\) must be capturable"):
        step.capture(no_prewarm)


@pytest.mark.parametrize("mode", MODES)
def test_out_of_memory_leaves_the_model_usable(mode):
    (model, compiled), graphs = toy.shared(), CpuGraphs(nbytes=1500 if mode == "piecewise" else 512)
    step = toy.captured(compiled, graphs, mode=mode)
    with pytest.raises(CaptureError, match="16 tokens, .* must fit into device memory, got arena of") as error:
        step.capture(no_prewarm)
    assert "the 0 of 4 buckets captured before (0 MiB) were freed, and steps can still run eagerly" in str(error.value)
    assert graphs.events[-1] == "release" and not graphs.arena.live and step.report is None
    inputs, other = toy.make_inputs(5, 2, 3), toy.Model()
    assert all(map(torch.equal, step.eager(inputs), other(inputs)))
    small = toy.captured(step.model, graphs, Ladder(LADDER.buckets[:2]), mode=mode)
    small.capture(no_prewarm)
    compare(small, model, other, steps=[(1, 1, 1), (3, 2, 2)])


def test_running_out_of_memory_has_an_error_of_its_own():
    """The allocator's error by its type, the driver's by its text; every other failure is another error."""
    for error, expected in (
        (torch.OutOfMemoryError("no room"), CaptureMemoryError),
        (RuntimeError("CUDA error: out of memory"), CaptureMemoryError),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), CaptureError),
    ):
        step, _ = fragile_step(CpuGraphs(), "full")
        toy.trouble.clear()
        step.warm_up(no_prewarm)
        toy.trouble[:] = [lambda error=error: raising(error)]
        with pytest.raises(CaptureError, match="were freed, and steps can still run eagerly") as raised:
            step.trial()
        assert type(raised.value) is expected


def test_an_op_that_is_not_capturable():
    """Its reason is reported; ``full`` and a compiled piece refuse; ``auto`` cuts there if it is a boundary."""
    reason = r"piece 6 \(toygraph::unsafe\)"
    _, compiled = toy.shared(extra="unsafe")
    message = rf"must all be capturable, got compiled {reason}: op toygraph::unsafe is tagged"
    with pytest.raises(CaptureError, match=message):
        toy.captured(compiled, CpuGraphs(), mode="full").capture(no_prewarm)
    for mode in ("piecewise", "auto"):
        with pytest.raises(CaptureError, match=rf"compiled {reason} must be capturable, got a reason against it: op"):
            toy.captured(compiled, CpuGraphs(), mode=mode).capture(no_prewarm)
    step, model = ready((*toy.BOUNDARY, "toygraph::unsafe"), {"extra": "unsafe"}, mode="auto")
    assert {b.mode for b in step.report.buckets} == {"piecewise"}
    assert len(step.report.problems) == 1 and "toygraph::unsafe is tagged cudagraph_unsafe" in step.report.problems[0]
    compare(step, model, toy.Model(extra="unsafe"))
    assert {b.mode for b in ready(mode="auto")[0].report.buckets} == {"full"}


def test_capture_problem():
    pieces = toy.shared(extra="unsafe")[1].plan.pieces
    args = [torch.empty(1) for _ in pieces[0].inputs]
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert capture_problem(pieces[0], args, cpu) is None
    assert capture_problem(pieces[0], [3, *args[1:]], cpu) is None
    assert capture_problem(pieces[0], args, cuda) == f"input {pieces[0].inputs[0]} is on cpu"
    unsafe = pieces[-1]
    args = [torch.empty(1) for _ in unsafe.inputs]
    assert capture_problem(unsafe, args, cpu) == "op toygraph::unsafe is tagged cudagraph_unsafe"


def test_capture_refuses():
    graphs = CpuGraphs()
    step = toy.captured(toy.shared()[1], graphs)
    graphs.is_capturing = True
    with pytest.raises(RuntimeError, match="a capture stage must start outside stream capture"):
        step.capture(no_prewarm)
    graphs.is_capturing = False
    step.capture(no_prewarm)
    with pytest.raises(RuntimeError, match=r"a step must be captured once, got 4 buckets: close\(\) it first"):
        step.capture(no_prewarm)
    with pytest.raises(ValueError, match="mode must be one of .* or a function of the bucket, got 'partial'"):
        toy.captured(step.model, graphs, mode="partial")
    with pytest.raises(CaptureError, match="mode must be one of .*, got None"):
        toy.captured(step.model, CpuGraphs(), mode=lambda bucket: None).capture(no_prewarm)


def test_outputs_must_be_tensors_and_named():
    model = toy.Model()
    with pytest.raises(CaptureError, match="must return a tensor or a tuple of tensors, got tuple"):
        toy.captured(lambda inputs: (*model(inputs), None)[1:], NoGraphs(), LADDER).capture(no_prewarm)
    with pytest.raises(CaptureError, match="trim must have one entry per output, 1, got 2"):
        toy.captured(lambda inputs: model(inputs)[0], CpuGraphs()).capture(no_prewarm)


class NoGraphs(CpuGraphs):
    """Graphs that record nothing, for outputs that are no tensors."""

    class Graph:
        def capture(self, fn):
            return fn()

        def replay(self) -> None:
            pass

        def reset(self) -> None:
            pass

    def graph(self):
        return self.Graph()


def test_cuda_graphs_need_a_device():
    if torch.cuda.is_available():
        with pytest.raises(ValueError, match="device of CUDA graphs must be a CUDA device, got cpu"):
            CudaGraphs("cpu")
    else:
        with pytest.raises(RuntimeError, match="CUDA graphs need a CUDA device, got a machine or a torch without one"):
            CudaGraphs()
