"""One step of a compressor: emit the cache entry of every window that ends in this step, then store the step's rows.

Shapes: kv_score ``[num_tokens, 2 * width]`` fp32, values then scores without ape; ape ``[ratio, width]`` fp32;
norm_weight ``[d]``; rope_table ``[max_positions, rope_dim]`` fp32; row metadata as in docs/ops.md; state ``[slots,
ring, 2 * width]`` fp32; cache dense or FP8 with rows of ``d``. ``width`` is ``2 * d`` when windows overlap, else ``d``.
A position before the step is read from ``state[state_slots[r], position % ring]``, all reads happen before the
writes, and the newest ``ring`` rows of every request are stored. A ring of ``pooled + k - 1`` rows, with ``pooled``
the pooled positions (``2 * ratio`` or ``ratio``), still has every row it needs after k rejected rows.
Numerics: softmax per channel in fp32, sums as pairwise trees (an entry is bitwise the same however its rows were
split into steps). Then, unless ``quantize`` is ``none`` (fp32 until the cache write), one rounding to bf16; RMSNorm
and RoPE at the window's first position in fp32, each rounding once; ``fp8``: dimensions before the last rope_dim in
blocks of 64; ``fp4``: Hadamard rotation, then all dimensions in blocks of 32.
Errors: ``ValueError`` on wrong ranks, sizes or dtypes; ``NotImplementedError`` for other cache dtypes.
Source: ``Compressor.forward`` of the official inference code.
"""

import torch

from . import _compressor, _compressor_cases, _rows
from ._registry import Arguments, PrewarmCase, register
from .shapes import Shape


def _check(
    kv_score: torch.Tensor,
    ape: torch.Tensor,
    norm_weight: torch.Tensor,
    rope_table: torch.Tensor,
    step: _compressor.StepRows,
    block_tables: torch.Tensor,
    state: torch.Tensor,
    cache: torch.Tensor,
    ratio: int,
    overlap: bool,
    quantize: str,
) -> None:
    dim = _compressor.check_pool("compressor_update", kv_score, ape, state, ratio, overlap)
    _compressor.check_step("compressor_update", kv_score, step)
    _rows.check_indices("compressor_update", 2, block_tables=block_tables)
    _rows.check_rows("compressor_update", "seq_lens", step.seq_lens.shape[0], block_tables=block_tables)
    _compressor.check_entry("compressor_update", dim, norm_weight, rope_table, cache, quantize)


def reference(
    kv_score: torch.Tensor,
    ape: torch.Tensor,
    norm_weight: torch.Tensor,
    rope_table: torch.Tensor,
    positions: torch.Tensor,
    row_requests: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    state_slots: torch.Tensor,
    state: torch.Tensor,
    cache: torch.Tensor,
    *,
    ratio: int,
    overlap: bool,
    eps: float,
    quantize: str,
) -> None:
    """Write the entries of finished windows to ``cache`` and the step's rows to ``state``."""
    step = _compressor.StepRows(positions, row_requests, query_starts, seq_lens, state_slots)
    _check(kv_score, ape, norm_weight, rope_table, step, block_tables, state, cache, ratio, overlap, quantize)
    emit = _compressor.emitting_rows(positions, row_requests, ratio)
    partials = _compressor.pool_rows(kv_score, ape, step, state, emit, overlap)
    pooled, found = _compressor.merge_partials(*(p.unsqueeze(0) for p in partials))
    _compressor.write_entries(
        pooled, found, positions[emit], row_requests[emit], norm_weight, rope_table, block_tables, cache,
        ratio=ratio, eps=eps, quantize=quantize,
    )  # fmt: skip


def fake(
    kv_score: torch.Tensor,
    ape: torch.Tensor,
    norm_weight: torch.Tensor,
    rope_table: torch.Tensor,
    positions: torch.Tensor,
    row_requests: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    state_slots: torch.Tensor,
    state: torch.Tensor,
    cache: torch.Tensor,
    *,
    ratio: int,
    overlap: bool,
    eps: float,
    quantize: str,
) -> None:
    step = _compressor.StepRows(positions, row_requests, query_starts, seq_lens, state_slots)
    _check(kv_score, ape, norm_weight, rope_table, step, block_tables, state, cache, ratio, overlap, quantize)


def example(shape: Shape, *, num_tokens: int, device: torch.device, dtype: torch.dtype, seed: int) -> Arguments:
    ex = _compressor.example_inputs(shape, num_tokens=num_tokens, device=device, dtype=dtype, seed=seed)
    rows = ex.rows
    args = (
        ex.kv_score, ex.ape, ex.norm_weight, ex.rope_table, rows.positions, rows.row_requests, rows.query_starts,
        rows.seq_lens, rows.block_tables, rows.state_slots, ex.state, ex.cache,
    )  # fmt: skip
    quantize = "fp8" if dtype == torch.bfloat16 else "none"
    return args, {"ratio": ex.ratio, "overlap": True, "eps": shape.eps, "quantize": quantize}


def cuda(
    kv_score: torch.Tensor,
    ape: torch.Tensor,
    norm_weight: torch.Tensor,
    rope_table: torch.Tensor,
    positions: torch.Tensor,
    row_requests: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    state_slots: torch.Tensor,
    state: torch.Tensor,
    cache: torch.Tensor,
    *,
    ratio: int,
    overlap: bool,
    eps: float,
    quantize: str,
) -> None:
    from . import _compressor_kernel as kernel

    step = _compressor.StepRows(positions, row_requests, query_starts, seq_lens, state_slots)
    _check(kv_score, ape, norm_weight, rope_table, step, block_tables, state, cache, ratio, overlap, quantize)
    partials = _compressor.alloc_partials(kv_score, seq_lens, ratio, norm_weight.shape[0])
    kernel.pool("compressor_update", kv_score, ape, step, state, partials, overlap)
    kernel.finish_and_store(
        "compressor_update", positions, row_requests, ratio, step=step,
        stored=kernel.Stored(kv_score, ape, state),
        finished=kernel.Finished(
            tuple(p.unsqueeze(0) for p in partials), norm_weight, rope_table, block_tables, cache, eps, quantize
        ),
    )  # fmt: skip


def cuda_cases(shape: Shape, device: torch.device, max_tokens: int) -> tuple[PrewarmCase, ...]:
    """Every compressor of the model, for every cache a bf16 model can have."""
    return _compressor_cases.update_cases("compressor_update", shape, device)


compressor_update = register(
    "compressor_update",
    "(Tensor kv_score, Tensor ape, Tensor norm_weight, Tensor rope_table, Tensor positions, Tensor row_requests, "
    "Tensor query_starts, Tensor seq_lens, Tensor block_tables, Tensor state_slots, Tensor(a!) state, "
    "Tensor(b!) cache, *, int ratio, bool overlap, float eps, str quantize) -> ()",
    reference=reference,
    fake=fake,
    example=example,
    cuda=cuda,
    cuda_cases=cuda_cases,
    boundary=True,
)
