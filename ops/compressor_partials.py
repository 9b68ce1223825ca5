"""The pooling of ``compressor_update`` as partial softmax results that merge over ranks, for one rank's rows.

All ranks run the same step metadata. A row that another rank owns has score −inf and finite values here; it is
stored like any other, so each rank's state knows only the rows it owns.

Shapes: kv_score, ape, row metadata and state as in ``compressor_update``. Returns maximum, total, weighted
``[num_tokens // ratio + num_requests, d]`` fp32: per channel the largest score, the sum of ``exp(score - maximum)``
and the sum of ``exp(score - maximum) * value``. The window that ends at row t of request r is in output row
``t // ratio + r`` (distinct, because windows of one request end ``ratio`` rows apart); the others hold −inf, 0, 0.
Numerics: fp32, pairwise-tree sums over the pooled positions.
Errors: ``ValueError`` on wrong ranks, sizes or dtypes.
Source: online softmax (Milakov and Gimelshein, 2018) over the pooling of ``Compressor.forward``.
"""

import torch

from . import _compressor, _compressor_cases
from ._registry import Arguments, PrewarmCase, register
from .shapes import Shape


def _alloc(
    kv_score: torch.Tensor,
    ape: torch.Tensor,
    step: _compressor.StepRows,
    state: torch.Tensor,
    ratio: int,
    overlap: bool,
) -> _compressor.Partials:
    dim = _compressor.check_pool("compressor_partials", kv_score, ape, state, ratio, overlap)
    _compressor.check_step("compressor_partials", kv_score, step)
    return _compressor.alloc_partials(kv_score, step.seq_lens, ratio, dim)


def reference(
    kv_score: torch.Tensor,
    ape: torch.Tensor,
    positions: torch.Tensor,
    row_requests: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    state_slots: torch.Tensor,
    state: torch.Tensor,
    *,
    ratio: int,
    overlap: bool,
) -> _compressor.Partials:
    """Pool this rank's rows of every finished window and write the step's rows to ``state``."""
    step = _compressor.StepRows(positions, row_requests, query_starts, seq_lens, state_slots)
    outs = _alloc(kv_score, ape, step, state, ratio, overlap)
    emit = _compressor.emitting_rows(positions, row_requests, ratio)
    index = _compressor.partial_index(emit, row_requests, ratio)
    partials = _compressor.pool_rows(kv_score, ape, step, state, emit, overlap)
    for out, values, empty in zip(outs, partials, (float("-inf"), 0.0, 0.0), strict=True):
        out.fill_(empty)[index] = values
    return outs


def fake(
    kv_score: torch.Tensor,
    ape: torch.Tensor,
    positions: torch.Tensor,
    row_requests: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    state_slots: torch.Tensor,
    state: torch.Tensor,
    *,
    ratio: int,
    overlap: bool,
) -> _compressor.Partials:
    step = _compressor.StepRows(positions, row_requests, query_starts, seq_lens, state_slots)
    return _alloc(kv_score, ape, step, state, ratio, overlap)


def example(shape: Shape, *, num_tokens: int, device: torch.device, dtype: torch.dtype, seed: int) -> Arguments:
    ex = _compressor.example_inputs(shape, num_tokens=num_tokens, device=device, dtype=dtype, seed=seed)
    rows = ex.rows
    args = (
        ex.kv_score, ex.ape, rows.positions, rows.row_requests, rows.query_starts, rows.seq_lens, rows.state_slots,
        ex.state,
    )  # fmt: skip
    return args, {"ratio": ex.ratio, "overlap": True}


def cuda(
    kv_score: torch.Tensor,
    ape: torch.Tensor,
    positions: torch.Tensor,
    row_requests: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    state_slots: torch.Tensor,
    state: torch.Tensor,
    *,
    ratio: int,
    overlap: bool,
) -> _compressor.Partials:
    from . import _compressor_kernel as kernel

    step = _compressor.StepRows(positions, row_requests, query_starts, seq_lens, state_slots)
    outs = _alloc(kv_score, ape, step, state, ratio, overlap)
    kernel.pool("compressor_partials", kv_score, ape, step, state, outs, overlap)
    stored = kernel.Stored(kv_score, ape, state)
    kernel.finish_and_store("compressor_partials", positions, row_requests, ratio, step=step, stored=stored)
    return outs


def cuda_cases(shape: Shape, device: torch.device, max_tokens: int) -> tuple[PrewarmCase, ...]:
    """Every compressor of the model."""
    return _compressor_cases.partials_cases("compressor_partials", shape, device)


compressor_partials = register(
    "compressor_partials",
    "(Tensor kv_score, Tensor ape, Tensor positions, Tensor row_requests, Tensor query_starts, Tensor seq_lens, "
    "Tensor state_slots, Tensor(a!) state, *, int ratio, bool overlap) -> "
    "(Tensor maximum, Tensor total, Tensor weighted)",
    reference=reference,
    fake=fake,
    example=example,
    cuda=cuda,
    cuda_cases=cuda_cases,
    role="parallel",
)
