"""Kernels of the compressor ops: pooling into partials, and finishing entries and storing rows.

``compressor_update`` is both launches, ``compressor_partials`` the first and the storing half of the second,
``compressor_merge`` the finishing half: with one rank, partials and merge are the update bit by bit. All reads of the
state happen in the first launch, all writes in the second.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from . import _device, _paged
from ._compressor import Partials, StepRows
from ._triton import launch, names

POOL_TILE = 4096  # pooled positions times channels per program: two fp32 tiles, 64 registers of 128 threads
SEARCH_BLOCK = 256  # requests looked at in one step of the search
FINISH_PROGRAMS = 2048  # programs of the second launch for long prefills, in which most rows have nothing to do


@triton.jit
def _find_window(
    index, starts_ptr, positions_ptr, num_requests, ratio: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """The window in row ``index`` of the partials: (exists, its last row, that row's position, request, first row).

    The windows of request r lie in rows ``starts[r] // ratio + r`` and following, which grows with r.
    """
    count = tl.zeros((), tl.int32)
    for first in range(0, num_requests, block):
        request = first + tl.arange(0, block)
        inside = request < num_requests
        start = tl.load(starts_ptr + request, mask=inside, other=0)
        count += tl.sum((inside & (start // ratio + request <= index)).to(tl.int32), axis=0)
    request = count - 1
    begin = tl.load(starts_ptr + request, mask=request >= 0, other=0)
    end = tl.load(starts_ptr + request + 1, mask=request >= 0, other=0)
    position = tl.load(positions_ptr + begin, mask=begin < end, other=-1)
    phase = (position + 1 + ratio - begin % ratio) % ratio  # of row 0, were it the request's: (position + 1) % ratio
    row = (index - request) * ratio + (ratio - phase) % ratio
    exists = (position >= 0) & (row >= begin) & (row < end)
    return exists, row, position + row - begin, request, begin


@triton.jit(do_not_specialize=["num_requests", "ring"])
def _pool(
    rows_ptr, ape_ptr, positions_ptr, starts_ptr, slots_ptr, state_ptr, maximum_ptr, total_ptr, weighted_ptr,
    num_requests, ring,
    ratio: tl.constexpr, overlap: tl.constexpr, dim: tl.constexpr,
    pooled: tl.constexpr, stages: tl.constexpr, tile: tl.constexpr, search_block: tl.constexpr,
):  # fmt: skip
    num_tiles: tl.constexpr = (dim + tile - 1) // tile
    width: tl.constexpr = dim * 2 if overlap else dim
    index = tl.program_id(0) // num_tiles
    channel = (tl.program_id(0) % num_tiles) * tile + tl.arange(0, tile)[None, :]
    exists, row, position, request, begin = _find_window(
        index, starts_ptr, positions_ptr, num_requests, ratio, search_block
    )
    target = index.to(tl.int64) * dim + (tl.program_id(0) % num_tiles) * tile + tl.arange(0, tile)
    inside = (tl.program_id(0) % num_tiles) * tile + tl.arange(0, tile) < dim
    if exists == 0:  # most steps of a decode complete no window
        nothing = tl.zeros([tile], tl.float32)
        tl.store(maximum_ptr + target, nothing - float("inf"), mask=inside)
        tl.store(total_ptr + target, nothing, mask=inside)
        tl.store(weighted_ptr + target, nothing, mask=inside)
        return
    slot = tl.load(slots_ptr + request).to(tl.int64)

    number = tl.arange(0, 2**stages)[:, None]  # of the pooled position, oldest first
    age = pooled - 1 - number
    fresh = row - age >= begin
    here = (number < pooled) & (position >= age) & (channel < dim)
    old = here & (fresh == 0) & (slot >= 0)
    new = here & fresh
    # with overlapping windows the older half pools the first dim channels, the newer half the others
    column = channel + tl.where(number >= pooled - ratio, width - dim, 0)
    fresh_offset = (row - age).to(tl.int64) * (2 * width) + column
    old_offset = (slot * ring + (position - age) % ring) * (2 * width) + column
    ape = tl.load(ape_ptr + number % ratio * width + column, mask=new, other=0.0)
    score = tl.load(rows_ptr + fresh_offset + width, mask=new, other=0.0) + ape
    score = tl.where(new, score, tl.load(state_ptr + old_offset + width, mask=old, other=float("-inf")))
    value = tl.load(rows_ptr + fresh_offset, mask=new, other=0.0)
    value = tl.where(new, value, tl.load(state_ptr + old_offset, mask=old, other=0.0))

    maximum = tl.max(score, axis=0)
    finite = tl.where(maximum == float("-inf"), 0.0, maximum)
    weight = tl.exp(score - finite[None, :])
    total = _tree_sum(weight, stages)
    weighted = _tree_sum(weight * value, stages)
    tl.store(maximum_ptr + target, maximum, mask=inside)
    tl.store(total_ptr + target, total, mask=inside)
    tl.store(weighted_ptr + target, weighted, mask=inside)


@triton.jit
def _tree_sum(x, stages: tl.constexpr):
    """Sum over ``2^stages`` rows by halving, as the reference adds them: row i and row ``i + half``."""
    for _ in tl.static_range(stages):
        first, second = tl.split(tl.permute(tl.reshape(x, [2, x.shape[0] // 2, x.shape[1]]), (1, 2, 0)))
        x = first + second
    return tl.reshape(x, [x.shape[1]])


@triton.jit(do_not_specialize=[
    "num_tokens", "num_entries", "num_ranks", "num_positions", "table_width", "ring", "rows_per_program", "eps",
])  # fmt: skip
def _finish_and_store(
    rows_ptr, ape_ptr, weight_ptr, table_ptr, positions_ptr, requests_ptr, lens_ptr, blocks_ptr, slots_ptr,
    state_ptr, cache_ptr, maximum_ptr, total_ptr, weighted_ptr,
    num_tokens, num_entries, num_ranks, num_positions, table_width, ring, rows_per_program, eps,
    finish: tl.constexpr, store: tl.constexpr, ratio: tl.constexpr, row_width: tl.constexpr, row_block: tl.constexpr,
    dim: tl.constexpr, width: tl.constexpr, rope_dim: tl.constexpr, page_rows: tl.constexpr, quantize: tl.constexpr,
    stages: tl.constexpr, norm: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * rows_per_program
    for row in range(first, tl.minimum(first + rows_per_program, num_tokens)):
        position = tl.load(positions_ptr + row)
        request = tl.load(requests_ptr + row)
        valid = (position >= 0) & (request >= 0)
        if store:
            slot = tl.load(slots_ptr + request, mask=valid, other=-1).to(tl.int64)
            length = tl.load(lens_ptr + request, mask=valid, other=0)
            if (slot >= 0) & (position >= length - ring):
                column = tl.arange(0, row_block)
                inside = column < row_width
                source = rows_ptr + row * (2 * row_width) + column
                target = state_ptr + (slot * ring + position % ring) * (2 * row_width) + column
                tl.store(target, tl.load(source, mask=inside, other=0.0), mask=inside)
                ape = tl.load(ape_ptr + position % ratio * row_width + column, mask=inside, other=0.0)
                score = tl.load(source + row_width, mask=inside, other=0.0)
                tl.store(target + row_width, score + ape, mask=inside)
        if finish:  # noqa: SIM102 (a constant and a run-time condition)
            if valid & ((position + 1) % ratio == 0):
                index = row // ratio + request
                column = tl.arange(0, width)[None, :]
                inside = column < dim
                value, found = _merge(
                    maximum_ptr, total_ptr, weighted_ptr, index * dim + column, inside, num_ranks, num_entries * dim
                )
                act: tl.constexpr = tl.float32 if quantize == "none" else tl.bfloat16
                weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
                value = _device.rms_normalize(_device.rounded(value, act), weight, eps, dim)
                angles = _device.angle_row(table_ptr, position - (ratio - 1), num_positions, rope_dim)
                value = _device.rotate(_device.rounded(value, act), angles, dim, rope_dim, False)
                value = _device.rounded(value, act)
                if quantize == "fp8":
                    value = _device.simulate_kv(value, dim - rope_dim)
                elif quantize == "fp4":
                    value = _device.rounded(_device.hadamard(value, stages) * norm, act)
                    value = _device.simulate_fp4(value)
                page, offset, keep = _device.find_row(
                    blocks_ptr, table_width, request, position // ratio, found, page_rows
                )
                _device.store_rows(cache_ptr, page, offset, keep, value, dim, page_rows)


@triton.jit
def _merge(maximum_ptr, total_ptr, weighted_ptr, offset, inside, num_ranks, stride):
    """Pooled vector ``[1, width]`` of all ranks' partials, summed in rank order, and whether any rank had a row."""
    maximum = tl.load(maximum_ptr + offset, mask=inside, other=float("-inf"))
    for rank in range(1, num_ranks):
        maximum = tl.maximum(maximum, tl.load(maximum_ptr + rank * stride + offset, mask=inside, other=float("-inf")))
    maximum = tl.where(maximum == float("-inf"), 0.0, maximum)
    total, value = tl.zeros_like(maximum), tl.zeros_like(maximum)
    for rank in range(num_ranks):
        place = rank * stride + offset
        rescale = tl.exp(tl.load(maximum_ptr + place, mask=inside, other=float("-inf")) - maximum)
        total += tl.load(total_ptr + place, mask=inside, other=0.0) * rescale
        value += tl.load(weighted_ptr + place, mask=inside, other=0.0) * rescale
    some = total != 0
    value = tl.where(some, tl.div_rn(value, tl.where(some, total, 1.0)), 0.0)
    return value, tl.max(some.to(tl.int32)) > 0


def pool_key(ratio: int, overlap: bool, dim: int) -> tuple[str | int, ...]:
    """What a pooling launch is specialised on."""
    return ("compressor_pool", ratio, int(overlap), dim)


def pool(
    op: str,
    kv_score: torch.Tensor,
    ape: torch.Tensor,
    step: StepRows,
    state: torch.Tensor,
    outs: Partials,
    overlap: bool,
) -> None:
    """Write the partials ``outs`` (three ``[T // ratio + R, dim]``) of every window that ends in the step."""
    ratio, dim = ape.shape[0], outs[0].shape[1]
    pooled = ratio * (2 if overlap else 1)
    stages = (pooled - 1).bit_length()
    tile = min(triton.next_power_of_2(dim), max(POOL_TILE >> stages, 16))
    launch(
        pool_key(ratio, overlap, dim), _pool, (outs[0].shape[0] * triton.cdiv(dim, tile),),
        kv_score.contiguous(), ape.contiguous(), step.positions.contiguous(), step.query_starts.contiguous(),
        step.state_slots.contiguous(), _device.in_place(op, state), *outs,
        step.seq_lens.shape[0], state.shape[1],
        ratio=ratio, overlap=overlap, dim=dim, pooled=pooled, stages=stages, tile=tile,
        search_block=SEARCH_BLOCK, num_warps=4, num_stages=1,
    )  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """What the storing half of the second launch needs beside the step."""

    kv_score: torch.Tensor
    ape: torch.Tensor
    state: torch.Tensor


@dataclass(frozen=True)
class Finished:
    """What the finishing half of the second launch needs beside the step; partials ``[ranks, entries, dim]``."""

    partials: Partials
    norm_weight: torch.Tensor
    rope_table: torch.Tensor
    block_tables: torch.Tensor
    cache: torch.Tensor
    eps: float
    quantize: str

    def key(self) -> tuple[int, int, int, str, torch.dtype]:
        dim = self.norm_weight.shape[0]
        return dim, self.rope_table.shape[1], _paged.page_rows(self.cache, dim), self.quantize, self.cache.dtype


def second_key(
    ratio: int, row_width: int, entry: tuple[int, int, int, str, torch.dtype] | None
) -> tuple[str | int, ...]:
    """What the second launch is specialised on.

    Args:
        ratio: tokens per window.
        row_width: width of the stored rows, 0 for a launch that stores none.
        entry: (dim, rope_dim, page_rows, quantize, cache dtype), ``None`` for a launch that finishes no entries.
    """
    if entry is None:
        return ("compressor_store", ratio, row_width)
    return ("compressor_finish", ratio, row_width, *entry[:4], *names(entry[4]))


def finish_and_store(
    op: str,
    positions: torch.Tensor,
    row_requests: torch.Tensor,
    ratio: int,
    *,
    step: StepRows | None = None,
    stored: Stored | None = None,
    finished: Finished | None = None,
) -> None:
    """Write the entries of ``finished`` to its cache and the step's rows to the state of ``stored``, each if given."""
    positions, none = positions.contiguous(), torch.empty(0, dtype=torch.float32, device=positions.device)
    row_width, rows, lens, slots = 0, (none, none, none), none, none
    if stored is not None and step is not None:
        row_width, lens, slots = stored.ape.shape[1], step.seq_lens.contiguous(), step.state_slots.contiguous()
        rows = (stored.kv_score.contiguous(), stored.ape.contiguous(), _device.in_place(op, stored.state))
    dim, rope_dim, page_rows, quantize, _ = entry = (0, 0, 0, "none", None) if finished is None else finished.key()
    entries, numbers, eps = [none] * 7, (0, 0, 0, 0), 0.0
    if finished is not None:
        f, eps = finished, finished.eps
        weight, table = f.norm_weight.float().contiguous(), f.rope_table.contiguous()
        partials = (p.contiguous() for p in f.partials)
        entries = [weight, table, f.block_tables.contiguous(), _device.in_place(op, f.cache), *partials]
        maxima, blocks = entries[4], entries[2]
        numbers = (maxima.shape[1], maxima.shape[0], table.shape[0], blocks.shape[1])
    weight, table, blocks, cache, *partials = entries
    num_tokens = positions.shape[0]
    rows_per_program = triton.cdiv(max(num_tokens, 1), FINISH_PROGRAMS)
    launch(
        second_key(ratio, row_width, entry if finished is not None else None), _finish_and_store,
        (triton.cdiv(num_tokens, rows_per_program),),
        rows[0], rows[1], weight, table, positions, row_requests.contiguous(), lens, blocks, slots, rows[2], cache,
        *partials,
        num_tokens, *numbers, rows[2].shape[1] if stored is not None else 0, rows_per_program, eps,
        finish=finished is not None, store=stored is not None, ratio=ratio, row_width=row_width,
        row_block=triton.next_power_of_2(max(row_width, 1)), dim=dim, width=_device.tile_width(dim),
        rope_dim=rope_dim, page_rows=page_rows, quantize=quantize, stages=max(dim - 1, 0).bit_length(),
        norm=max(dim, 1) ** -0.5, num_warps=4, num_stages=1,
    )  # fmt: skip
