"""Nano through the capture logic with graphs of CPU tensors: padded replays against unpadded eager steps, bitwise."""

import pytest
import torch

from dsv4 import ops
from dsv4.compile import compile_model
from dsv4.compile_stage import mark_step_sizes
from dsv4.graphs.buckets import Ladder
from dsv4.graphs.capture import CapturedStep
from dsv4.graphs.static_inputs import Extent, StaticInputs
from dsv4.runner import Sequence

from .cpu_graphs import CpuGraphs
from .toy_step import no_prewarm

ROWS = ("token_ids", "positions", "row_requests", "window_slots")
REQUESTS = ("seq_lens", "block_tables", "window_tables", "state_slots")
EXTENTS = {
    **dict.fromkeys(ROWS, Extent("tokens")),
    **dict.fromkeys(REQUESTS, Extent("requests")),
    "query_starts": Extent("requests", 1),
    "logit_rows": Extent("logits"),
}
PADS = {**dict.fromkeys((*ROWS, *REQUESTS), -1), "seq_lens": 0, "query_starts": "num_valid", "logit_rows": 0}
# (request, rows, logit rows) per segment: prefill, mixed, a step beyond the ladder, decode, rows as with drafts
STEPS = [
    [(0, 20, (19,))],
    [(0, 1, (0,)), (1, 9, ())],
    [(0, 1, (0,)), (1, 5, (4,)), (2, 30, ())],
    [(0, 1, (0,)), (1, 1, (0,)), (2, 1, (0,))],
    [(1, 3, (0, 1, 2))],
]
PATHS = ("replayed", "replayed", "eager", "replayed", "replayed")


@pytest.mark.parametrize("numerics", [pytest.param("exact", marks=pytest.mark.slow), "official"])
def test_nano(make_runner, numerics):
    ours, plain = (make_runner(numerics, num_requests=3, deterministic=True) for _ in range(2))
    example = ours.inputs([Sequence().segment([0, 1, 2], (2,))], num_rows=4, num_requests=2)
    mark_step_sizes(example, ours.caches)
    model = compile_model(ours.model.forward_streams, ops.boundary_ops(), backend="eager")
    model.prepare(example, ours.caches)
    ladder = Ladder.build(32, max_requests=4, max_entries=4)
    inputs = StaticInputs(example, ladder, extents=EXTENTS, pads=PADS)
    for mode, debug in (("piecewise", False), ("piecewise", True), ("full", False)):
        for tensor in tensors(ours.caches) + tensors(plain.caches):
            tensor.zero_()
        step = CapturedStep(
            model, inputs, ladder, CpuGraphs(1 << 26), arguments=lambda i: (i, ours.caches), trim=("logits", "tokens"),
            mode=mode, debug=debug,
        )  # fmt: skip
        report = step.capture(no_prewarm)
        assert not any(tensor.any() for tensor in tensors(ours.caches))  # capture wrote nothing
        assert report.problems == () and {b.copied_outputs for b in report.buckets} == {0}
        check_steps(step, ours, plain, mode)
        step.close()


def check_steps(step: CapturedStep, ours, plain, mode: str) -> None:
    generator = torch.Generator().manual_seed(0)
    sequences = [Sequence(first_block=8 * i, first_page=16 * i, state_slot=i) for i in range(3)]
    for plan, path in zip(STEPS, PATHS, strict=True):
        segments = [
            sequences[number].segment(torch.randint(0, 1000, (rows,), generator=generator).tolist(), logit_rows)
            for number, rows, logit_rows in plan
        ]
        for actual, wanted in zip(step(ours.inputs(segments)), plain.run(segments), strict=True):
            assert torch.equal(actual, wanted), plan
        assert all(map(torch.equal, tensors(ours.caches), tensors(plain.caches))), plan
        assert step.last_path.kind == (mode if path == "replayed" else "eager")


def tensors(caches) -> list[torch.Tensor]:
    return [tensor for layer in caches.layers for tensor in layer.tensors()]
