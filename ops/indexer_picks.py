"""Entries that a row of a ratio-4 layer attends to: ``indexer_logits`` and ``indexer_topk`` over parts of the rows.

Shapes: as in ``indexer_logits``: q ``[T, Hi, di]``; weights ``[T, Hi]`` fp32; cache; positions ``[T]`` int64;
row_requests ``[T]`` int32; block_tables ``[R, B]`` int32. Returns picks ``[T, min(topk, B * page_rows)]`` int32,
ascending, padded with −1 at the end.
Numerics: those of the two ops; ``dtype`` is that of the scores. With ``deterministic`` a row does not depend on how
rows are divided.
Memory: all scores at once would be ``T * B * page_rows`` numbers, 4.3 GB in bf16 for 8,192 rows of a context of 2^20
tokens. No more than ``SCORE_BYTES`` of them exist at a time (beyond ``ROW_STEP`` rows, which must fit), besides the
``TEMPORARY_BYTES`` that either op states.
Errors: ``ValueError``, those of the two ops.
Source: indexer of the official inference code.
"""

from collections.abc import Iterator

import torch

from . import _paged
from ._registry import Arguments, PrewarmCase, register
from .indexer_logits import (
    cuda as scores_of,
    cuda_cases as score_cases,
    example as scores_example,
    num_entries_of,
    reference as score_entries,
)
from .indexer_topk import check_numbers, cuda_cases as pick_cases, reference as pick_entries
from .shapes import Shape

Tensors = tuple[torch.Tensor, ...]
SCORE_BYTES = 256 << 20
ROW_STEP = 16
"""Parts begin at multiples of it, so that their tensors are aligned as whole ones are."""


def _alloc(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    positions: torch.Tensor,
    row_requests: torch.Tensor,
    block_tables: torch.Tensor,
    ratio: int,
    dtype: torch.dtype,
    topk: int,
) -> torch.Tensor:
    num_entries = num_entries_of(q, weights, cache, positions, row_requests, block_tables, ratio, dtype)
    check_numbers(dtype, ratio, topk)
    return q.new_empty((q.shape[0], min(topk, num_entries)), dtype=torch.int32)


def _parts(args: Tensors, dtype: torch.dtype) -> Iterator[tuple[slice, Tensors]]:
    """Rows whose scores fit into ``SCORE_BYTES``, in order, and the arguments of ``indexer_logits`` for them."""
    q, weights, cache, positions, row_requests, block_tables = args
    num_entries = block_tables.shape[1] * _paged.page_rows(cache, q.shape[2])
    fitting = SCORE_BYTES // (max(1, num_entries) * dtype.itemsize)
    step = max(ROW_STEP, fitting // ROW_STEP * ROW_STEP)
    for first in range(0, q.shape[0], step):
        part = slice(first, first + step)
        yield part, (q[part], weights[part], cache, positions[part], row_requests[part], block_tables)


def reference(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    positions: torch.Tensor,
    row_requests: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    ratio: int,
    dtype: torch.dtype,
    topk: int,
    deterministic: bool,
) -> torch.Tensor:
    """The ``topk`` best visible entries of every row."""
    picks = _alloc(q, weights, cache, positions, row_requests, block_tables, ratio, dtype, topk)
    for part, args in _parts((q, weights, cache, positions, row_requests, block_tables), dtype):
        scores = score_entries(*args, ratio=ratio, dtype=dtype, deterministic=deterministic)
        picks[part] = pick_entries(scores, positions[part], ratio=ratio, topk=topk)
    return picks


def fake(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    positions: torch.Tensor,
    row_requests: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    ratio: int,
    dtype: torch.dtype,
    topk: int,
    deterministic: bool,
) -> torch.Tensor:
    return _alloc(q, weights, cache, positions, row_requests, block_tables, ratio, dtype, topk)


def example(shape: Shape, *, num_tokens: int, device: torch.device, dtype: torch.dtype, seed: int) -> Arguments:
    args, options = scores_example(shape, num_tokens=num_tokens, device=device, dtype=dtype, seed=seed)
    return args, {**options, "topk": shape.index_topk}


def cuda(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    positions: torch.Tensor,
    row_requests: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    ratio: int,
    dtype: torch.dtype,
    topk: int,
    deterministic: bool,
) -> torch.Tensor:
    from . import indexer_topk_kernel

    picks = _alloc(q, weights, cache, positions, row_requests, block_tables, ratio, dtype, topk)
    for part, args in _parts((q, weights, cache, positions, row_requests, block_tables), dtype):
        scores = scores_of(*args, ratio=ratio, dtype=dtype, deterministic=deterministic)
        indexer_topk_kernel.run(scores, positions[part], picks[part], ratio)
        del scores  # before the next part allocates its own
    return picks


def cuda_cases(shape: Shape, device: torch.device, max_tokens: int) -> tuple[PrewarmCase, ...]:
    """Those of the two ops: no kernel of this one's own."""
    return (*score_cases(shape, device, max_tokens), *pick_cases(shape, device, max_tokens))


indexer_picks = register(
    "indexer_picks",
    "(Tensor q, Tensor weights, Tensor cache, Tensor positions, Tensor row_requests, Tensor block_tables, *, int ratio,"
    " ScalarType dtype, int topk, bool deterministic) -> Tensor",
    reference=reference,
    fake=fake,
    example=example,
    cuda=cuda,
    cuda_cases=cuda_cases,
    boundary=True,
)
