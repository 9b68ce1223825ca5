"""Dense product ``x @ weight.T``; tiles, their order and arithmetic as in ``_matmul_tiles`` or ``_few_rows_kernel``."""

import torch
import triton
import triton.language as tl

from . import _few_rows_kernel as few_rows, _matmul_tiles as tiles
from ._aligned import aligned
from ._runtime import Key
from ._triton import dtype_key, launch, names


@triton.jit(do_not_specialize=["num_tokens", "units", "out_units"])
def _linear(
    x_ptr, weight_ptr, out_ptr, num_tokens, units, out_units, unit: tl.constexpr, out_unit: tl.constexpr,
    outs: tl.constexpr, tokens: tl.constexpr, step: tl.constexpr, group: tl.constexpr,
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
    total = tl.zeros((outs, tokens), tl.float32)
    for start in range(0, width, step):
        if unit == step:
            weight = tl.load(weight_tile, mask=out_inside[:, None], other=0.0)
            x = tl.load(x_tile, mask=token_inside[:, None], other=0.0)
        else:
            inside = (column < width - start)[None, :]
            weight = tl.load(weight_tile, mask=out_inside[:, None] & inside, other=0.0)
            x = tl.load(x_tile, mask=token_inside[:, None] & inside, other=0.0)
        total = tiles.multiply(weight, x, total)
        weight_tile += step
        x_tile += step
    target = out_ptr + first_token * num_outs + first_out + token[:, None] * num_outs + out[None, :]
    result = tl.trans(total).to(out_ptr.dtype.element_ty)
    tl.store(target, result, mask=token_inside[:, None] & out_inside[None, :])


def _options(x: torch.Tensor, weight: torch.Tensor) -> dict[str, int]:
    options = tiles.dense_options(tiles.dense_tile(x.shape[0], x), x, weight)
    units = {"unit": tiles.width_unit(x.shape[1], options["step"]), "out_unit": tiles.width_unit(weight.shape[0], 16)}
    return units | options


def _key(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, options: dict[str, int]) -> Key:
    picked = (options["tokens"], options["unit"], options["out_unit"])
    return ("linear", *picked, *dtype_key(x, weight), *names(dtype))


def key(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, *, deterministic: bool) -> Key:
    """What the launch for these tensors and this result dtype is specialised on."""
    if few_rows.serves(x, weight, deterministic=deterministic):
        return few_rows.key(x, dtype)
    return _key(x, weight, dtype, _options(x, weight))


def run(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, deterministic: bool) -> None:
    """``out [T, N] = x [T, K] @ weight[N, K].T`` with fp32 accumulation, rounded once; ``out`` contiguous."""
    if few_rows.serves(x, weight, deterministic=deterministic):
        return few_rows.run(x, weight, out)
    num_tokens, width = x.shape
    options = _options(x, weight)
    grid = triton.cdiv(num_tokens, options["tokens"]) * triton.cdiv(weight.shape[0], options["outs"])
    launch(
        _key(x, weight, out.dtype, options), _linear, (grid,), aligned(x), aligned(weight), out, num_tokens,
        width // options["unit"], weight.shape[0] // options["out_unit"], group=tiles.GROUP, **options,
    )  # fmt: skip
