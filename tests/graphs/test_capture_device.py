"""Capture on a CUDA device: what graphs of CPU tensors cannot show.

Models are compiled once and shared by the tests, which find them as new: Inductor takes far longer than what is tested.
"""

import functools

import pytest
import torch

from dsv4.compile import CompiledModel
from dsv4.graphs.buckets import Ladder
from dsv4.graphs.capture import CapturedStep
from dsv4.graphs.device_graphs import CudaGraphs
from dsv4.graphs.pieces import CaptureError, StaleAddressError

from . import toy_step as toy
from .toy_step import STEPS, no_prewarm

pytestmark = pytest.mark.gpu
MODES = ("piecewise", "full")


@functools.cache
def _compiled(boundary: tuple[str, ...], number: int, **options) -> tuple[toy.Model, CompiledModel, dict]:
    model = toy.Model(**options).cuda()
    return model, toy.compiled(model, boundary, "inductor"), {n: t.clone() for n, t in model.state_dict().items()}


def compiled(number: int = 0, boundary=toy.BOUNDARY, **options) -> tuple[toy.Model, CompiledModel]:
    """An Inductor-compiled model on the device; ``number`` tells models apart that are otherwise alike."""
    model, result, state = _compiled(boundary, number, **options)
    model.load_state_dict(state)
    result.wrap_pieces(lambda piece, call: call)
    return model, result


@pytest.fixture
def cuda_step():
    """``cuda_step(seed, boundary, ...)``: a compiled model, captured; and one like it that is not."""
    steps: list[CapturedStep] = []

    def make(seed: int = 0, boundary=toy.BOUNDARY, **options) -> tuple[CapturedStep, toy.Model, toy.Model, object]:
        (model, step_function), (other, eager) = (compiled(number, boundary, seed=seed) for number in range(2))
        step = toy.captured(step_function, CudaGraphs(), **options)
        step.capture(no_prewarm)
        steps.append(step)
        return step, model, other, eager

    yield make
    for step in steps:
        step.close()


def compare_on_device(step: CapturedStep, model: toy.Model, other: toy.Model, eager, steps=STEPS) -> None:
    """Bitwise like a call without graphs on the same padded inputs; pads are left out, dump rows of caches too."""
    padded = toy.static_inputs(step.ladder, "cuda")
    for number, sizes in enumerate(steps):
        inputs = toy.make_inputs(*sizes, seed=number, device="cuda")
        expected = eager(padded.fill(inputs, step.ladder.bucket_for(*sizes)))
        for actual, wanted in zip(step(inputs), expected, strict=True):
            assert torch.equal(actual, wanted[: actual.shape[0]]) and actual.shape[0] in sizes, sizes
        for actual, wanted in zip(model.caches(), other.caches(), strict=True):
            assert torch.equal(actual, wanted), sizes


@pytest.mark.parametrize("boundary", [toy.BOUNDARY, toy.FUNCTIONAL], ids=["", "functional"])
@pytest.mark.parametrize("debug", [False, True], ids=["", "debug"])
@pytest.mark.parametrize("mode", MODES)
def test_device_replay(cuda_step, mode, debug, boundary):
    compare_on_device(*cuda_step(0, boundary, mode=mode, debug=debug), steps=STEPS * 2)


def test_device_two_models_in_turn(cuda_step):
    pairs = [cuda_step(seed, mode=mode) for seed, mode in enumerate(MODES)]
    for sizes in STEPS * 2:
        for pair in pairs:
            compare_on_device(*pair, steps=[sizes])


def test_device_debug_finds_a_replaced_cache(cuda_step):
    step, model, _, _ = cuda_step(mode="piecewise", debug=True)
    layer = model.layers[1]
    before, layer.cache = layer.cache, layer.cache.clone()
    try:
        with pytest.raises(StaleAddressError, match="compiled piece 2 .*: input"):
            step(toy.make_inputs(5, 2, 3, device="cuda"))
    finally:
        layer.cache = before


@pytest.mark.parametrize("mode", MODES)
def test_device_pool_is_shared_and_freed(mode):
    """Of a ladder up to 65,536 rows the largest bucket takes the pool, later ones and deeper models hardly more."""
    ladder, growth = Ladder.build(1 << 16, max_requests=4, max_entries=8), []
    for layers in (2, 8):
        _, model = compiled(layers=layers)
        step = toy.captured(model, CudaGraphs(), ladder, mode=mode)
        step.capture(no_prewarm)  # what the first call leaves allocated belongs to kernels and workspaces
        step.close()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        report = step.capture(no_prewarm)
        first, *rest = (b.mib for b in report.buckets)
        growth.append(report.mib)
        assert first >= 2 and sum(rest) <= first, report
        step.close()
        assert torch.cuda.memory_reserved() == before
    assert growth[1] <= 2 * growth[0], growth


@pytest.mark.parametrize("mode", MODES)
def test_device_capture_of_a_synchronising_op(mode):
    """What the driver refuses names the op; afterwards the same object captures and replays."""
    (model, step_function), (other, eager) = (compiled(number, extra="fragile") for number in range(2))
    step = toy.captured(step_function, CudaGraphs(), mode=mode)

    def synchronise() -> None:
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().synchronize()

    toy.trouble.append(synchronise)
    try:
        with pytest.raises(CaptureError, match=r"bucket of 16 tokens, .*toygraph::fragile\) must be capturable, got"):
            step.capture(no_prewarm)
    finally:
        toy.trouble.clear()
    torch.cuda.synchronize()
    for sizes in STEPS:
        inputs = toy.make_inputs(*sizes, device="cuda")
        assert all(map(torch.equal, step.eager(inputs), eager(inputs)))
    step.capture(no_prewarm)
    compare_on_device(step, model, other, eager)
    step.close()


@pytest.mark.parametrize("mode", MODES)
def test_device_out_of_memory(mode):
    """The device's memory ends after the warm-up: a clear error, no pool left, and steps run without graphs."""

    class Tight(CudaGraphs):
        def settle(self) -> None:
            super().settle()
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**21) / total)

    ladder = Ladder.build(1 << 20, max_requests=4, max_entries=3)
    step = toy.captured(compiled(seed=0)[1], Tight(), ladder, mode=mode)
    try:
        with pytest.raises(CaptureError, match="bucket of 1048576 tokens, .* must fit into device memory") as error:
            step.capture(no_prewarm)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "steps can still run eagerly" in str(error.value)
    assert all(o.isfinite().all() for o in step.eager(toy.make_inputs(5, 2, 3, device="cuda")))
