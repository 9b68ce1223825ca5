"""FP8 product with block scales; tiles and their order are those of ``_matmul_tiles``, or of ``_few_rows_kernel``.

K advances one block of 128 codes a step: a tensor-core product from zero, then one fp32 multiply-add with the block's
two scales. Codes are decoded to fp16 in registers, exactly and two by one instruction (bf16 takes five, three of them
at an eighth of the rate): the weights still cost one byte each, the products run at fp16 rate.
"""

import torch
import triton
import triton.language as tl

from . import _few_rows_kernel as few_rows, _matmul_tiles as tiles
from ._aligned import aligned
from ._runtime import Key
from ._triton import launch, names


@triton.jit(do_not_specialize=["num_tokens", "units", "out_units", "half"])
def _fp8_linear(
    x_ptr, x_scale_ptr, weight_ptr, weight_scale_ptr, out_ptr, num_tokens, units, out_units, half,
    unit: tl.constexpr, out_unit: tl.constexpr, halves: tl.constexpr, outs: tl.constexpr, tokens: tl.constexpr,
    step: tl.constexpr, woven: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    width = units * unit  # products, so that the compiler knows the alignment of the rows
    num_outs = out_units * out_unit
    first_out, first_token = tiles.place(tl.program_id(0), num_outs, num_tokens, outs, tokens, group)
    out = tl.arange(0, outs)
    token = tl.arange(0, tokens)
    column = tl.arange(0, step)
    out_inside = out < num_outs - first_out
    token_inside = token < num_tokens - first_token
    weight_tile = weight_ptr + first_out * width + out[:, None] * width + column[None, :]
    x_tile = x_ptr + first_token * width + token[:, None] * width + column[None, :]
    blocks = tl.cdiv(width, step)
    x_scale_tile = x_scale_ptr + (first_token + token) * blocks
    if halves:  # each half of the rows has its own blocks
        row = (first_out + out).to(tl.int32)
        scale_tile = weight_scale_ptr + (tiles.row_block(row, half, step) * blocks)[:, None]
        scale_inside = out_inside[:, None]
    else:
        scale_tile = weight_scale_ptr + first_out // step * blocks
    total = tl.zeros((outs, tokens), tl.float32)
    for block in range(blocks):
        if unit == step:
            weight = tl.load(weight_tile, mask=out_inside[:, None], other=0.0)
            x = tl.load(x_tile, mask=token_inside[:, None], other=0.0)
        else:
            inside = (column < width - block * step)[None, :]
            weight = tl.load(weight_tile, mask=out_inside[:, None] & inside, other=0.0)
            x = tl.load(x_tile, mask=token_inside[:, None] & inside, other=0.0)
        x_scale = tl.load(x_scale_tile + block, mask=token_inside, other=0.0)
        if halves:
            weight_scale = tl.load(scale_tile + block, mask=scale_inside, other=0.0)
        else:
            weight_scale = tl.load(scale_tile + block)
        # Hopper's FP8 instructions add products in about 14 bits, which moves rounding decisions of the next quantiser;
        # e4m3 is exact in fp16, whose products are added in fp32.
        if woven:
            weight, x = _weave(weight, outs, step), _weave(x, tokens, step)
        product = tl.dot(weight.to(tl.float16), tl.trans(x.to(tl.float16)))
        total += product * (weight_scale * x_scale[None, :])
        weight_tile += step
        x_tile += step
    target = out_ptr + first_token * num_outs + first_out + token[:, None] * num_outs + out[None, :]
    result = tl.trans(total).to(out_ptr.dtype.element_ty)
    tl.store(target, result, mask=token_inside[:, None] & out_inside[None, :])


@triton.jit
def _weave(tile, rows: tl.constexpr, step: tl.constexpr):
    """``tile [rows, step]`` with its columns in another order, the same for both operands of a product.

    In it, the columns that one thread hands to the tensor cores lie side by side in memory: it reads 16 bytes at a time
    instead of two.
    """
    parts = tl.reshape(tile, (rows, 4, step // 16, 2, 2))
    return tl.reshape(tl.permute(parts, (0, 2, 3, 1, 4)), (rows, step))


def _options(x: torch.Tensor, weight: torch.Tensor, half: int, deterministic: bool) -> dict[str, int]:
    tile = tiles.token_tile(x.shape[0])
    # The order of the columns is that of the sums, and the largest tile is faster without weaving
    options = tiles.fp8_options(tile) | {"woven": tile < tiles.TOKEN_TILES[-1] and not deterministic}
    units = {"unit": tiles.width_unit(x.shape[1], options["step"]), "out_unit": tiles.width_unit(weight.shape[0], 16)}
    return units | {"halves": half % options["step"] != 0} | options


def _key(dtype: torch.dtype, options: dict[str, int]) -> Key:
    picked = (options[name] for name in ("tokens", "unit", "out_unit", "halves", "woven"))
    return ("fp8_linear", *map(int, picked), *names(dtype))


def key(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, half: int = 0, *, deterministic: bool) -> Key:
    """What the launch for these tensors, this result dtype and ``half`` (see :func:`run`) is specialised on."""
    if few_rows.serves(x, weight, deterministic=deterministic):
        return few_rows.key(x, dtype, half)
    return _key(dtype, _options(x, weight, half, deterministic))


def run(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    out: torch.Tensor,
    half: int = 0,
    *,
    deterministic: bool,
) -> None:
    """``out [T, N] = (x * x_scale) [T, K] @ (weight * weight_scale)[N, K].T``, rounded once; ``out`` contiguous.

    Args:
        x, x_scale: e4m3 ``[T, K]`` and fp32 ``[T, ceil(K / 128)]``.
        weight, weight_scale: e4m3 ``[N, K]`` and fp32 ``[row blocks, ceil(K / 128)]``.
        half: 0 if row n of the weight is in row block ``n // 128``; otherwise the number of rows of the first of two
            stacked matrices, whose blocks start anew in the second.
    """
    if few_rows.serves(x, weight, deterministic=deterministic):
        return few_rows.run_fp8(x, x_scale, weight, weight_scale, out, half)
    num_tokens, width = x.shape
    options = _options(x, weight, half, deterministic)
    grid = triton.cdiv(num_tokens, options["tokens"]) * triton.cdiv(weight.shape[0], options["outs"])
    launch(
        _key(out.dtype, options), _fp8_linear, (grid,), aligned(x), aligned(x_scale),
        aligned(weight), aligned(weight_scale), out, num_tokens, width // options["unit"],
        weight.shape[0] // options["out_unit"], half, group=tiles.GROUP, **options,
    )  # fmt: skip
