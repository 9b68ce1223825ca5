"""Indexer scores, one program per (run of rows, tile of entries).

Keys are read once per program when its rows belong to one request, else once per row. Either way every row is a
product of its own of one fixed shape, ``[heads, dim] x [dim, tile]``, so a row never depends on its neighbours or on
their number. Where tiles of that shape would leave most of a GPU idle, smaller ones are used, except in deterministic
mode: then the shape depends on the number of rows and on the width of the tables.
"""

import torch
import triton
import triton.language as tl

from . import _paged
from ._device import find_row, load_rows, rounded, tile_width
from ._runtime import Key
from ._triton import dtype_key, launch, names

FEW_ROWS = 64  # up to here every row gets its own programs: there are too few to share keys and fill the device
ROWS = 8  # rows that share keys beyond that
ENTRY_BLOCK = 128
SMALL_BLOCK = 16  # on an H200, one row of 45 entries: 2.6 us, and 5.5 us with tiles of 128
SMALL_PROGRAMS = 512  # small tiles up to here; beyond, reading the queries once per tile costs more than it gains


@triton.jit
def _tile_keys(
    cache_ptr, tables_ptr, table_width, request, entry, reach, operand: tl.constexpr, dim: tl.constexpr,
    dim_block: tl.constexpr, page_rows: tl.constexpr,
):  # fmt: skip
    """Keys ``[tile, dim_block]`` of entries below ``reach``, and which of them exist (``[tile]``)."""
    page, offset, found = find_row(tables_ptr, table_width, request, entry[:, None], entry[:, None] < reach, page_rows)
    keys = load_rows(cache_ptr, page, offset, found, dim, dim_block, page_rows)
    return keys.to(operand), tl.reshape(found, (entry.shape[0],))


@triton.jit
def _score_row(
    q_ptr, weights_ptr, out_ptr, row, keys, seen, entry, num_entries, heads: tl.constexpr, head_block: tl.constexpr,
    dim: tl.constexpr, dim_block: tl.constexpr,
):  # fmt: skip
    """Scores of one row against ``keys``; −inf where not ``seen``."""
    score: tl.constexpr = out_ptr.dtype.element_ty
    head, column = tl.arange(0, head_block), tl.arange(0, dim_block)
    is_head = head < heads
    q_at = q_ptr + (row * heads + head)[:, None] * dim + column[None, :]
    q = tl.load(q_at, mask=is_head[:, None] & (column < dim)[None, :], other=0.0).to(keys.dtype)
    weight = rounded(tl.load(weights_ptr + row * heads + head, mask=is_head, other=0.0), score)
    dots = rounded(tl.dot(q, tl.trans(keys), input_precision="ieee"), score)
    parts = rounded(tl.maximum(dots, 0.0) * weight[:, None], score)
    value = tl.where(seen, tl.sum(parts, axis=0), float("-inf"))
    tl.store(out_ptr + row * num_entries + entry, value.to(score), mask=entry < num_entries)


@triton.jit(
    do_not_specialize=["num_rows", "rows_per_program", "num_entries", "table_width", "ratio"],
    do_not_specialize_on_alignment=["weights_ptr", "positions_ptr", "requests_ptr", "tables_ptr"],
)
def _indexer_logits(
    q_ptr, weights_ptr, cache_ptr, positions_ptr, requests_ptr, tables_ptr, out_ptr, num_rows, rows_per_program,
    num_entries, table_width, ratio, heads: tl.constexpr, head_block: tl.constexpr, dim: tl.constexpr,
    dim_block: tl.constexpr, page_rows: tl.constexpr, entry_block: tl.constexpr, row_block: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * entry_block
    entry = start + tl.arange(0, entry_block)
    first = tl.program_id(1).to(tl.int64) * rows_per_program  # rows times entries passes 2^31
    last = tl.minimum(first + rows_per_program, num_rows)
    count = (last - first).to(tl.int32)
    lane = first + tl.arange(0, row_block)
    request = tl.load(requests_ptr + lane, mask=lane < last, other=-1)
    position = tl.load(positions_ptr + lane, mask=(lane < last) & (request >= 0), other=-1).to(tl.int32)
    reach = tl.max((position + 1) // ratio, axis=0)  # no row of this program sees an entry from here on
    highest = tl.max(request, axis=0)
    lowest = tl.min(tl.where(request >= 0, request, highest), axis=0)
    wide: tl.constexpr = q_ptr.dtype.element_ty == tl.float32 or cache_ptr.dtype.element_ty == tl.float32
    operand: tl.constexpr = tl.float32 if wide else tl.bfloat16

    if start >= reach:
        nothing = tl.full((entry_block,), float("-inf"), tl.float32).to(out_ptr.dtype.element_ty)
        for i in range(count):
            tl.store(out_ptr + (first + i) * num_entries + entry, nothing, mask=entry < num_entries)
    elif lowest == highest:
        keys, found = _tile_keys(
            cache_ptr, tables_ptr, table_width, highest, entry, reach, operand, dim, dim_block, page_rows
        )
        for i in range(count):
            row = first + i
            own = tl.where(tl.load(requests_ptr + row) >= 0, tl.load(positions_ptr + row).to(tl.int32), -1)
            seen = found & (entry < (own + 1) // ratio)
            _score_row(
                q_ptr, weights_ptr, out_ptr, row, keys, seen, entry, num_entries, heads, head_block, dim, dim_block
            )
    else:
        for i in range(count):
            row = first + i
            own_request = tl.load(requests_ptr + row)
            own = tl.where(own_request >= 0, tl.load(positions_ptr + row).to(tl.int32), -1)
            keys, seen = _tile_keys(
                cache_ptr, tables_ptr, table_width, own_request, entry, (own + 1) // ratio, operand, dim, dim_block,
                page_rows,
            )  # fmt: skip
            _score_row(
                q_ptr, weights_ptr, out_ptr, row, keys, seen, entry, num_entries, heads, head_block, dim, dim_block
            )


def entries_per_program(q: torch.Tensor, cache: torch.Tensor, num_entries: int, *, deterministic: bool) -> int:
    """Entries of one tile; the tensors may be meta tensors."""
    if torch.float32 in (q.dtype, cache.dtype):
        return ENTRY_BLOCK // 4  # fp32 products take no tensor cores but registers
    few = q.shape[0] * triton.cdiv(num_entries, SMALL_BLOCK) <= SMALL_PROGRAMS
    return SMALL_BLOCK if few and not deterministic else ENTRY_BLOCK


def key(q: torch.Tensor, cache: torch.Tensor, dtype: torch.dtype, entry_block: int) -> Key:
    """What the launch is specialised on."""
    heads, dim = q.shape[1:]
    sizes = (heads, dim, _paged.page_rows(cache, dim), entry_block)
    return ("indexer_logits", *sizes, *dtype_key(q, cache), *names(dtype))


def run(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    positions: torch.Tensor,
    row_requests: torch.Tensor,
    block_tables: torch.Tensor,
    scores: torch.Tensor,
    *,
    ratio: int,
    deterministic: bool,
) -> None:
    """Write every element of ``scores [T, N]``."""
    if not cache.is_contiguous():
        raise ValueError(f"indexer_logits cache must be contiguous, got strides {list(cache.stride())}")
    num_rows, num_entries = scores.shape
    heads, dim = q.shape[1:]
    entry_block = entries_per_program(q, cache, num_entries, deterministic=deterministic)
    rows_per_program = 1 if num_rows <= FEW_ROWS else ROWS
    grid = (triton.cdiv(num_entries, entry_block), triton.cdiv(num_rows, rows_per_program))
    launch(
        key(q, cache, scores.dtype, entry_block), _indexer_logits, grid,
        q.contiguous(), weights.contiguous(), cache, positions.contiguous(), row_requests.contiguous(),
        block_tables.contiguous(), scores, num_rows, rows_per_program, num_entries, block_tables.shape[1], ratio,
        heads=heads, head_block=max(16, triton.next_power_of_2(heads)), dim=dim, dim_block=tile_width(dim),
        page_rows=_paged.page_rows(cache, dim), entry_block=entry_block, row_block=ROWS,
        num_warps=4, num_stages=2,
    )  # fmt: skip
