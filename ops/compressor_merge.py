"""Merge the partials of P ranks (``compressor_partials``) and write the entries as ``compressor_update`` does.

Shapes: maxima, totals, weighted ``[ranks, num_tokens // ratio + num_requests, d]`` fp32; norm_weight ``[d]``;
rope_table ``[max_positions, rope_dim]`` fp32; row metadata as in docs/ops.md; cache dense or FP8 with rows of ``d``.
The window that ends at row t of request r is in row ``t // ratio + r`` of every rank. An entry for which no rank has
a row is not written.
Numerics: ranks are rescaled to the global maximum and summed as a pairwise tree in rank order; with one rank partials
and merge are bitwise ``compressor_update``. Normalisation, RoPE and quantisation as there.
Errors: ``ValueError`` on wrong ranks, sizes or dtypes; ``NotImplementedError`` for other cache dtypes.
Source: online softmax (Milakov and Gimelshein, 2018) over the pooling of ``Compressor.forward``.
"""

import torch

from . import _compressor, _compressor_cases, _rows
from ._registry import Arguments, PrewarmCase, register
from .shapes import Shape


def _check(
    maxima: torch.Tensor,
    totals: torch.Tensor,
    weighted: torch.Tensor,
    norm_weight: torch.Tensor,
    rope_table: torch.Tensor,
    positions: torch.Tensor,
    row_requests: torch.Tensor,
    block_tables: torch.Tensor,
    cache: torch.Tensor,
    ratio: int,
    quantize: str,
) -> None:
    for name, tensor in (("maxima", maxima), ("totals", totals), ("weighted", weighted)):
        if tensor.dim() != 3 or tensor.shape[2] != maxima.shape[-1] or tensor.dtype != torch.float32:
            raise ValueError(
                f"compressor_merge {name} must be a float32 [ranks, entries, {maxima.shape[-1]}], "
                f"got {list(tensor.shape)} {tensor.dtype}"
            )
    if ratio < 1:
        raise ValueError(f"compressor_merge ratio must be positive, got {ratio}")
    op = "compressor_merge"
    _rows.check_indices(op, 1, positions=positions, row_requests=row_requests)
    _rows.check_indices(op, 2, block_tables=block_tables)
    _rows.check_rows(op, "positions", positions.shape[0], row_requests=row_requests)
    for dim in (0, 1):  # ranks and entries
        _rows.check_rows(op, "maxima", maxima.shape[dim], dim=dim, totals=totals, weighted=weighted)
    capacity = positions.shape[0] // ratio + block_tables.shape[0]
    _rows.check_rows(op, f"positions // {ratio} + block_tables", capacity, dim=1, maxima=maxima)
    _compressor.check_entry("compressor_merge", maxima.shape[2], norm_weight, rope_table, cache, quantize)


def reference(
    maxima: torch.Tensor,
    totals: torch.Tensor,
    weighted: torch.Tensor,
    norm_weight: torch.Tensor,
    rope_table: torch.Tensor,
    positions: torch.Tensor,
    row_requests: torch.Tensor,
    block_tables: torch.Tensor,
    cache: torch.Tensor,
    *,
    ratio: int,
    eps: float,
    quantize: str,
) -> None:
    """Write the merged entries of the windows that end in this step."""
    _check(
        maxima, totals, weighted, norm_weight, rope_table, positions, row_requests, block_tables, cache, ratio, quantize
    )
    emit = _compressor.emitting_rows(positions, row_requests, ratio)
    index = _compressor.partial_index(emit, row_requests, ratio)
    pooled, found = _compressor.merge_partials(maxima[:, index], totals[:, index], weighted[:, index])
    _compressor.write_entries(
        pooled, found, positions[emit], row_requests[emit], norm_weight, rope_table, block_tables, cache,
        ratio=ratio, eps=eps, quantize=quantize,
    )  # fmt: skip


def fake(
    maxima: torch.Tensor,
    totals: torch.Tensor,
    weighted: torch.Tensor,
    norm_weight: torch.Tensor,
    rope_table: torch.Tensor,
    positions: torch.Tensor,
    row_requests: torch.Tensor,
    block_tables: torch.Tensor,
    cache: torch.Tensor,
    *,
    ratio: int,
    eps: float,
    quantize: str,
) -> None:
    _check(
        maxima, totals, weighted, norm_weight, rope_table, positions, row_requests, block_tables, cache, ratio, quantize
    )


def example(shape: Shape, *, num_tokens: int, device: torch.device, dtype: torch.dtype, seed: int) -> Arguments:
    ex = _compressor.example_inputs(shape, num_tokens=num_tokens, device=device, dtype=dtype, seed=seed)
    rows, ranks = ex.rows, 2
    g = torch.Generator(device="cpu").manual_seed(seed + 1)
    size = (ranks, num_tokens // ex.ratio + rows.seq_lens.shape[0], shape.head_dim)
    maxima, weighted = (torch.randn(size, generator=g).to(device) for _ in range(2))
    totals = 1 + torch.rand(size, generator=g).to(device)  # the largest score alone contributes 1
    args = (
        maxima, totals, weighted, ex.norm_weight, ex.rope_table, rows.positions, rows.row_requests, rows.block_tables,
        ex.cache,
    )  # fmt: skip
    quantize = "fp8" if dtype == torch.bfloat16 else "none"
    return args, {"ratio": ex.ratio, "eps": shape.eps, "quantize": quantize}


def cuda(
    maxima: torch.Tensor,
    totals: torch.Tensor,
    weighted: torch.Tensor,
    norm_weight: torch.Tensor,
    rope_table: torch.Tensor,
    positions: torch.Tensor,
    row_requests: torch.Tensor,
    block_tables: torch.Tensor,
    cache: torch.Tensor,
    *,
    ratio: int,
    eps: float,
    quantize: str,
) -> None:
    from . import _compressor_kernel as kernel

    _check(
        maxima, totals, weighted, norm_weight, rope_table, positions, row_requests, block_tables, cache, ratio, quantize
    )
    finished = kernel.Finished((maxima, totals, weighted), norm_weight, rope_table, block_tables, cache, eps, quantize)
    kernel.finish_and_store("compressor_merge", positions, row_requests, ratio, finished=finished)


def cuda_cases(shape: Shape, device: torch.device, max_tokens: int) -> tuple[PrewarmCase, ...]:
    """Every compressor of the model, for every cache a bf16 model can have; ranks are counted at run time."""
    return _compressor_cases.merge_cases("compressor_merge", shape, device)


compressor_merge = register(
    "compressor_merge",
    "(Tensor maxima, Tensor totals, Tensor weighted, Tensor norm_weight, Tensor rope_table, Tensor positions, "
    "Tensor row_requests, Tensor block_tables, Tensor(a!) cache, *, int ratio, float eps, str quantize) -> ()",
    reference=reference,
    fake=fake,
    example=example,
    cuda=cuda,
    cuda_cases=cuda_cases,
    role="parallel",
)
