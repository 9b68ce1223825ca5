"""Scores of the sparse-attention indexer: how much every cached entry matters to every row.

Shapes: q ``[T, Hi, di]`` fp32, bf16 or e4m3; weights ``[T, Hi]`` fp32; cache: indexer vectors (dense
``[pages, page_rows, di]`` or FP8 bytes); positions ``[T]`` int64; row_requests ``[T]`` int32; block_tables ``[R, B]``
int32. Returns scores ``[T, B * page_rows]`` in ``dtype`` (fp32 or bf16).
Entry w is visible to a row at position p if ``w < (p + 1) // ratio``. Its score is ``sum_h relu(q_h . k_w) *
weight_h``; entries that are not visible, entries of absent blocks and all entries of pad rows score −inf.
Numerics: ``float32``: fp32 throughout. ``bfloat16`` (the official code): the dot product, the head weight and their
product are each rounded to bf16; the sum over heads is fp32 and rounds once.
``deterministic``: every row is scored alone, by products of one fixed shape. Otherwise the shape of the products may
depend on the number of rows and entries.
Memory: temporaries stay under ``TEMPORARY_BYTES`` (beyond one row times ``ENTRY_TILE`` entries, which must fit). The
result has no bound: ``indexer_picks``, which is what the model calls, makes it part by part.
Kernels: with the ``gemm`` backend ``deep_gemm``, DeepGEMM serves e4m3 queries on an FP8 cache with fp32 scores where
many rows share a request (``_indexer_deep_gemm.serves``). It cannot serve what the two numerics modes of the model
pass: ``official`` needs the dot product, the weighted value and the sum rounded to bf16 one by one, which its kernel
does not do, and queries that hold four scales each; ``exact`` has queries that are not quantised.
Errors: ``ValueError`` for other dtypes or shapes.
Source: indexer of the official inference code.
"""

import itertools
from collections.abc import Iterator

import torch

from . import _indexer_deep_gemm, _paged, _rows
from ._cases import empty_cache
from ._example_rows import example_rows
from ._registry import Arguments, PrewarmCase, register
from .shapes import BLOCK_TOKENS, Shape

TEMPORARY_BYTES = 64 << 20
ENTRY_TILE = 2048  # entries scored at a time
ROW_TILE = 128  # the same when every row is scored alone: one fixed product shape
_BYTES_PER_PRODUCT = 12  # dot product, ReLU and weighted copies of one (row, head, entry)
_DTYPES = (torch.float32, torch.bfloat16)
_RATIO = 4  # of the layers that have an indexer


def num_entries_of(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    positions: torch.Tensor,
    row_requests: torch.Tensor,
    block_tables: torch.Tensor,
    ratio: int,
    dtype: torch.dtype,
) -> int:
    """Scores of a row; raises the op's errors."""
    if dtype not in _DTYPES:
        raise ValueError(f"indexer_logits dtype must be float32 or bfloat16, got {dtype}")
    if q.dtype not in (*_DTYPES, torch.float8_e4m3fn):
        raise ValueError(f"indexer_logits q must be float32, bfloat16 or float8_e4m3fn, got {q.dtype}")
    if weights.dtype != torch.float32 or weights.shape[1:] != q.shape[1:2]:
        got = f"{weights.dtype} {list(weights.shape[1:])}"
        raise ValueError(f"indexer_logits weights must be float32 with {q.shape[1]} heads, got {got}")
    _rows.check_indices("indexer_logits", 1, positions=positions, row_requests=row_requests)
    _rows.check_indices("indexer_logits", 2, block_tables=block_tables)
    rows = {"weights": weights, "positions": positions, "row_requests": row_requests}
    _rows.check_rows("indexer_logits", "q", q.shape[0], **rows)
    if ratio < 1:
        raise ValueError(f"indexer_logits ratio must be at least 1, got {ratio}")
    if cache.dtype != torch.uint8 and cache.shape[2] != q.shape[2]:
        raise ValueError(f"indexer_logits cache must have dimension {q.shape[2]}, got {cache.shape[2]}")
    return block_tables.shape[1] * _paged.page_rows(cache, q.shape[2])


def _alloc(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    positions: torch.Tensor,
    row_requests: torch.Tensor,
    block_tables: torch.Tensor,
    ratio: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    num_entries = num_entries_of(q, weights, cache, positions, row_requests, block_tables, ratio, dtype)
    return q.new_empty((q.shape[0], num_entries), dtype=dtype)


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
    deterministic: bool,
) -> torch.Tensor:
    """Score every cached entry for every row; −inf where there is nothing to see."""
    scores = _alloc(q, weights, cache, positions, row_requests, block_tables, ratio, dtype).fill_(-torch.inf)
    visible = torch.div(positions + 1, ratio, rounding_mode="floor").clamp(0, scores.shape[1])
    tile = ROW_TILE if deterministic else ENTRY_TILE
    rows_per_pass = max(1, TEMPORARY_BYTES // (_BYTES_PER_PRODUCT * q.shape[1] * tile))
    for rows in _groups(row_requests, deterministic):
        request = row_requests[rows[0]]
        reach = int(visible[rows].max())
        for first in range(0, reach, tile):
            entries = torch.arange(first, first + tile if deterministic else min(first + tile, reach), device=q.device)
            slots = _paged.slots(block_tables, request, entries, _paged.page_rows(cache, q.shape[2]))
            keys = _paged.read(cache, slots, q.shape[2]).float()
            for part in rows.split(rows_per_pass):
                value = _scores(q[part], weights[part], keys, dtype)
                value.masked_fill_((entries >= visible[part].unsqueeze(1)) | (slots < 0), -torch.inf)
                scores[part, first : first + value.shape[1]] = value[:, : scores.shape[1] - first]
    return scores


def _groups(row_requests: torch.Tensor, deterministic: bool) -> Iterator[torch.Tensor]:
    """Row numbers that are scored together: the rows of one request, or each row by itself. Pads are left out."""
    if deterministic:
        yield from (row_requests >= 0).nonzero()
    else:
        for request in row_requests.unique().tolist():
            if request >= 0:
                yield (row_requests == request).nonzero().squeeze(1)


def _scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scores ``[rows, entries]`` in ``dtype`` of q ``[rows, Hi, di]`` against keys ``[entries, di]``."""
    dots = (q.float().flatten(0, 1) @ keys.t()).view(*q.shape[:2], -1).to(dtype)
    return (dots.relu_() * weights.to(dtype).unsqueeze(-1)).sum(dim=1, dtype=torch.float32).to(dtype)


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
    deterministic: bool,
) -> torch.Tensor:
    return _alloc(q, weights, cache, positions, row_requests, block_tables, ratio, dtype)


def example(shape: Shape, *, num_tokens: int, device: torch.device, dtype: torch.dtype, seed: int) -> Arguments:
    rows = example_rows(shape, num_tokens=num_tokens, device=device, seed=seed)
    g = torch.Generator(device="cpu").manual_seed(seed)
    q = torch.randn(num_tokens, shape.index_heads, shape.index_dim, generator=g).to(device, dtype)
    weights = torch.randn(num_tokens, shape.index_heads, generator=g).to(device)
    cache = torch.randn(rows.num_blocks, BLOCK_TOKENS // _RATIO, shape.index_dim, generator=g).to(device, dtype)
    args = (q, weights, cache, rows.positions, rows.row_requests, rows.block_tables)
    return args, {"ratio": _RATIO, "dtype": dtype, "deterministic": False}


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
    deterministic: bool,
) -> torch.Tensor:
    """Every row is a product of its own, whoever shares its keys, of one shape if ``deterministic``."""
    scores = _alloc(q, weights, cache, positions, row_requests, block_tables, ratio, dtype)
    rows = positions, row_requests, block_tables
    bound = {"max_bytes": TEMPORARY_BYTES}
    if _indexer_deep_gemm.serves(q, cache, block_tables, dtype, deterministic=deterministic, **bound):
        _indexer_deep_gemm.run(q, weights, cache, *rows, scores, ratio=ratio, **bound)
        return scores
    from . import indexer_logits_kernel

    indexer_logits_kernel.run(q, weights, cache, *rows, scores, ratio=ratio, deterministic=deterministic)
    return scores


def cuda_cases(shape: Shape, device: torch.device, max_tokens: int) -> tuple[PrewarmCase, ...]:
    """bf16 queries, bf16 and (where the dimension has the layout) FP8 caches, scores and tiles of either mode.

    With DeepGEMM also what it serves.
    """
    from . import indexer_logits_kernel

    cases = []
    page_rows = BLOCK_TOKENS // _RATIO
    storages = (torch.bfloat16, torch.uint8) if shape.index_dim == _paged.INDEX_DIM else (torch.bfloat16,)
    for storage, dtype, deterministic in itertools.product(storages, _DTYPES, (False, True)):

        def arguments(
            storage: torch.dtype = storage, dtype: torch.dtype = dtype, deterministic: bool = deterministic
        ) -> Arguments:
            args, options = example(shape, num_tokens=1, device=device, dtype=torch.bfloat16, seed=0)
            if storage == torch.uint8:
                size = (args[2].shape[0], _paged.fp8_page_bytes(page_rows, shape.index_dim))
                args = (*args[:2], torch.zeros(size, dtype=storage, device=device), *args[3:])
            return args, {**options, "dtype": dtype, "deterministic": deterministic}

        q = torch.empty(1, shape.index_heads, shape.index_dim, dtype=torch.bfloat16, device="meta")
        cache = empty_cache(1, page_rows, shape.index_dim, dtype=storage, device=torch.device("meta"))
        tile = indexer_logits_kernel.entries_per_program(q, cache, page_rows, deterministic=deterministic)
        key = indexer_logits_kernel.key(q, cache, dtype, tile)
        cases.append(PrewarmCase(op="indexer_logits", key=key, arguments=arguments))
    return (*cases, *_indexer_deep_gemm.cases(shape, device, page_rows, _RATIO))


indexer_logits = register(
    "indexer_logits",
    "(Tensor q, Tensor weights, Tensor cache, Tensor positions, Tensor row_requests, Tensor block_tables, *, int ratio,"
    " ScalarType dtype, bool deterministic) -> Tensor",
    reference=reference,
    fake=fake,
    example=example,
    cuda=cuda,
    cuda_cases=cuda_cases,
    role="part",
)
