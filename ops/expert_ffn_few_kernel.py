"""Routed FP4 experts for few rows, where reading the weights is all the work: a decode step.

Launches: rows to fp16; gate and up products; activation; down product; sum of every row's parts in top-k order. Every
(row, expert) pair is multiplied alone: experts are hardly ever there twice, and nothing needs to be grouped.

What keeps the products near the speed of memory is how little they do to a weight. Four bits become fp16 without a
multiplication: value times 2^-14, exact, also 0.5, which is subnormal in both. FP8 codes are fp16 values too. So
scales multiply sums, not weights, and sums must not cross a group of 32 columns (a weight scale). One pair fills one of
the eight columns of pairs that the matrix instruction takes at least; so it fills all of them, column n with what
belongs to group n of eight and zeros elsewhere. Sums are scaled once a step, and the eight are added up at the end.

A byte holds two neighbouring columns. Instead of interleaving them, low and high nibbles are multiplied apart, by rows
that hold the 64 even columns of every 128 before the 64 odd ones, zeros behind their end ("split" rows). Inside a group
the columns are visited in an order in which a thread's bytes are neighbours in memory.
"""

import torch
import triton
import triton.language as tl

from ._fp4_kernel import e2m1_fp16
from ._quant_kernel import quantize_fp8_rows
from ._runtime import Key
from ._swiglu_kernel import swiglu
from ._triton import launch

MOST_ROWS = 4  # served whatever the number of experts
_UNIT = tl.constexpr(16384.0)  # what e2m1_fp16 leaves out
_COLUMNS = 1024
_TILE = {"high": 64, "num_warps": 4, "num_stages": 3}


@triton.jit
def _store_split(value, out_ptr, first, padded: tl.constexpr):
    """Store columns ``first …`` of a row at ``out_ptr``, ``value [n]`` fp16, in split order."""
    even, odd = tl.split(tl.reshape(value, [value.shape[0] // 2, 2]))
    index = first // 2 + tl.arange(0, value.shape[0] // 2)
    target = out_ptr + index // 64 * 128 + index % 64
    tl.store(target, even, mask=index < padded // 2)
    tl.store(target + 64, odd, mask=index < padded // 2)


@triton.jit(do_not_specialize=["experts"], do_not_specialize_on_alignment=["ids_ptr"])
def _rows_to_fp16(x_ptr, ids_ptr, out_ptr, experts, cols: tl.constexpr, topk: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    used = tl.zeros([], tl.int1)
    for k in tl.static_range(topk):
        expert = tl.load(ids_ptr + row * topk + k)
        used = used | ((expert >= 0) & (expert < experts))
    if used:
        first = tl.program_id(1) * block
        column = first + tl.arange(0, block)
        x = tl.load(x_ptr + row * cols + column, mask=column < cols, other=0.0)
        padded: tl.constexpr = (cols + 127) // 128 * 128
        _store_split(x.to(tl.float16), out_ptr + row * padded, first, padded)


@triton.jit(do_not_specialize=["experts"], do_not_specialize_on_alignment=["x_scale_ptr", "ids_ptr"])
def _product(
    x_ptr, x_scale_ptr, ids_ptr, w_ptr, s_ptr, out_ptr, experts,
    rows: tl.constexpr, cols: tl.constexpr, topk: tl.constexpr, high: tl.constexpr,
):  # fmt: skip
    """``out [pairs, rows]`` of split rows ``x [pairs / topk, cols]`` and their scales; ``high`` weight rows a program.
    ``ids [pairs]``; ``out`` of a pair without an expert is not written."""
    tiles: tl.constexpr = (rows + high - 1) // high
    pair = tl.program_id(0) // tiles
    token = (pair // topk).to(tl.int64)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    if (expert < 0) | (expert >= experts):
        return
    groups: tl.constexpr = cols // 32
    padded: tl.constexpr = (cols + 127) // 128 * 128
    steps: tl.constexpr = (groups + 7) // 8
    whole: tl.constexpr = rows % high == 0 and groups % 8 == 0
    row = tl.program_id(0) % tiles * high + tl.arange(0, high)
    byte = tl.arange(0, 128)  # of eight groups
    group = tl.arange(0, 8)
    s_ptr += expert * (rows * groups)
    w_tile = w_ptr + expert * (rows * (cols // 2)) + row[:, None] * (cols // 2) + byte[None, :]
    s_tile = s_ptr + row[:, None] * groups + group[None, :]
    x_tile = x_ptr + token * padded + (byte // 64 * 128 + byte % 64)[:, None] + (group * 0)[None, :]
    x_inside = byte[:, None] // 16 == group[None, :]
    row_scale_tile = x_scale_ptr + token * (padded // 128) + (group // 4)[None, :]
    codes = tl.load(s_tile, mask=_inside(row, group, rows, groups, whole), other=0)
    row_scale = tl.load(row_scale_tile, mask=(group < groups)[None, :], other=0.0)
    total = tl.zeros([high, 8], tl.float32)
    for step in range(0, steps):
        if whole:
            weight = tl.load(w_tile)
            x_mask = x_inside
        else:
            weight = tl.load(w_tile, mask=_inside(row, step * 8 + byte // 16, rows, groups, whole), other=0)
            x_mask = x_inside & (step * 8 + byte // 16 < padded // 32)[:, None]
        even = tl.load(x_tile, mask=x_mask, other=0.0)
        odd = tl.load(x_tile + 64, mask=x_mask, other=0.0)
        # 2^(code - 127), also the subnormal 2^-127; 255 gives infinity, see _poison
        scale = tl.maximum(codes.to(tl.int32) << 23, 0x400000).to(tl.float32, bitcast=True)
        factor = row_scale  # applied first, by itself: the product of both may pass 2^128 where no sum does
        following = step * 8 + 8 + group  # scales are read a step ahead: nothing waits for them
        more = step + 1 < steps
        s_tile += 8
        row_scale_tile += 2
        codes = tl.load(s_tile, mask=_inside(row, following, rows, groups, whole) & more, other=0)
        row_scale = tl.load(row_scale_tile, mask=(following < groups)[None, :] & more, other=0.0)
        # 16 bytes of a group: a thread has them all in memory and four of them in a matrix instruction
        weight = tl.reshape(weight, [high, 2, 4, 4, 4])
        weight = tl.reshape(tl.permute(weight, (0, 1, 3, 2, 4)), [high, 128])
        even = tl.reshape(tl.permute(tl.reshape(even, [2, 4, 4, 4, 8]), (0, 2, 1, 3, 4)), [128, 8])
        odd = tl.reshape(tl.permute(tl.reshape(odd, [2, 4, 4, 4, 8]), (0, 2, 1, 3, 4)), [128, 8])
        low_nibbles, high_nibbles = e2m1_fp16(weight)
        total += tl.dot(low_nibbles, even) * factor * scale  # two chains of matrix instructions, each half as long
        total += tl.dot(high_nibbles, odd) * factor * scale
        w_tile += 128
        x_tile += 256
    result = _poison(tl.sum(total, axis=1) * _UNIT, s_ptr, row, rows, groups)
    tl.store(out_ptr + pair.to(tl.int64) * rows + row, result.to(out_ptr.dtype.element_ty), mask=row < rows)


@triton.jit
def _inside(row, group, rows: tl.constexpr, groups: tl.constexpr, whole: tl.constexpr):
    """Which of ``[row, group]`` exist."""
    if whole:
        return (row >= 0)[:, None] & (group >= 0)[None, :]
    return (row < rows)[:, None] & (group < groups)[None, :]


@triton.jit
def _poison(result, s_ptr, row, rows: tl.constexpr, groups: tl.constexpr):
    """``result [rows]`` with NaN in rows that have a NaN among their scales. Such a scale was infinity in the sums,
    which therefore are not finite: only then are the scales read again."""
    finite = tl.abs(result) < float("inf")
    if tl.max(((row < rows) & (finite == 0)).to(tl.int32), axis=0) != 0:
        largest = tl.zeros([row.shape[0], 8], tl.int32)
        for start in range(0, groups, 8):
            group = start + tl.arange(0, 8)
            mask = _inside(row, group, rows, groups, False)
            codes = tl.load(s_ptr + row[:, None] * groups + group[None, :], mask=mask, other=0)
            largest = tl.maximum(largest, codes.to(tl.int32))
        result = tl.where(tl.max(largest, axis=1) == 255, float("nan"), result)
    return result


@triton.jit(do_not_specialize=["experts", "limit"], do_not_specialize_on_alignment=["ids_ptr", "route_ptr"])
def _activate(gate_up_ptr, ids_ptr, route_ptr, out_ptr, scale_ptr, experts, limit, inner: tl.constexpr):
    """Split rows ``out [pairs, inner]`` of FP8 codes, and their scales, of ``gate_up [pairs, 2 * inner]`` bf16."""
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(ids_ptr + pair)
    if (expert < 0) | (expert >= experts):
        return
    padded: tl.constexpr = (inner + 127) // 128 * 128
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    source = gate_up_ptr + pair * (2 * inner) + column
    gate = tl.load(source, mask=column < inner, other=0.0).to(tl.float32)
    up = tl.load(source + inner, mask=column < inner, other=0.0).to(tl.float32)
    value = swiglu(gate, up, limit) * tl.load(route_ptr + pair)
    codes, scale = quantize_fp8_rows(value.to(tl.bfloat16).to(tl.float32)[None, :])
    _store_split(tl.reshape(codes, [128]).to(tl.float16), out_ptr + pair * padded, tl.program_id(1) * 128, padded)
    tl.store(scale_ptr + pair * (padded // 128) + tl.program_id(1) + tl.arange(0, 1), scale)


def serves(tokens: int, pairs: int, experts: int, weight: torch.dtype, deterministic: bool) -> bool:
    """Whether the products are made here: FP4 weights and few pairs for the number of experts, so that an expert that
    is there twice and read twice costs less than the tiles of other kernels; rows may depend on their number."""
    return weight == torch.uint8 and not deterministic and (tokens <= MOST_ROWS or 4 * pairs <= 3 * experts)


def keys(hidden: int, inner: int, topk: int) -> dict[str, Key]:
    """What the launches of :func:`pair_results` are specialised on."""
    return {
        "rows": ("expert_ffn", "few_rows", hidden, topk),
        "gate_up": ("expert_ffn", "few_gate_up", hidden, inner, topk),
        "activate": ("expert_ffn", "few_activate", inner),
        "down": ("expert_ffn", "few_down", hidden, inner),
    }


def pair_results(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    limit: float,
) -> torch.Tensor:
    """What ``expert_ffn`` sums: ``[T * K, D]`` bf16, not written for ids that are none. Arguments are contiguous."""
    (tokens, topk), experts, hidden = ids.shape, w13.shape[0], w2.shape[1]
    inner, pairs, device = w13.shape[1] // 2, ids.numel(), x.device
    key, high = keys(hidden, inner, topk), _TILE["high"]
    columns = min(triton.next_power_of_2(hidden), _COLUMNS)
    split = torch.empty(tokens, 128 * triton.cdiv(hidden, 128), dtype=torch.float16, device=device)
    launch(
        key["rows"], _rows_to_fp16, (tokens, triton.cdiv(split.shape[1], columns)), x, ids, split, experts,
        cols=hidden, topk=topk, block=columns, num_warps=2,
    )  # fmt: skip
    gate_up = torch.empty(pairs, 2 * inner, dtype=torch.bfloat16, device=device)
    launch(
        key["gate_up"], _product, (pairs * triton.cdiv(2 * inner, high),),
        split, x_scale, ids, w13, w13_scale, gate_up, experts,
        rows=2 * inner, cols=hidden, topk=topk, **_TILE,
    )  # fmt: skip
    groups = triton.cdiv(inner, 128)
    act = torch.empty(pairs, 128 * groups, dtype=torch.float16, device=device)
    act_scale = torch.empty(pairs, groups, dtype=torch.float32, device=device)
    launch(
        key["activate"], _activate, (pairs, groups), gate_up, ids, weights, act, act_scale, experts, limit,
        inner=inner, num_warps=1,
    )  # fmt: skip
    parts = torch.empty(pairs, hidden, dtype=torch.bfloat16, device=device)
    launch(
        key["down"], _product, (pairs * triton.cdiv(hidden, high),), act, act_scale, ids, w2, w2_scale, parts, experts,
        rows=hidden, cols=inner, topk=1, **_TILE,
    )  # fmt: skip
    return parts
