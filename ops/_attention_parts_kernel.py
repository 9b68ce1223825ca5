"""Sparse attention of few rows, which one program per row and block of heads would leave most of a GPU idle.

The blocks of a row's key list are dealt out to ``parts`` programs. Probabilities are rounded to bf16 relative to the
running maximum of the blocks of 64 places before, which belong to other programs: a first launch leaves all scores and
the maximum of every block, a second one rounds and adds up values, a third merges the parts in their order. Scores and
sums are fp32; what is rounded, and relative to what, is as in ``sparse_attention_kernel``.
A head vector is a row of groups of 64 columns, and a warp multiplies whole groups: no product waits for more than four
others. Blocks have 16 places, the fewest that tensor cores take.
The number of parts depends on the number of rows and on sizes alone, and is a run-time value.
"""

import torch
import triton
import triton.language as tl

from . import _paged
from ._device import HEAD_DATA, HEAD_SCALE, KV_BLOCK, NOPE_DIM, decode_e8m0
from ._runtime import Key
from ._triton import dtype_key, launch

FEW_PROGRAMS = 32  # most rows times blocks of heads that are divided; more of them fill a GPU undivided
PROGRAMS = 256  # rows times blocks of heads times parts, about
MOST_PARTS = 32  # what the merge holds at once
HEAD_BLOCK = 16
KEY_BLOCK = 16
ROUNDING_BLOCKS = 4  # blocks whose probabilities are rounded relative to one maximum: 64 places
GROUP = 64
MERGED_COLUMNS = 128
MAXIMA = 64  # of blocks, read at a time


@triton.jit
def _decoded_keys(row, scale_row, valid, groups: tl.constexpr, width: tl.constexpr):
    """bf16 ``[groups, places, width]``: FP8 keys whose data and scales lie at ``row`` and ``scale_row [places]``."""
    tl.static_assert(width == KV_BLOCK)
    group = tl.arange(0, groups)
    is_nope = group < NOPE_DIM // KV_BLOCK
    place = group[:, None, None] * width + tl.arange(0, width)[None, None, :]
    codes = tl.load(row[None, :, None] + place, mask=valid[None, :, None] & is_nope[:, None, None], other=0)
    scale = tl.load(scale_row[None, :] + group[:, None], mask=valid[None, :] & is_nope[:, None], other=127)
    tail = (row + NOPE_DIM).to(tl.pointer_type(tl.bfloat16))[None, :, None] + (place - NOPE_DIM)
    rope = tl.load(tail, mask=valid[None, :, None] & ~is_nope[:, None, None], other=0.0)
    nope = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * decode_e8m0(scale.to(tl.int32))[:, :, None]
    return tl.where(is_nope[:, None, None], nope, rope.to(tl.float32)).to(tl.bfloat16)  # packs two at a time


@triton.jit
def _row(
    row, positions_ptr, requests_ptr, ratio, num_entries, num_picks, window: tl.constexpr, key_block: tl.constexpr,
    picked: tl.constexpr,
):  # fmt: skip
    """Position, request, entries it may see, first position of its window, blocks of its key list."""
    position = tl.load(positions_ptr + row).to(tl.int32)
    request = tl.load(requests_ptr + row).to(tl.int64)
    visible = tl.minimum((position + 1) // ratio, num_entries)
    listed = visible
    if picked:
        listed = tl.where(visible > 0, num_picks, 0)
    places = tl.where(listed > 0, window + listed, tl.minimum(position + 1, window))
    num_blocks = tl.where(request >= 0, (places + key_block - 1) // key_block, 0)
    return position, request, visible, tl.maximum(position - window + 1, 0), num_blocks


@triton.jit
def _find(
    place, position, visible, first, window_ptr, entry_ptr, picks_ptr, window_tables_ptr, block_tables_ptr, num_picks,
    window_width, window_shift, entry_shift, window: tl.constexpr, row_bytes: tl.constexpr, picked: tl.constexpr,
    fp8: tl.constexpr,
):  # fmt: skip
    """Of the keys at ``place``: physical page or -1, data of their page, row in it, and log2 of the page's rows."""
    in_window = place < window
    entry = place - window
    if picked:
        entry = tl.load(picks_ptr + entry, mask=(entry >= 0) & (entry < num_picks), other=-1)
    index = tl.where(in_window, first + place, entry)
    shift = tl.where(in_window, window_shift, entry_shift)
    page = index >> shift
    table = tl.where(in_window, window_tables_ptr, block_tables_ptr)
    end = tl.where(in_window, tl.minimum(position + 1, window_width << window_shift), visible)
    physical = tl.load(table + page, mask=(index >= 0) & (index < end), other=-1)
    one = tl.full((), 1, tl.int64)
    window_page, entry_page = (one << window_shift) * row_bytes, (one << entry_shift) * row_bytes
    if fp8:  # whole pages are multiples of a row's data
        window_page += ((one << window_shift) * HEAD_SCALE + HEAD_DATA - 1) // HEAD_DATA * HEAD_DATA
        entry_page += ((one << entry_shift) * HEAD_SCALE + HEAD_DATA - 1) // HEAD_DATA * HEAD_DATA
    base = tl.where(in_window, window_ptr, entry_ptr)
    base += physical.to(tl.int64) * tl.where(in_window, window_page, entry_page)
    return physical, base, index - (page << shift), shift


@triton.jit
def _keys(
    physical, base, offset, shift, row_bytes: tl.constexpr, dim: tl.constexpr, groups: tl.constexpr,
    group: tl.constexpr, fp8: tl.constexpr,
):  # fmt: skip
    """bf16 ``[groups, places, group]``, zero where there is no page."""
    valid = physical >= 0
    key_row = base + offset * row_bytes
    if fp8:
        scale_row = base + (1 << shift) * HEAD_DATA + offset * HEAD_SCALE
        keys = _decoded_keys(key_row, scale_row, valid, groups, group)
    else:
        column = tl.arange(0, groups)[:, None, None] * group + tl.arange(0, group)[None, None, :]
        keys = tl.load(key_row[None, :, None] + column, mask=valid[None, :, None] & (column < dim), other=0.0)
    return keys


@triton.jit(
    do_not_specialize=[
        "scale", "ratio", "num_entries", "num_picks", "window_width", "block_width", "window_shift", "entry_shift",
        "parts", "room",
    ],
    do_not_specialize_on_alignment=[
        "picks_ptr", "positions_ptr", "requests_ptr", "window_tables_ptr", "block_tables_ptr",
    ],
)  # fmt: skip
def _attention_scores(
    q_ptr, window_ptr, entry_ptr, picks_ptr, positions_ptr, requests_ptr, window_tables_ptr, block_tables_ptr,
    scores_ptr, maxima_ptr, scale, ratio, num_entries, num_picks, window_width, block_width, window_shift, entry_shift,
    parts, room, heads: tl.constexpr, dim: tl.constexpr, groups: tl.constexpr, group: tl.constexpr,
    head_block: tl.constexpr, window: tl.constexpr, key_block: tl.constexpr, picked: tl.constexpr, fp8: tl.constexpr,
):  # fmt: skip
    """``scores [T, H, room, key_block]`` of blocks that hold a key, -inf where there is none; ``maxima [T, H, room]``
    of every block of the row's list."""
    head_blocks: tl.constexpr = (heads + head_block - 1) // head_block
    row_bytes: tl.constexpr = HEAD_DATA if fp8 else dim
    part = tl.program_id(0) % parts
    head_number = tl.program_id(0) // parts
    row = (head_number // head_blocks).to(tl.int64)
    head = (head_number % head_blocks) * head_block + tl.arange(0, head_block)
    is_head = head < heads
    column = tl.arange(0, groups)[:, None, None] * group + tl.arange(0, group)[None, None, :]
    q_mask = is_head[None, :, None] & (column < dim)
    q = tl.load(q_ptr + row * (heads * dim) + head[None, :, None] * dim + column, mask=q_mask, other=0.0)
    position, request, visible, first, num_blocks = _row(
        row, positions_ptr, requests_ptr, ratio, num_entries, num_picks, window, key_block, picked
    )
    picks_ptr += row * num_picks
    window_tables_ptr += request * window_width
    block_tables_ptr += request * block_width
    target = (row * heads + head) * room
    for block in range(part, num_blocks, parts):
        place = block * key_block + tl.arange(0, key_block)
        physical, base, offset, shift = _find(
            place, position, visible, first, window_ptr, entry_ptr, picks_ptr, window_tables_ptr, block_tables_ptr,
            num_picks, window_width, window_shift, entry_shift, window, row_bytes, picked, fp8,
        )  # fmt: skip
        maximum = tl.full((head_block,), float("-inf"), tl.float32)
        if tl.max(physical, axis=0) >= 0:  # picks that are not used lie together
            keys = _keys(physical, base, offset, shift, row_bytes, dim, groups, group, fp8)
            scores = tl.sum(tl.dot(q, tl.permute(keys, (0, 2, 1))), axis=0) * scale
            scores = tl.where((physical >= 0)[None, :], scores, float("-inf"))
            maximum = tl.max(scores, axis=1)
            at = (target + block)[:, None] * key_block + tl.arange(0, key_block)[None, :]
            tl.store(scores_ptr + at, scores, mask=is_head[:, None])
        tl.store(maxima_ptr + target + block, maximum, mask=is_head)


@triton.jit(
    do_not_specialize=[
        "ratio", "num_entries", "num_picks", "window_width", "block_width", "window_shift", "entry_shift", "parts",
        "room",
    ],
    do_not_specialize_on_alignment=[
        "picks_ptr", "positions_ptr", "requests_ptr", "window_tables_ptr", "block_tables_ptr", "stats_ptr",
    ],
)  # fmt: skip
def _attention_part(
    window_ptr, entry_ptr, picks_ptr, positions_ptr, requests_ptr, window_tables_ptr, block_tables_ptr, scores_ptr,
    maxima_ptr, sums_ptr, stats_ptr, ratio, num_entries, num_picks, window_width, block_width, window_shift,
    entry_shift, parts, room, heads: tl.constexpr, dim: tl.constexpr, groups: tl.constexpr, group: tl.constexpr,
    head_block: tl.constexpr, window: tl.constexpr, key_block: tl.constexpr, rounding: tl.constexpr,
    chunk: tl.constexpr, picked: tl.constexpr, fp8: tl.constexpr,
):  # fmt: skip
    """``sums [T, parts, H, dim]`` (not written where a part is empty), ``stats [T, H, parts, 2]``: maximum, total."""
    head_blocks: tl.constexpr = (heads + head_block - 1) // head_block
    row_bytes: tl.constexpr = HEAD_DATA if fp8 else dim
    part = tl.program_id(0) % parts
    head_number = tl.program_id(0) // parts
    row = (head_number // head_blocks).to(tl.int64)
    head = (head_number % head_blocks) * head_block + tl.arange(0, head_block)
    is_head = head < heads
    position, request, visible, first, num_blocks = _row(
        row, positions_ptr, requests_ptr, ratio, num_entries, num_picks, window, key_block, picked
    )
    picks_ptr += row * num_picks
    window_tables_ptr += request * window_width
    block_tables_ptr += request * block_width
    source = (row * heads + head) * room
    acc = tl.zeros((groups, head_block, group), tl.float32)
    total = tl.zeros((head_block,), tl.float32)
    running = tl.full((head_block,), float("-inf"), tl.float32)
    maximum = running
    known = 0  # blocks whose maxima are in ``running``
    for block in range(part, num_blocks, parts):
        end = tl.minimum((block // rounding + 1) * rounding, num_blocks)
        for start in range(known, end, chunk):
            number = start + tl.arange(0, chunk)
            mask = is_head[:, None] & (number < end)[None, :]
            found = tl.load(maxima_ptr + source[:, None] + number[None, :], mask=mask, other=float("-inf"))
            running = tl.maximum(running, tl.max(found, axis=1))
        known = end
        place = block * key_block + tl.arange(0, key_block)
        physical, base, offset, shift = _find(
            place, position, visible, first, window_ptr, entry_ptr, picks_ptr, window_tables_ptr, block_tables_ptr,
            num_picks, window_width, window_shift, entry_shift, window, row_bytes, picked, fp8,
        )  # fmt: skip
        if tl.max(physical, axis=0) >= 0:
            keys = _keys(physical, base, offset, shift, row_bytes, dim, groups, group, fp8)
            at = (source + block)[:, None] * key_block + tl.arange(0, key_block)[None, :]
            scores = tl.load(scores_ptr + at, mask=is_head[:, None], other=float("-inf"))
            probs, decay = tl.exp(scores - running[:, None]), tl.exp(maximum - running)
            total = total * decay + tl.sum(probs, axis=1)
            rounded = probs.to(tl.bfloat16)
            weight = tl.broadcast_to(rounded[None, :, :], (groups, head_block, key_block))
            acc = tl.dot(weight, keys, acc * decay[None, :, None])
            maximum = running

    stats = stats_ptr + ((row * heads + head) * parts + part) * 2
    tl.store(stats, maximum, mask=is_head)
    tl.store(stats + 1, total, mask=is_head)
    if tl.max(maximum, axis=0) > float("-inf"):
        column = tl.arange(0, groups)[:, None, None] * group + tl.arange(0, group)[None, None, :]
        tile = (row * parts + part) * (heads * dim) + head[None, :, None] * dim + column
        tl.store(sums_ptr + tile, acc, mask=is_head[None, :, None] & (column < dim))


@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=["stats_ptr", "sink_ptr", "lse_ptr"])
def _merge_parts(
    sums_ptr, stats_ptr, sink_ptr, out_ptr, lse_ptr, parts, heads: tl.constexpr, dim: tl.constexpr,
    columns: tl.constexpr, most_parts: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (dim + columns - 1) // columns
    pair = (tl.program_id(0) // tiles).to(tl.int64)
    row, head = pair // heads, pair % heads
    column = (tl.program_id(0) % tiles) * columns + tl.arange(0, columns)
    part = tl.arange(0, most_parts)
    stats = stats_ptr + (pair * parts + part) * 2
    maxima = tl.load(stats, mask=part < parts, other=float("-inf"))
    totals = tl.load(stats + 1, mask=part < parts, other=0.0)
    sink = tl.load(sink_ptr + head)
    used = maxima > float("-inf")
    source = sums_ptr + ((row * parts + part)[:, None] * heads + head) * dim + column[None, :]
    sums = tl.load(source, mask=used[:, None] & (column < dim)[None, :], other=0.0)
    maximum = tl.max(maxima, axis=0)
    empty = maximum == float("-inf")
    origin = tl.where(empty, 0.0, maximum)
    mass = tl.exp(maxima - origin)
    total = tl.sum(totals * mass, axis=0)
    merged = tl.sum(sums * mass[:, None], axis=0) / (total + tl.exp(sink - origin))
    merged = tl.where(empty, 0.0, merged)
    tl.store(out_ptr + pair * dim + column, merged.to(out_ptr.dtype.element_ty), mask=column < dim)
    tl.store(lse_ptr + pair, tl.where(empty, float("-inf"), maximum + tl.log(total)))


def num_parts(num_rows: int, heads: int, places: int) -> int:
    """Programs among which the blocks of ``places`` list places of a row are divided."""
    blocks = max(1, triton.cdiv(places, KEY_BLOCK))
    wanted = triton.cdiv(PROGRAMS, max(1, num_rows) * triton.cdiv(heads, HEAD_BLOCK))
    return min(MOST_PARTS, blocks, wanted)


def serves(q: torch.Tensor, window_cache: torch.Tensor, entry_cache: torch.Tensor, *, deterministic: bool) -> bool:
    """Whether a call with these tensors, which may be meta tensors, is divided."""
    dim = q.shape[2]
    few = q.shape[0] * triton.cdiv(q.shape[1], HEAD_BLOCK) <= FEW_PROGRAMS and not deterministic
    narrow = q.dtype == torch.bfloat16 and window_cache.dtype in (torch.bfloat16, torch.uint8)
    rows = [_paged.page_rows(cache, dim) for cache in (window_cache, entry_cache)]
    return few and narrow and dim % GROUP == 0 and all(n > 0 and n & (n - 1) == 0 for n in rows)


def keys(q: torch.Tensor, cache: torch.Tensor, window: int, picked: bool) -> tuple[Key, Key, Key]:
    """What the three launches are specialised on."""
    heads, dim = q.shape[1:]
    sizes = (heads, dim, window, int(picked), *dtype_key(q, cache))
    merge = ("sparse_attention_merge", heads, dim, *dtype_key(q))
    return ("sparse_attention_scores", *sizes), ("sparse_attention_part", *sizes), merge


def run(
    q: torch.Tensor,
    window_cache: torch.Tensor,
    entry_cache: torch.Tensor,
    picks: torch.Tensor,
    sink: torch.Tensor,
    positions: torch.Tensor,
    row_requests: torch.Tensor,
    window_tables: torch.Tensor,
    block_tables: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    window: int,
    ratio: int,
    num_entries: int,
    picked: bool,
    scale: float,
) -> None:
    """Arguments as those of ``sparse_attention_kernel.run``, which checked them; ``num_entries``: room for entries."""
    num_rows, heads, dim = q.shape
    places = window + (picks.shape[1] if picked else num_entries)
    parts, room = num_parts(num_rows, heads, places), triton.cdiv(places, KEY_BLOCK)
    work = {"dtype": torch.float32, "device": q.device}
    scores, maxima = torch.empty(num_rows, heads, room, KEY_BLOCK, **work), torch.empty(num_rows, heads, room, **work)
    sums, stats = torch.empty(num_rows, parts, heads, dim, **work), torch.empty(num_rows, heads, parts, 2, **work)
    first, second, merge = keys(q, window_cache, window, picked)
    grid = (num_rows * triton.cdiv(heads, HEAD_BLOCK) * parts,)
    lists = [t.contiguous() for t in (picks, positions, row_requests, window_tables, block_tables)]
    shifts = [_paged.page_rows(cache, dim).bit_length() - 1 for cache in (window_cache, entry_cache)]
    sizes = [max(ratio, 1), num_entries, picks.shape[1], window_tables.shape[1], block_tables.shape[1], *shifts]
    options = {
        "heads": heads, "dim": dim, "groups": triton.next_power_of_2(dim // GROUP), "group": GROUP,
        "head_block": HEAD_BLOCK, "window": window, "key_block": KEY_BLOCK, "picked": picked,
        "fp8": window_cache.dtype == torch.uint8, "num_warps": 4, "num_stages": 1,
    }  # fmt: skip
    launch(
        first, _attention_scores, grid, q.contiguous(), window_cache, entry_cache, *lists, scores, maxima, scale,
        *sizes, parts, room, **options,
    )  # fmt: skip
    launch(
        second, _attention_part, grid, window_cache, entry_cache, *lists, scores, maxima, sums, stats, *sizes, parts,
        room, rounding=ROUNDING_BLOCKS, chunk=MAXIMA, **options,
    )  # fmt: skip
    launch(
        merge, _merge_parts, (num_rows * heads * triton.cdiv(dim, MERGED_COLUMNS),), sums, stats, sink.contiguous(),
        out, lse, parts,
        heads=heads, dim=dim, columns=MERGED_COLUMNS, most_parts=MOST_PARTS, num_warps=1,
    )  # fmt: skip
