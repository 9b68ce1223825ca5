"""Sparse attention, one program per (row, block of heads).

A program walks its own row's list of keys in blocks of 64 places and gathers every block once: a key is also its value.
Nothing depends on other rows or on the number of rows, so this kernel serves deterministic mode; without it, few rows
go to ``_attention_parts_kernel``.
"""

import torch
import triton
import triton.language as tl

from . import _attention_parts_kernel, _paged
from ._device import (
    HEAD_DATA,
    HEAD_DIM,
    HEAD_ROW,
    HEAD_SCALE,
    KV_BLOCK,
    NOPE_DIM,
    decode_e8m0,
)
from ._triton import dtype_key, launch

HEAD_BLOCK = 16
KEY_BLOCK = 64  # the block in which probabilities are rounded relative to the running maximum
PICKS_BLOCK = 1024  # picks read at a time to find the last one


@triton.jit
def _fp8_keys(base, page_rows, physical, offset, valid):
    """bf16 keys ``[places, 512]``: rows ``offset`` of the FP8 pages ``physical`` of the caches at ``base``.

    ``base``, ``page_rows``, ``physical``, ``offset`` and ``valid`` are ``[places]``: a block may mix two caches.
    """
    page = base + physical.to(tl.int64) * ((page_rows * HEAD_ROW + HEAD_DATA - 1) // HEAD_DATA * HEAD_DATA)
    data = page + offset * HEAD_DATA
    group, column = tl.arange(0, HEAD_DIM // KV_BLOCK), tl.arange(0, KV_BLOCK)
    is_nope = group < NOPE_DIM // KV_BLOCK
    scale_ptr = page + page_rows * HEAD_DATA + offset * HEAD_SCALE
    scale = tl.load(scale_ptr[:, None] + group[None, :], mask=valid[:, None] & is_nope[None, :], other=127)
    place = group[None, :, None] * KV_BLOCK + column[None, None, :]
    codes = tl.load(data[:, None, None] + place, mask=valid[:, None, None] & is_nope[None, :, None], other=0)
    nope = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * decode_e8m0(scale.to(tl.int32))[:, :, None]
    tail = (data + NOPE_DIM).to(tl.pointer_type(tl.bfloat16))[:, None, None] + (place - NOPE_DIM)
    rope = tl.load(tail, mask=valid[:, None, None] & ~is_nope[None, :, None], other=0.0)
    keys = tl.where(is_nope[None, :, None], nope.to(tl.bfloat16), rope)
    return tl.reshape(keys, (physical.shape[0], HEAD_DIM))


@triton.jit(
    do_not_specialize=[
        "scale", "ratio", "num_entries", "num_picks", "window_width", "block_width", "window_rows", "entry_rows",
    ],
    do_not_specialize_on_alignment=[
        "picks_ptr", "sink_ptr", "positions_ptr", "requests_ptr", "window_tables_ptr", "block_tables_ptr", "lse_ptr",
    ],
)  # fmt: skip
def _sparse_attention(
    q_ptr, window_ptr, entry_ptr, picks_ptr, sink_ptr, positions_ptr, requests_ptr, window_tables_ptr,
    block_tables_ptr, out_ptr, lse_ptr, scale, ratio, num_entries, num_picks, window_width, block_width, window_rows,
    entry_rows, heads: tl.constexpr, dim: tl.constexpr, dim_block: tl.constexpr, head_block: tl.constexpr,
    window: tl.constexpr, key_block: tl.constexpr, picks_block: tl.constexpr, picked: tl.constexpr, fp8: tl.constexpr,
):  # fmt: skip
    head_blocks: tl.constexpr = (heads + head_block - 1) // head_block
    row = (tl.program_id(0) // head_blocks).to(tl.int64)  # rows times heads times dim passes 2^31
    head = (tl.program_id(0) % head_blocks) * head_block + tl.arange(0, head_block)
    column = tl.arange(0, dim_block)
    is_head, is_column = head < heads, column < dim
    position = tl.load(positions_ptr + row).to(tl.int32)
    request = tl.load(requests_ptr + row).to(tl.int64)
    visible = tl.minimum((position + 1) // ratio, num_entries)
    first = tl.maximum(position - window + 1, 0)
    picks_ptr += row * num_picks
    window_tables_ptr += request * window_width
    block_tables_ptr += request * block_width

    listed = visible  # entry places up to the last one in use
    if picked:
        listed = tl.zeros_like(visible)
        for start in range(0, tl.where(visible > 0, num_picks, 0), picks_block):
            number = start + tl.arange(0, picks_block)
            entry = tl.load(picks_ptr + number, mask=number < num_picks, other=-1)
            last = tl.max(tl.where((entry >= 0) & (entry < visible), number + 1, 0), axis=0)
            listed = tl.maximum(listed, last)
    places = tl.where(listed > 0, window + listed, tl.minimum(position + 1, window))
    num_blocks = tl.where(request >= 0, (places + key_block - 1) // key_block, 0)

    wide: tl.constexpr = q_ptr.dtype.element_ty == tl.float32 or window_ptr.dtype.element_ty == tl.float32
    operand: tl.constexpr = tl.float32 if wide else tl.bfloat16
    q_at = (row * heads + head)[:, None] * dim + column[None, :]
    q_mask = is_head[:, None] & is_column[None, :]
    q = tl.load(q_ptr + q_at, mask=q_mask, other=0.0).to(operand)
    acc = tl.zeros((head_block, dim_block), tl.float32)
    total = tl.zeros((head_block,), tl.float32)
    maximum = tl.full((head_block,), float("-inf"), tl.float32)
    for block in range(num_blocks):
        place = block * key_block + tl.arange(0, key_block)
        in_window = place < window
        token, entry = first + place, place - window
        if picked:
            entry = tl.load(picks_ptr + entry, mask=(entry >= 0) & (entry < num_picks), other=-1)
        token_page, entry_page = token // window_rows, entry // entry_rows
        token_seen = in_window & (token <= position) & (token_page < window_width)
        entry_seen = (place >= window) & (entry >= 0) & (entry < visible)
        physical = tl.load(window_tables_ptr + token_page, mask=token_seen, other=-1)
        physical = tl.maximum(physical, tl.load(block_tables_ptr + entry_page, mask=entry_seen, other=-1))
        valid = physical >= 0
        offset = tl.where(in_window, token - token_page * window_rows, entry - entry_page * entry_rows)
        page_rows = tl.where(in_window, window_rows, entry_rows)
        base = tl.where(in_window, window_ptr, entry_ptr)
        if fp8:
            keys = _fp8_keys(base, page_rows, physical, offset, valid).to(operand)
        else:
            key_ptr = base + (physical.to(tl.int64) * page_rows + offset) * dim
            keys = tl.load(key_ptr[:, None] + column[None, :], mask=valid[:, None] & is_column[None, :], other=0.0)
            keys = keys.to(operand)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(valid[None, :], scores, float("-inf"))
        raised = tl.maximum(maximum, tl.max(scores, axis=1))
        origin = tl.where(raised == float("-inf"), 0.0, raised)  # no key yet: exp(-inf - 0) is 0, not NaN
        probs, decay = tl.exp(scores - origin[:, None]), tl.exp(maximum - origin)
        total = total * decay + tl.sum(probs, axis=1)
        rounded = probs.to(q_ptr.dtype.element_ty).to(operand)
        acc = tl.dot(rounded, keys, acc * decay[:, None], input_precision="ieee")
        maximum = raised

    empty = maximum == float("-inf")
    sink = tl.load(sink_ptr + head, mask=is_head, other=0.0)
    denominator = total + tl.exp(sink - tl.where(empty, 0.0, maximum))
    out = tl.where(empty[:, None], 0.0, acc / denominator[:, None])
    tl.store(out_ptr + q_at, out.to(out_ptr.dtype.element_ty), mask=q_mask)
    lse = tl.where(empty, float("-inf"), maximum + tl.log(total))
    tl.store(lse_ptr + row * heads + head, lse, mask=is_head)


def key(q: torch.Tensor, cache: torch.Tensor, window: int, picked: bool) -> tuple[str | int, ...]:
    """What the launch is specialised on; window-only layers and layers that see every entry share one kernel."""
    return ("sparse_attention", q.shape[1], q.shape[2], window, int(picked), *dtype_key(q, cache))


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
    entries: str,
    scale: float,
    deterministic: bool,
) -> None:
    """Write every row of ``out`` and ``lse``; the layouts are those of the op."""
    num_rows, heads, dim = q.shape
    if entries == "none":
        entry_cache = window_cache  # nobody reads it, and it may have another dtype
    if entry_cache.dtype != window_cache.dtype:
        raise NotImplementedError(
            "sparse_attention window_cache and entry_cache must have one dtype on this device, "
            f"got {window_cache.dtype} and {entry_cache.dtype}"
        )
    for name, tensor in (("window_cache", window_cache), ("entry_cache", entry_cache), ("out", out), ("lse", lse)):
        if not tensor.is_contiguous():
            raise ValueError(f"sparse_attention {name} must be contiguous, got strides {list(tensor.stride())}")
    picked = entries == "picked"
    entry_rows = _paged.page_rows(entry_cache, dim)
    num_entries = 0 if entries == "none" else block_tables.shape[1] * entry_rows
    if _attention_parts_kernel.serves(q, window_cache, entry_cache, deterministic=deterministic):
        _attention_parts_kernel.run(
            q, window_cache, entry_cache, picks, sink, positions, row_requests, window_tables, block_tables, out, lse,
            window=window, ratio=ratio, num_entries=num_entries, picked=picked, scale=scale,
        )  # fmt: skip
        return
    dim_block = max(16, triton.next_power_of_2(dim))
    head_block = HEAD_BLOCK
    # Copies straight into shared memory overlap with the products; converted keys pass through registers instead, and
    # two stages of their tiles would not fit.
    copied = q.dtype == window_cache.dtype == torch.bfloat16
    launch(
        key(q, window_cache, window, picked), _sparse_attention, (num_rows * triton.cdiv(heads, head_block),),
        q.contiguous(), window_cache, entry_cache, picks.contiguous(), sink.contiguous(), positions.contiguous(),
        row_requests.contiguous(), window_tables.contiguous(), block_tables.contiguous(), out, lse,
        scale, max(ratio, 1), num_entries, picks.shape[1], window_tables.shape[1], block_tables.shape[1],
        _paged.page_rows(window_cache, dim), entry_rows,
        heads=heads, dim=dim, dim_block=dim_block, head_block=head_block, window=window, key_block=KEY_BLOCK,
        picks_block=PICKS_BLOCK, picked=picked, fp8=window_cache.dtype == torch.uint8,
        num_warps=8 if dim_block >= 512 else 4, num_stages=2 if copied else 1,
    )  # fmt: skip
