"""Grouping of (row, expert) pairs by expert: the order in which the expert products visit them.

A pair is ``row * topk + rank``. Every expert owns whole blocks of ``block_m`` slots, in order of expert; inside an
expert the pairs keep their order, so the result is a function of the ids alone (no atomics). Slots that hold no pair
are −1. The number of blocks is bounded by :func:`num_blocks`, which needs no look at the ids; blocks behind the last
one in use have expert −1 and their slots are not written.
"""

import torch
import triton
import triton.language as tl

from ._triton import launch

_CHUNK = 1024
_EXPERTS = 256


@triton.jit(do_not_specialize=["pairs"], do_not_specialize_on_alignment=["ids_ptr"])
def _count(ids_ptr, counts_ptr, pairs, chunk: tl.constexpr):
    expert = tl.program_id(0)
    lane = tl.arange(0, chunk)
    total = tl.zeros([chunk], tl.int32)
    for start in range(0, pairs, chunk):
        pair = start + lane
        total += (tl.load(ids_ptr + pair, mask=pair < pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["pairs", "experts", "blocks"], do_not_specialize_on_alignment=["ids_ptr"])
def _place(
    ids_ptr, counts_ptr, slots_ptr, owner_ptr, pairs, experts, blocks,
    block_m: tl.constexpr, chunk: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    first = tl.zeros([], tl.int32)
    used = tl.zeros([], tl.int32)
    for start in range(0, experts, width):
        other = start + tl.arange(0, width)
        size = (tl.load(counts_ptr + other, mask=other < experts, other=0) + block_m - 1) // block_m
        first += tl.sum(tl.where(other < expert, size, 0), axis=0)
        used += tl.sum(size, axis=0)
    mine = tl.load(counts_ptr + expert)
    lane = tl.arange(0, chunk)
    if mine > 0:
        filled = first * block_m
        for start in range(0, pairs, chunk):
            pair = start + lane
            hit = tl.load(ids_ptr + pair, mask=pair < pairs, other=-1) == expert
            rank = tl.cumsum(hit.to(tl.int32), axis=0)
            tl.store(slots_ptr + filled + rank - 1, pair, mask=hit)
            filled += tl.sum(hit.to(tl.int32), axis=0)
        last = first + (mine + block_m - 1) // block_m
        spare = filled + tl.arange(0, block_m)
        tl.store(slots_ptr + spare, tl.full([block_m], -1, tl.int32), mask=spare < last * block_m)
        for start in range(first, last, chunk):
            block = start + lane
            tl.store(owner_ptr + block, tl.zeros([chunk], tl.int32) + expert, mask=block < last)
    if expert == experts - 1:
        for start in range(used, blocks, chunk):
            block = start + lane
            tl.store(owner_ptr + block, tl.full([chunk], -1, tl.int32), mask=block < blocks)


def num_blocks(pairs: int, experts: int, block_m: int) -> int:
    """The most blocks that ``pairs`` pairs can need: as many experts as possible have one pair, one has the rest."""
    single = min(pairs, experts)
    return single + (pairs - single) // block_m


def keys(block_m: int) -> list[tuple[str | int, ...]]:
    """What the launches of :func:`run` are specialised on."""
    return [("expert_blocks", "count"), ("expert_blocks", "place", block_m)]


def run(ids: torch.Tensor, experts: int, block_m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Group the pairs of ``ids [T, K]`` int32, contiguous; ids outside 0…experts−1 are left out.

    Returns:
        slots: ``[blocks * block_m]`` int32, the pair in every slot.
        owner: ``[blocks]`` int32, the expert of every block.
    """
    pairs = ids.numel()
    blocks = num_blocks(pairs, experts, block_m)
    counts = torch.empty(experts, dtype=torch.int32, device=ids.device)
    slots = torch.empty(blocks * block_m, dtype=torch.int32, device=ids.device)
    owner = torch.empty(blocks, dtype=torch.int32, device=ids.device)
    count, place = keys(block_m)
    programs = (experts if pairs else 0,)
    launch(count, _count, programs, ids, counts, pairs, chunk=_CHUNK, num_warps=4)
    launch(
        place, _place, programs, ids, counts, slots, owner, pairs, experts, blocks,
        block_m=block_m, chunk=_CHUNK, width=_EXPERTS, num_warps=4,
    )  # fmt: skip
    return slots, owner
