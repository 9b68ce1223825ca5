"""Routed experts as grouped matrix products over blocks of (row, expert) pairs.

Launches, for whatever the ids hold: group the pairs by expert (``_expert_blocks_kernel``); for e4m3 rows, expand
them to bf16 (exact: the scales are powers of two); gate and up products with SwiGLU, routing weight and FP8 rounding
in their epilogue; down product; sum of every row's parts in top-k order. Workspaces depend on T, K, E, I and D only.

Weights stay in their format in memory and are decoded in registers. FP4 decodes to bf16 exactly, scale included; FP8
codes are bf16 values, and their fp32 block scale multiplies the sum over the block. Products accumulate in fp32.

Tiles are ``[weight rows, pairs]``: weight rows fill the fixed dimension of the matrix instruction, so a tile may have
few pairs. FP4 is read in words of 16 bits, that is four neighbouring columns. Instead of interleaving them, the four
nibbles are multiplied apart, by rows whose columns 0, 4, 8 … lie before their columns 1, 5, 9 … and so on ("split"
rows). Expanded rows and the activation are written that way for FP4 weights.

FP4 with few pairs for the number of experts is multiplied pair by pair (``expert_ffn_few_kernel``).

Every element of a tile is its own sum, in an order fixed by the constants, whatever the pairs around it hold.
"""

import functools

import torch
import triton
import triton.language as tl

from . import _expert_blocks_kernel, expert_ffn_few_kernel
from ._fp4_kernel import e2m1, e8m0, spoil
from ._quant_kernel import round_columns_to_fp8
from ._runtime import Key
from ._swiglu_kernel import swiglu
from ._triton import dtype_key, launch


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
    acc, w_ptr, s_ptr, row, inside, scale_row, x, step, cols: tl.constexpr, block_k: tl.constexpr, fmt: tl.constexpr
):
    """``acc [rows, pairs]`` plus weight rows ``row [rows]``, columns of k-block ``step``, times those of the pairs."""
    k = step * block_k + tl.arange(0, block_k)
    mask = inside[:, None]
    if cols % block_k != 0:
        mask = mask & (k < cols)[None, :]
    weight = tl.load(w_ptr + row[:, None] * cols + k[None, :], mask=mask, other=0.0)
    if fmt == "fp8":
        tl.static_assert(block_k == 128)
        factor = tl.load(s_ptr + scale_row * ((cols + 127) // 128) + step)
        acc += tl.dot(weight.to(tl.bfloat16), x) * factor
    elif fmt == "bf16":
        acc = tl.dot(weight, x, acc)
    else:
        acc = tl.dot(weight.to(tl.float32), x, acc, input_precision="ieee")
    return acc


@triton.jit
def _accumulate_fp4(
    acc, largest, w_ptr, s_ptr, row, inside, x0, x1, x2, x3, step, cols: tl.constexpr, block_k: tl.constexpr
):
    """The same for ``block_k`` words: columns ``4k + i`` times ``xi``. ``largest [rows, block_k / 8]``: see spoil."""
    k = step * block_k + tl.arange(0, block_k)
    group = step * (block_k // 8) + tl.arange(0, block_k // 8)
    mask = inside[:, None]
    group_mask = mask
    if cols % (4 * block_k) != 0:
        mask = mask & (k < cols // 4)[None, :]
        group_mask = group_mask & (group < cols // 32)[None, :]
    words = tl.load(w_ptr + row[:, None] * (cols // 4) + k[None, :], mask=mask, other=0)
    codes = tl.load(s_ptr + row[:, None] * (cols // 32) + group[None, :], mask=group_mask, other=0)
    w0, w1, w2, w3 = e2m1(words, e8m0(codes))
    acc = tl.dot(w0, x0, acc)
    acc = tl.dot(w1, x1, acc)
    acc = tl.dot(w2, x2, acc)
    acc = tl.dot(w3, x3, acc)
    return acc, tl.maximum(largest, codes.to(tl.int32))


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
            even, odd = tl.split(tl.reshape(value, [block // 4, 2, 2]))
            value0, value2 = tl.split(even)
            value1, value3 = tl.split(odd)
            run: tl.constexpr = cols // 4
            target = tl.program_id(1) * (block // 4) + tl.arange(0, block // 4)
            split_ptr = out_ptr + row * cols + target
            tl.store(split_ptr, value0, mask=target < run)
            tl.store(split_ptr + run, value1, mask=target < run)
            tl.store(split_ptr + 2 * run, value2, mask=target < run)
            tl.store(split_ptr + 3 * run, value3, mask=target < run)
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
    part: tl.constexpr = block_n // 4
    if fmt == "fp4":  # the tile's columns in split order, so that they are stored in runs
        column = tile * block_n + 4 * (lane % part) + lane // part
        target = (lane // part) * (inner // 4) + tile * part + lane % part
        w_ptr += expert * (2 * inner * (hidden // 4))
        s_ptr += expert * (2 * inner * (hidden // 32))
    else:
        column = tile * block_n + lane
        target = column
        w_ptr += expert * (2 * inner * hidden)
        s_ptr += expert * (2 * ((inner + 127) // 128) * ((hidden + 127) // 128))
    inside = column < inner
    scale_row = tile * block_n // 128
    up_scale_row = scale_row + (inner + 127) // 128
    width: tl.constexpr = hidden // 4 if fmt == "fp4" else hidden
    gate = tl.zeros([block_n, block_m], tl.float32)
    up = tl.zeros([block_n, block_m], tl.float32)
    gate_codes = tl.zeros([block_n, block_k // 8], tl.int32)
    up_codes = gate_codes
    for step in range(steps):
        x0 = _columns(x_ptr, token, held, 0, step, hidden, width, block_k, fmt)
        if fmt == "fp4":
            x1 = _columns(x_ptr, token, held, width, step, hidden, width, block_k, fmt)
            x2 = _columns(x_ptr, token, held, 2 * width, step, hidden, width, block_k, fmt)
            x3 = _columns(x_ptr, token, held, 3 * width, step, hidden, width, block_k, fmt)
            gate, gate_codes = _accumulate_fp4(
                gate, gate_codes, w_ptr, s_ptr, column, inside, x0, x1, x2, x3, step, hidden, block_k
            )
            up, up_codes = _accumulate_fp4(
                up, up_codes, w_ptr, s_ptr, column + inner, inside, x0, x1, x2, x3, step, hidden, block_k
            )
        else:
            gate = _accumulate(gate, w_ptr, s_ptr, column, inside, scale_row, x0, step, hidden, block_k, fmt)
            up = _accumulate(up, w_ptr, s_ptr, column + inner, inside, up_scale_row, x0, step, hidden, block_k, fmt)
    if fmt == "fp4":
        gate, up = spoil(gate, gate_codes), spoil(up, up_codes)

    dtype = out_ptr.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    route = tl.load(route_ptr + pair, mask=held, other=0.0)
    value = swiglu(gate, up, limit) * route[None, :]
    value = value.to(dtype)
    if fmt == "fp4" or fmt == "fp8":
        value = tl.where(inside[:, None], value.to(tl.float32), 0.0)
        value = round_columns_to_fp8(value).to(dtype)
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
        w_ptr += expert * (hidden * (inner // 4))
        s_ptr += expert * (hidden * (inner // 32))
    else:
        w_ptr += expert * (hidden * inner)
        s_ptr += expert * (((hidden + 127) // 128) * ((inner + 127) // 128))
    scale_row = tile * block_n // 128
    width: tl.constexpr = inner // 4 if fmt == "fp4" else inner
    acc = tl.zeros([block_n, block_m], tl.float32)
    largest = tl.zeros([block_n, block_k // 8], tl.int32)
    for step in range(steps):
        x0 = _columns(x_ptr, slot, held, 0, step, inner, width, block_k, fmt)
        if fmt == "fp4":
            x1 = _columns(x_ptr, slot, held, width, step, inner, width, block_k, fmt)
            x2 = _columns(x_ptr, slot, held, 2 * width, step, inner, width, block_k, fmt)
            x3 = _columns(x_ptr, slot, held, 3 * width, step, inner, width, block_k, fmt)
            acc, largest = _accumulate_fp4(
                acc, largest, w_ptr, s_ptr, column, inside, x0, x1, x2, x3, step, inner, block_k
            )
        else:
            acc = _accumulate(acc, w_ptr, s_ptr, column, inside, scale_row, x0, step, inner, block_k, fmt)
    if fmt == "fp4":
        acc = spoil(acc, largest)
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


def _format(x: torch.Tensor, weight: torch.Tensor) -> str:
    """fp4 and fp8 name the weights; dense products are bf16 only if both sides are."""
    both = x.dtype == weight.dtype == torch.bfloat16
    return _FORMATS.get(weight.dtype, "bf16" if both else "fp32")


@functools.cache
def _tensor_memory(device: torch.device) -> bool:
    """Whether products accumulate in tensor memory (SM100): each of a chain takes columns of its own, of 512 in all, so
    the four products of FP4, for gate and for up, leave room for blocks of 32 pairs."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10


def block_m(
    tokens: int, topk: int, experts: int, weight: torch.dtype, deterministic: bool, device: torch.device
) -> int:
    """Pairs per block, 0 if every pair is alone: few where the average expert has few. Where it has many, FP4 takes
    more: every block decodes its weights again. One constant for ``deterministic``, so that a row's result does not
    hang on two programs summing alike."""
    pairs = tokens * topk
    if expert_ffn_few_kernel.serves(tokens, pairs, experts, weight, deterministic):
        return 0
    small, middle, large = 16, 64, 64
    if weight == torch.uint8:
        middle, large = (32, 32) if _tensor_memory(device) else (64, 128)
    if deterministic:
        return middle
    average = pairs / experts
    return small if average <= small else middle if average <= middle else large


def _tile(rows: int, cols: int, fmt: str, pairs: int) -> dict[str, int | str]:
    """Constants of a product with ``[rows, cols]`` weights, for blocks of ``pairs`` pairs."""
    block_n = min(max(triton.next_power_of_2(rows), 16), 32 if fmt == "fp32" else 128)
    stages = 2 if fmt == "fp32" else 3
    if fmt == "fp4":  # words of four columns; the matrix instruction takes 16 at least
        width = cols // 4
        block_k = next((size for size in (32, 16) if width % size == 0), 16)
        if pairs == 64 and width % 256 == 0:  # longer lines instead of more of them; there is no room for both
            block_k, stages = 64, 2
    else:
        width, block_k = cols, {"fp8": 128, "bf16": 64, "fp32": 32}[fmt]
    return {
        "fmt": fmt, "block_m": pairs, "block_n": block_n, "block_k": block_k, "steps": triton.cdiv(width, block_k),
        "num_warps": 4 if pairs == 16 or fmt == "fp32" else 8, "num_stages": stages,
    }  # fmt: skip


def keys(x: torch.Tensor, weight: torch.Tensor, hidden: int, inner: int, topk: int, pairs: int) -> dict[str, Key]:
    """What the launches are specialised on: dtypes of ``x`` and ``weight``, sizes, and ``pairs`` per block."""
    fmt, dtypes = _format(x, weight), dtype_key(x, weight)
    total = {"sum": ("expert_ffn", "sum", "float32" if x.dtype == torch.float32 else "bfloat16", hidden, topk)}
    if not pairs:
        return expert_ffn_few_kernel.keys(hidden, inner, topk) | total
    expand = {"expand": ("expert_ffn", "expand", fmt, hidden, topk)} if fmt in ("fp4", "fp8") else {}
    gate_up = ("expert_ffn", "gate_up", *dtypes, hidden, inner, topk, pairs)
    return expand | total | {"gate_up": gate_up, "down": ("expert_ffn", "down", *dtypes, hidden, inner, pairs)}


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
    x, x_scale, ids, weights = x.contiguous(), x_scale.contiguous(), ids.contiguous(), weights.contiguous()
    w13, w13_scale, w2, w2_scale = (t.contiguous() for t in (w13, w13_scale, w2, w2_scale))
    (tokens, topk), experts, hidden = ids.shape, w13.shape[0], out.shape[1]
    pairs = block_m(tokens, topk, experts, w13.dtype, deterministic, x.device)
    key = keys(x, w13, hidden, w13.shape[1] // 2, topk, pairs)
    arguments = (x, x_scale, ids, weights, w13, w13_scale, w2, w2_scale, limit)
    parts = _grouped(*arguments, key, pairs) if pairs else expert_ffn_few_kernel.pair_results(*arguments)
    block = min(triton.next_power_of_2(hidden), _COLUMNS)
    launch(
        key["sum"], _sum_parts, (tokens, triton.cdiv(hidden, block)), parts, ids, out, experts,
        hidden=hidden, topk=topk, block=block, num_warps=4,
    )  # fmt: skip


def _grouped(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    limit: float,
    key: dict[str, Key],
    pairs: int,
) -> torch.Tensor:
    """What is summed, ``[T * K, D]``, in blocks of ``pairs`` pairs; not written for ids that are none."""
    (tokens, topk), experts, hidden, inner = ids.shape, w13.shape[0], w2.shape[1], w13.shape[1] // 2
    act, fmt = torch.float32 if x.dtype == torch.float32 else torch.bfloat16, _format(x, w13)
    slots, owner = _expert_blocks_kernel.run(ids, experts, pairs)
    if "expand" in key:
        block = min(triton.next_power_of_2(hidden), _COLUMNS)
        expanded = torch.empty(x.shape, dtype=act, device=x.device)
        launch(
            key["expand"], _expand, (tokens, triton.cdiv(hidden, block)), x, x_scale, ids, expanded, experts,
            cols=hidden, topk=topk, split=w13.dtype == torch.uint8, block=block, num_warps=2,
        )  # fmt: skip
        x = expanded
    if w13.dtype == torch.uint8:
        w13, w2 = (weight.view(torch.int16) for weight in (w13, w2))
    blocks = owner.shape[0]
    hidden_rows = torch.empty(slots.shape[0], inner, dtype=act, device=x.device)
    tile = _tile(inner, hidden, fmt, pairs)
    launch(
        key["gate_up"], _gate_up, (blocks * triton.cdiv(inner, tile["block_n"]),),
        x, w13, w13_scale, slots, owner, weights, hidden_rows, limit,
        hidden=hidden, inner=inner, topk=topk, **tile,
    )  # fmt: skip
    parts = torch.empty(ids.numel(), hidden, dtype=act, device=x.device)
    tile = _tile(hidden, inner, fmt, pairs)
    launch(
        key["down"], _down, (blocks * triton.cdiv(hidden, tile["block_n"]),),
        hidden_rows, w2, w2_scale, slots, owner, parts,
        hidden=hidden, inner=inner, **tile,
    )  # fmt: skip
    return parts
