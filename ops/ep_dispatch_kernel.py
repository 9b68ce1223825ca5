"""Compaction of the rows that have an expert, for a group of one rank: number them in one program, then copy."""

import torch
import triton
import triton.language as tl

from ._triton import dtype_key, launch

_CHUNK = 1024
_COLUMNS = 1024


@triton.jit(do_not_specialize=["rows", "experts"], do_not_specialize_on_alignment=["ids_ptr"])
def _number(ids_ptr, slot_ptr, count_ptr, rows, experts, topk: tl.constexpr, chunk: tl.constexpr):
    filled = tl.zeros([], tl.int32)
    for start in range(0, rows, chunk):
        row = start + tl.arange(0, chunk)
        inside = row < rows
        held = tl.zeros([chunk], tl.int32)
        for k in tl.static_range(topk):
            expert = tl.load(ids_ptr + row.to(tl.int64) * topk + k, mask=inside, other=-1)
            held = held | ((expert >= 0) & (expert < experts)).to(tl.int32)
        rank = tl.cumsum(held, axis=0)
        tl.store(slot_ptr + row, tl.where(held != 0, filled + rank - 1, -1), mask=inside)
        filled += tl.sum(held, axis=0)
    tl.store(count_ptr, filled)


@triton.jit(
    do_not_specialize=["capacity", "experts"],
    do_not_specialize_on_alignment=["scale_ptr", "ids_ptr", "weights_ptr"],
)
def _copy(
    x_ptr, scale_ptr, ids_ptr, weights_ptr, slot_ptr,
    to_x, to_scale, to_ids, to_weights, to_source, capacity, experts,
    width: tl.constexpr, scales: tl.constexpr, topk: tl.constexpr, block: tl.constexpr, small: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    if (slot < 0) | (slot >= capacity):
        return
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    tl.store(to_x + slot * width + column, tl.load(x_ptr + row * width + column, mask=inside), mask=inside)
    if tl.program_id(1) == 0:
        lane = tl.arange(0, small)
        if scales > 0:
            scale = tl.load(scale_ptr + row * scales + lane, mask=lane < scales)
            tl.store(to_scale + slot * scales + lane, scale, mask=lane < scales)
        chosen = lane < topk
        ids = tl.load(ids_ptr + row * topk + lane, mask=chosen, other=-1)
        ids = tl.where((ids >= 0) & (ids < experts), ids, -1)
        tl.store(to_ids + slot * topk + lane, ids, mask=chosen)
        weights = tl.load(weights_ptr + row * topk + lane, mask=chosen)
        tl.store(to_weights + slot * topk + lane, weights, mask=chosen)
        tl.store(to_source + slot, row)


def keys(x: torch.Tensor, scales: int, topk: int) -> list[tuple[str | int, ...]]:
    """What the launches are specialised on."""
    return [("ep_dispatch", "number", topk), ("ep_dispatch", "copy", *dtype_key(x), x.shape[1], scales, topk)]


def run(sent: tuple[torch.Tensor, ...], received: tuple[torch.Tensor, ...], num_experts: int) -> None:
    """Fill the receive buffers.

    Args:
        sent: x, x_scale (or empty), ids, weights.
        received: the buffers for those four, recv_source and recv_count, contiguous.
        num_experts: ids outside 0…num_experts−1 are none.
    """
    x, x_scale, ids, weights = (t.contiguous() for t in sent)
    rows, topk, scales = x.shape[0], ids.shape[1], x_scale.shape[-1]
    slot = torch.empty(rows, dtype=torch.int32, device=x.device)
    number, copy = keys(x, scales, topk)
    launch(number, _number, (1,), ids, slot, received[5], rows, num_experts, topk=topk, chunk=_CHUNK, num_warps=4)
    block = min(triton.next_power_of_2(x.shape[1]), _COLUMNS)
    launch(
        copy, _copy, (rows, triton.cdiv(x.shape[1], block)),
        x, x_scale, ids, weights, slot, *received[:5], received[0].shape[0], num_experts,
        width=x.shape[1], scales=scales, topk=topk, block=block, small=triton.next_power_of_2(max(scales, topk, 1)),
        num_warps=4,
    )  # fmt: skip
