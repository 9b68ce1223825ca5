"""Routed experts as grouped matrix products over blocks of (row, expert) pairs.

Launches, for whatever the ids hold: group the pairs by expert (``_expert_blocks_kernel``); for e4m3 rows, expand
them to bf16 (exact: the scales are powers of two); gate and up products with SwiGLU, routing weight and FP8 rounding
in their epilogue; down product; sum of every row's parts in top-k order. Workspaces depend on T, K, E, I and D only.

Weights stay in their format in memory and are decoded in registers. FP4 decodes to bf16 exactly, scale included; FP8
codes are bf16 values, and their fp32 block scale multiplies the sum over the block. Products accumulate in fp32.

Tiles are ``[weight rows, pairs]``: weight rows fill the fixed dimension of the matrix instruction, so a tile may have
few pairs. The two nibbles of an FP4 byte are neighbouring columns. Instead of interleaving them, the low and the high
nibbles are multiplied apart, by rows whose even columns lie before their odd ones ("split" rows). Expanded rows and
the activation are written that way for FP4 weights.

Every element of a tile is its own sum, in an order fixed by the constants, whatever the pairs around it hold.
"""

import torch
import triton
import triton.language as tl

from . import _expert_blocks_kernel
from ._triton import dtype_key, launch

_UNBIAS = tl.constexpr(2.0**126)
_FP8_MAX = tl.constexpr(448.0)
_FP8_FLOOR_BITS = tl.constexpr(0x38D1B717)  # 1e-4


@triton.jit
def _e8m0(code):
    """fp32 ``2^(code - 127)``; 255 gives NaN."""
    code = code.to(tl.int32)
    bits = tl.where(code == 0, 1 << 22, code << 23)
    return tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _e2m1(code, scale):
    """bf16 values of FP4 codes 0…15 ``[rows, n]`` times fp32 ``scale [rows, n / 16]``, exact.

    Exponent and mantissa bits of a code, put in their place in an fp32 number, are the value times 2^-126: also 0.5,
    which is subnormal in both formats.
    """
    code = code.to(tl.uint32)
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    value = bits.to(tl.float32, bitcast=True) * _UNBIAS
    groups = tl.reshape(value, [scale.shape[0], scale.shape[1], 16]) * scale[:, :, None]
    return tl.reshape(groups, [value.shape[0], value.shape[1]]).to(tl.bfloat16)


@triton.jit
def _columns(x_ptr, row, inside, start, step, cols, limit: tl.constexpr, block_k: tl.constexpr, fmt: tl.constexpr):
    """Transposed tile ``[block_k, pairs]`` of rows ``row [pairs]`` (int64), from column ``start + step * block_k``.

    Columns from ``limit`` on (counted without ``start``) are zero.
    """
    k = step * block_k + tl.arange(0, block_k)
    mask = inside[None, :]
    if limit % block_k != 0:
        mask = mask & (k < limit)[:, None]
    x = tl.load(x_ptr + row[None, :] * cols + (start + k)[:, None], mask=mask, other=0.0)
    if fmt == "fp32":
        x = x.to(tl.float32)
    return x


@triton.jit
def _accumulate(
    acc, w_ptr, s_ptr, row, inside, scale_row, low, high, step,
    cols: tl.constexpr, block_k: tl.constexpr, fmt: tl.constexpr,
):  # fmt: skip
    """``acc [rows, pairs]`` plus weight rows ``row [rows]``, k-block ``step``, times that block of the pairs' rows.

    FP4: ``block_k`` bytes, that is columns ``2k`` times ``low`` and ``2k + 1`` times ``high``. Others: ``block_k``
    columns times ``low``.
    """
    k = step * block_k + tl.arange(0, block_k)
    mask = inside[:, None]
    if fmt == "fp4":
        packed = tl.load(w_ptr + row[:, None] * (cols // 2) + k[None, :], mask=mask, other=0)
        group = step * (block_k // 16) + tl.arange(0, block_k // 16)
        scale = _e8m0(tl.load(s_ptr + row[:, None] * (cols // 32) + group[None, :], mask=mask, other=0))
        acc = tl.dot(_e2m1(packed & 15, scale), low, acc)
        acc = tl.dot(_e2m1(packed >> 4, scale), high, acc)
    else:
        if cols % block_k != 0:
            mask = mask & (k < cols)[None, :]
        weight = tl.load(w_ptr + row[:, None] * cols + k[None, :], mask=mask, other=0.0)
        if fmt == "fp8":
            tl.static_assert(block_k == 128)
            factor = tl.load(s_ptr + scale_row * ((cols + 127) // 128) + step)
            acc += tl.dot(weight.to(tl.bfloat16), low) * factor
        elif fmt == "bf16":
            acc = tl.dot(weight, low, acc)
        else:
            acc = tl.dot(weight.to(tl.float32), low, acc, input_precision="ieee")
    return acc


@triton.jit
def _rounded_to_fp8(x):
    """Columns of ``x [n <= 128, pairs]`` fp32 rounded to e4m3 with one power-of-two scale each, and back."""
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)  # integer order is float order, NaN on top
    amax = tl.maximum(bits, _FP8_FLOOR_BITS).to(tl.float32, bitcast=True)
    ratio = tl.div_rn(amax, tl.full(amax.shape, _FP8_MAX, tl.float32)).to(tl.int32, bitcast=True)
    exponent = (ratio >> 23) + ((ratio & 0x7FFFFF) != 0).to(tl.int32)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    scaled = x * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[None, :]  # a power of two: exact
    scaled = tl.where(scaled > _FP8_MAX, _FP8_MAX, tl.where(scaled < -_FP8_MAX, -_FP8_MAX, scaled))
    return scaled.to(tl.float8e4nv).to(tl.float32) * scale[None, :]


@triton.jit(do_not_specialize=["experts"], do_not_specialize_on_alignment=["scale_ptr", "ids_ptr"])
def _expand(
    x_ptr, scale_ptr, ids_ptr, out_ptr, experts,
    cols: tl.constexpr, topk: tl.constexpr, split: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    used = tl.zeros([], tl.int1)
    for k in tl.static_range(topk):
        expert = tl.load(ids_ptr + row * topk + k)
        used = used | ((expert >= 0) & (expert < experts))
    if used:
        column = tl.program_id(1) * block + tl.arange(0, block)
        inside = column < cols
        x = tl.load(x_ptr + row * cols + column, mask=inside, other=0.0).to(tl.float32)
        group: tl.constexpr = min(block, 128)
        number = tl.program_id(1) * (block // group) + tl.arange(0, block // group)
        scales: tl.constexpr = (cols + 127) // 128
        scale = tl.load(scale_ptr + row * scales + number, mask=number < scales, other=0.0)
        value = tl.reshape(tl.reshape(x, [block // group, group]) * scale[:, None], [block]).to(tl.bfloat16)
        if split:
            even, odd = tl.split(tl.reshape(value, [block // 2, 2]))
            target = tl.program_id(1) * (block // 2) + tl.arange(0, block // 2)
            tl.store(out_ptr + row * cols + target, even, mask=target < cols // 2)
            tl.store(out_ptr + row * cols + cols // 2 + target, odd, mask=target < cols // 2)
        else:
            tl.store(out_ptr + row * cols + column, value, mask=inside)


@triton.jit(do_not_specialize=["limit"], do_not_specialize_on_alignment=["route_ptr"])
def _gate_up(
    x_ptr, w_ptr, s_ptr, slots_ptr, owner_ptr, route_ptr, out_ptr, limit,
    hidden: tl.constexpr, inner: tl.constexpr, topk: tl.constexpr, fmt: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, steps: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (inner + block_n - 1) // block_n
    block = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    expert = tl.load(owner_ptr + block).to(tl.int64)
    if expert < 0:
        return
    slot = block.to(tl.int64) * block_m + tl.arange(0, block_m)
    pair = tl.load(slots_ptr + slot)
    held = pair >= 0
    token = (tl.maximum(pair, 0) // topk).to(tl.int64)
    lane = tl.arange(0, block_n)
    half: tl.constexpr = block_n // 2
    if fmt == "fp4":  # the tile's even columns before its odd ones, so that both are stored in runs
        column = tile * block_n + 2 * (lane % half) + lane // half
        target = (lane // half) * (inner // 2) + tile * half + lane % half
        w_ptr += expert * (inner * hidden)
        s_ptr += expert * (2 * inner * (hidden // 32))
    else:
        column = tile * block_n + lane
        target = column
        w_ptr += expert * (2 * inner * hidden)
        s_ptr += expert * (2 * ((inner + 127) // 128) * ((hidden + 127) // 128))
    inside = column < inner
    scale_row = tile * block_n // 128
    up_scale_row = scale_row + (inner + 127) // 128
    width: tl.constexpr = hidden // 2 if fmt == "fp4" else hidden
    gate = tl.zeros([block_n, block_m], tl.float32)
    up = tl.zeros([block_n, block_m], tl.float32)
    for step in range(steps):
        low = _columns(x_ptr, token, held, 0, step, hidden, width, block_k, fmt)
        high = low
        if fmt == "fp4":
            high = _columns(x_ptr, token, held, width, step, hidden, width, block_k, fmt)
        gate = _accumulate(gate, w_ptr, s_ptr, column, inside, scale_row, low, high, step, hidden, block_k, fmt)
        up = _accumulate(up, w_ptr, s_ptr, column + inner, inside, up_scale_row, low, high, step, hidden, block_k, fmt)

    dtype = out_ptr.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    gate = tl.where(gate > limit, limit, gate)  # comparisons let a NaN through, minimum would not
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    route = tl.load(route_ptr + pair, mask=held, other=0.0)
    value = gate / (1.0 + tl.exp(-gate)) * up * route[None, :]
    value = value.to(dtype)
    if fmt == "fp4" or fmt == "fp8":
        value = tl.where(inside[:, None], value.to(tl.float32), 0.0)
        value = _rounded_to_fp8(value).to(dtype)
    tl.store(out_ptr + slot[None, :] * inner + target[:, None], value, mask=inside[:, None])


@triton.jit
def _down(
    x_ptr, w_ptr, s_ptr, slots_ptr, owner_ptr, parts_ptr,
    hidden: tl.constexpr, inner: tl.constexpr, fmt: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, steps: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (hidden + block_n - 1) // block_n
    block = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    expert = tl.load(owner_ptr + block).to(tl.int64)
    if expert < 0:
        return
    slot = block.to(tl.int64) * block_m + tl.arange(0, block_m)
    pair = tl.load(slots_ptr + slot)
    held = pair >= 0
    column = tile * block_n + tl.arange(0, block_n)
    inside = column < hidden
    if fmt == "fp4":
        w_ptr += expert * (hidden * (inner // 2))
        s_ptr += expert * (hidden * (inner // 32))
    else:
        w_ptr += expert * (hidden * inner)
        s_ptr += expert * (((hidden + 127) // 128) * ((inner + 127) // 128))
    scale_row = tile * block_n // 128
    width: tl.constexpr = inner // 2 if fmt == "fp4" else inner
    acc = tl.zeros([block_n, block_m], tl.float32)
    for step in range(steps):
        low = _columns(x_ptr, slot, held, 0, step, inner, width, block_k, fmt)
        high = low
        if fmt == "fp4":
            high = _columns(x_ptr, slot, held, width, step, inner, width, block_k, fmt)
        acc = _accumulate(acc, w_ptr, s_ptr, column, inside, scale_row, low, high, step, inner, block_k, fmt)
    target = parts_ptr + pair.to(tl.int64)[None, :] * hidden + column[:, None]
    tl.store(target, acc.to(parts_ptr.dtype.element_ty), mask=inside[:, None] & held[None, :])


@triton.jit(do_not_specialize=["experts"], do_not_specialize_on_alignment=["ids_ptr"])
def _sum_parts(parts_ptr, ids_ptr, out_ptr, experts, hidden: tl.constexpr, topk: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < hidden
    total = tl.zeros([block], tl.float32)
    for k in tl.static_range(topk):
        expert = tl.load(ids_ptr + row * topk + k)
        held = (expert >= 0) & (expert < experts)
        part = tl.load(parts_ptr + (row * topk + k) * hidden + column, mask=inside & held, other=0.0)
        total += part.to(tl.float32)
    tl.store(out_ptr + row * hidden + column, total, mask=inside)


_FORMATS = {torch.uint8: "fp4", torch.float8_e4m3fn: "fp8"}
_COLUMNS = 1024
_DETERMINISTIC_BLOCK = 64
Key = tuple[str | int, ...]


def _format(x: torch.Tensor, weight: torch.Tensor) -> str:
    """fp4 and fp8 name the weights; dense products are bf16 only if both sides are."""
    both = x.dtype == weight.dtype == torch.bfloat16
    return _FORMATS.get(weight.dtype, "bf16" if both else "fp32")


def block_m(pairs: int, experts: int, deterministic: bool) -> int:
    """Pairs per block: few where the average expert has few. One constant for ``deterministic``, so that a row's
    result does not hang on two programs summing alike."""
    return 16 if pairs <= 16 * experts and not deterministic else _DETERMINISTIC_BLOCK


def _tile(rows: int, cols: int, fmt: str, pairs: int) -> dict[str, int | str]:
    """Constants of a product with ``[rows, cols]`` weights, for blocks of ``pairs`` pairs."""
    block_n = min(max(triton.next_power_of_2(rows), 16), 32 if fmt == "fp32" else 128)
    if fmt == "fp4":  # bytes; every k-block is whole, because cols is a multiple of 32
        block_k = next(size for size in (64, 32, 16) if cols // 2 % size == 0)
        steps = cols // 2 // block_k
    else:
        block_k = {"fp8": 128, "bf16": 64, "fp32": 32}[fmt]
        steps = triton.cdiv(cols, block_k)
    return {
        "fmt": fmt, "block_m": pairs, "block_n": block_n, "block_k": block_k, "steps": steps,
        "num_warps": 4 if pairs == 16 or fmt == "fp32" else 8, "num_stages": 2 if fmt == "fp32" else 3,
    }  # fmt: skip


def keys(x: torch.Tensor, weight: torch.Tensor, hidden: int, inner: int, topk: int, pairs: int) -> dict[str, Key]:
    """What the launches are specialised on: dtypes of ``x`` and ``weight``, sizes, and ``pairs`` per block."""
    fmt, dtypes = _format(x, weight), dtype_key(x, weight)
    expand = {"expand": ("expert_ffn", "expand", fmt, hidden, topk)} if fmt in ("fp4", "fp8") else {}
    return expand | {
        "gate_up": ("expert_ffn", "gate_up", *dtypes, hidden, inner, topk, pairs),
        "down": ("expert_ffn", "down", *dtypes, hidden, inner, pairs),
        "sum": ("expert_ffn", "sum", "float32" if x.dtype == torch.float32 else "bfloat16", hidden, topk),
    }


def run(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    out: torch.Tensor,
    limit: float,
    deterministic: bool,
) -> None:
    """Write the result of ``expert_ffn`` to ``out [T, D]`` fp32."""
    x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
    w13, w13_scale, w2, w2_scale = (t.contiguous() for t in (w13, w13_scale, w2, w2_scale))
    (tokens, topk), experts, hidden = ids.shape, w13.shape[0], out.shape[1]
    inner = w13.shape[1] // 2
    pairs = block_m(ids.numel(), experts, deterministic)
    key = keys(x, w13, hidden, inner, topk, pairs)
    act = torch.float32 if x.dtype == torch.float32 else torch.bfloat16
    slots, owner = _expert_blocks_kernel.run(ids, experts, pairs)
    if "expand" in key:
        block = min(triton.next_power_of_2(hidden), _COLUMNS)
        expanded = torch.empty(x.shape, dtype=act, device=x.device)
        launch(
            key["expand"], _expand, (tokens, triton.cdiv(hidden, block)),
            x, x_scale.contiguous(), ids, expanded, experts,
            cols=hidden, topk=topk, split=w13.dtype == torch.uint8, block=block, num_warps=2,
        )  # fmt: skip
        x = expanded
    blocks = owner.shape[0]
    hidden_rows = torch.empty(slots.shape[0], inner, dtype=act, device=x.device)
    tile = _tile(inner, hidden, _format(x, w13), pairs)
    launch(
        key["gate_up"], _gate_up, (blocks * triton.cdiv(inner, tile["block_n"]),),
        x, w13, w13_scale, slots, owner, weights, hidden_rows, limit,
        hidden=hidden, inner=inner, topk=topk, **tile,
    )  # fmt: skip
    parts = torch.empty(ids.numel(), hidden, dtype=act, device=x.device)
    tile = _tile(hidden, inner, _format(hidden_rows, w2), pairs)
    launch(
        key["down"], _down, (blocks * triton.cdiv(hidden, tile["block_n"]),),
        hidden_rows, w2, w2_scale, slots, owner, parts,
        hidden=hidden, inner=inner, **tile,
    )  # fmt: skip
    block = min(triton.next_power_of_2(hidden), _COLUMNS)
    launch(
        key["sum"], _sum_parts, (tokens, triton.cdiv(hidden, block)), parts, ids, out, experts,
        hidden=hidden, topk=topk, block=block, num_warps=4,
    )  # fmt: skip
