"""Products ``x @ weight.T`` of few rows, which read the weight once and wait for nothing else.

A decode step has few rows and small matrices: tiles of 64 weight rows that walk all of K leave most of a GPU idle.
Here a program owns 16 weight rows, and each of its warps a part of K of its own: several parts of one step side by
side, each a tensor-core product of [16, step] by [step, tokens], added up once at the end. A single row goes to
``_one_row_kernel``. The order of a row's sums is then another than that of ``_matmul_tiles``; deterministic products
therefore stay there.
"""

import torch
import triton
import triton.language as tl

from . import _matmul_tiles as tiles, _one_row_kernel as one_row
from ._aligned import aligned
from ._runtime import Key
from ._triton import launch, names

_TOKEN_TILES = {torch.bfloat16: (8, 16, 32), torch.float8_e4m3fn: (8, 16, 32, 64)}  # above: tiles of 64 weight rows
MOST_OUTS = 16384  # from here on tiles of 64 weight rows fill a GPU several times and read longer lines
_PARTS = 4  # one a warp


@triton.jit(do_not_specialize=["num_tokens", "units", "num_outs"])
def _few_rows(
    x_ptr, weight_ptr, out_ptr, num_tokens, units, num_outs, unit: tl.constexpr, outs: tl.constexpr,
    tokens: tl.constexpr, parts: tl.constexpr, step: tl.constexpr,
):  # fmt: skip
    width = units * unit  # products, so that the compiler knows the alignment of the rows
    first_out = tl.program_id(0).to(tl.int64) * outs
    out = tl.arange(0, outs)[None, :, None]
    token = tl.arange(0, tokens)[None, :, None]
    column = tl.arange(0, parts)[:, None, None] * step + tl.arange(0, step)[None, None, :]
    out_inside = out < num_outs - first_out
    token_inside = token < num_tokens
    weight_tile = weight_ptr + first_out * width + out * width + column
    x_tile = x_ptr + token * width + column
    total = tl.zeros((parts, outs, tokens), tl.float32)
    for start in range(0, width, parts * step):
        if unit == parts * step:
            weight = tl.load(weight_tile, mask=out_inside, other=0.0)
            x = tl.load(x_tile, mask=token_inside, other=0.0)
        else:
            inside = column < width - start
            weight = tl.load(weight_tile, mask=out_inside & inside, other=0.0)
            x = tl.load(x_tile, mask=token_inside & inside, other=0.0)
        total = tl.dot(weight, tl.permute(x, (0, 2, 1)), total)
        weight_tile += parts * step
        x_tile += parts * step
    _store(total, out_ptr, first_out, num_tokens, num_outs, outs, tokens)


@triton.jit(do_not_specialize=["num_tokens", "units", "num_outs", "half"])
def _few_rows_fp8(
    x_ptr, x_scale_ptr, weight_ptr, weight_scale_ptr, out_ptr, num_tokens, units, num_outs, half,
    unit: tl.constexpr, halves: tl.constexpr, outs: tl.constexpr, tokens: tl.constexpr, parts: tl.constexpr,
    step: tl.constexpr,
):  # fmt: skip
    width = units * unit
    first_out = tl.program_id(0).to(tl.int64) * outs
    out = tl.arange(0, outs)[None, :, None]
    token = tl.arange(0, tokens)[None, :, None]
    part = tl.arange(0, parts)
    column = part[:, None, None] * step + tl.arange(0, step)[None, None, :]
    out_inside = out < num_outs - first_out
    token_inside = token < num_tokens
    weight_tile = weight_ptr + first_out * width + out * width + column
    x_tile = x_ptr + token * width + column
    blocks = tl.cdiv(width, step)
    row_inside = (tl.arange(0, tokens) < num_tokens)[None, :]
    x_scale_tile = x_scale_ptr + tl.arange(0, tokens)[None, :] * blocks + part[:, None]
    if halves:  # each half of the rows has its own blocks, and a tile may have rows of several
        place = (first_out + tl.arange(0, outs)).to(tl.int32)
        scale_tile = weight_scale_ptr + (tiles.row_block(place, half, step) * blocks)[None, :] + part[:, None]
        scale_inside = (place < num_outs)[None, :]
    else:
        scale_tile = weight_scale_ptr + first_out // step * blocks + part[:, None]
        scale_inside = part[:, None] >= 0
    x_scale = tl.load(x_scale_tile, mask=(part[:, None] < blocks) & row_inside, other=0.0)
    weight_scale = tl.load(scale_tile, mask=(part[:, None] < blocks) & scale_inside, other=0.0)
    total = tl.zeros((parts, outs, tokens), tl.float32)
    for first in range(0, blocks, parts):
        if unit == parts * step:
            weight = tl.load(weight_tile, mask=out_inside, other=0.0)
            x = tl.load(x_tile, mask=token_inside, other=0.0)
        else:
            inside = column < width - first * step
            weight = tl.load(weight_tile, mask=out_inside & inside, other=0.0)
            x = tl.load(x_tile, mask=token_inside & inside, other=0.0)
        scale = weight_scale[:, :, None] * x_scale[:, None, :]
        x_scale_tile += parts
        scale_tile += parts
        known = part[:, None] < blocks - first - parts
        x_scale = tl.load(x_scale_tile, mask=known & row_inside, other=0.0)  # of the next step: nothing waits for it
        weight_scale = tl.load(scale_tile, mask=known & scale_inside, other=0.0)
        # e4m3 is exact in fp16, whose products are added in fp32; see fp8_linear_kernel
        product = tl.dot(weight.to(tl.float16), tl.permute(x.to(tl.float16), (0, 2, 1)))
        total += product * scale
        weight_tile += parts * step
        x_tile += parts * step
    _store(total, out_ptr, first_out, num_tokens, num_outs, outs, tokens)


@triton.jit
def _store(total, out_ptr, first_out, num_tokens, num_outs, outs: tl.constexpr, tokens: tl.constexpr):
    result = tl.sum(total, axis=0)
    out, token = tl.arange(0, outs)[:, None], tl.arange(0, tokens)[None, :]
    target = out_ptr + first_out + out + token.to(tl.int64) * num_outs
    inside = (out < num_outs - first_out) & (token < num_tokens)
    tl.store(target, result.to(out_ptr.dtype.element_ty), mask=inside)


def serves(x: torch.Tensor, weight: torch.Tensor, *, deterministic: bool) -> bool:
    """Whether the product of these tensors, which may be meta tensors, is made here."""
    if deterministic or x.dtype != weight.dtype or x.dtype not in _TOKEN_TILES:
        return False
    if x.shape[0] == 1 and x.dtype == torch.float8_e4m3fn:
        return True
    return x.shape[0] <= _TOKEN_TILES[x.dtype][-1] and weight.shape[0] < MOST_OUTS


def _options(x: torch.Tensor, half: int) -> dict[str, int]:
    """Tile, warps and stages: the fastest of a sweep on an H200."""
    bf16 = x.dtype == torch.bfloat16
    tokens = next(tile for tile in _TOKEN_TILES[x.dtype] if x.shape[0] <= tile)
    step = 64 if bf16 and tokens == 32 else 128  # values of one part; 128 codes have one scale
    stages = 4 if bf16 else 2 if tokens == 64 else 3
    options = {"outs": min(tokens, 16) if bf16 else 16, "tokens": tokens, "parts": _PARTS, "step": step}
    options |= {"unit": tiles.width_unit(x.shape[1], _PARTS * step), "num_warps": _PARTS, "num_stages": stages}
    return options if bf16 else options | {"halves": half % step != 0}


def _key(x: torch.Tensor, dtype: torch.dtype, options: dict[str, int]) -> Key:
    name = "few_rows" if x.dtype == torch.bfloat16 else "few_rows_fp8"
    return (name, options["tokens"], options["unit"], int(options.get("halves", 0)), *names(dtype))


def key(x: torch.Tensor, dtype: torch.dtype, half: int = 0) -> Key:
    """What the launch for ``x``, this result dtype and ``half`` (see ``fp8_linear_kernel.run``) is specialised on."""
    return one_row.key(x, dtype, half) if x.shape[0] == 1 else _key(x, dtype, _options(x, half))


def run(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """``out [T, N] = x [T, K] @ weight[N, K].T``, bf16 operands, fp32 accumulation, rounded once."""
    if x.shape[0] == 1:
        return one_row.run(x, weight, out)
    options = _options(x, 0)
    launch(
        _key(x, out.dtype, options), _few_rows, (_grid(x, weight, options),), aligned(x), aligned(weight), out,
        x.shape[0], x.shape[1] // options["unit"], weight.shape[0], **options,
    )  # fmt: skip


def run_fp8(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    out: torch.Tensor,
    half: int,
) -> None:
    """The same of e4m3 codes with block scales; arguments as those of ``fp8_linear_kernel.run``."""
    if x.shape[0] == 1:
        return one_row.run_fp8(x, x_scale, weight, weight_scale, out, half)
    options = _options(x, half)
    tensors = [aligned(t) for t in (x, x_scale, weight, weight_scale)]
    launch(
        _key(x, out.dtype, options), _few_rows_fp8, (_grid(x, weight, options),), *tensors, out, x.shape[0],
        x.shape[1] // options["unit"], weight.shape[0], half, **options,
    )  # fmt: skip


def _grid(x: torch.Tensor, weight: torch.Tensor, options: dict[str, int]) -> int:
    return triton.cdiv(weight.shape[0], options["outs"]) if x.shape[0] else 0
