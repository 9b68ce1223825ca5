"""Products ``x @ weight.T`` of one row, which read the weight once and multiply without tensor cores.

A decode step of one token is a row of small matrices, each read once from memory. What counts there is that every load
of a program is under way at once, 16 bytes a thread, and that few instructions follow. A program owns a few weight
rows; its threads lie side by side along K, so that each decodes its part of x once for all rows. The values of one load
are summed in a thread's registers in fp32, and FP8 sums scaled once; the threads' sums are added up at the end.
That order of the sums is another than that of ``_matmul_tiles``; deterministic products therefore stay there.
"""

import torch
import triton
import triton.language as tl

from . import _matmul_tiles as tiles
from ._aligned import aligned
from ._runtime import Key
from ._triton import launch, names

BLOCK = 128  # codes with one scale


@triton.jit(do_not_specialize=["units", "num_outs"])
def _one_row(
    x_ptr, weight_ptr, out_ptr, units, num_outs, unit: tl.constexpr, outs: tl.constexpr, span: tl.constexpr
):  # fmt: skip
    width = units * unit  # products, so that the compiler knows the alignment of the rows
    chunks: tl.constexpr = span // 8
    first_out = tl.program_id(0).to(tl.int64) * outs
    out = tl.arange(0, outs)
    column = tl.arange(0, span)
    out_inside = out < num_outs - first_out
    weight_tile = weight_ptr + first_out * width + out[:, None] * width + column[None, :]
    total = tl.zeros((outs, chunks), tl.float32)
    for start in range(0, width, span):
        if unit == span:
            weight = tl.load(weight_tile + start, mask=out_inside[:, None], other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptr + start + column)
        else:
            inside = column < width - start
            mask = out_inside[:, None] & inside[None, :]
            weight = tl.load(weight_tile + start, mask=mask, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptr + start + column, mask=inside, other=0.0)
        product = weight.to(tl.float32) * x.to(tl.float32)[None, :]
        total += tl.sum(tl.reshape(product, (outs, chunks, 8)), axis=2)
    tl.store(out_ptr + first_out + out, tl.sum(total, axis=1).to(out_ptr.dtype.element_ty), mask=out_inside)


@triton.jit(do_not_specialize=["units", "num_outs", "half"])
def _one_row_fp8(
    x_ptr, x_scale_ptr, weight_ptr, weight_scale_ptr, out_ptr, units, num_outs, half, unit: tl.constexpr,
    halves: tl.constexpr, outs: tl.constexpr, span: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    width = units * unit
    chunks: tl.constexpr = span // 16
    first_out = tl.program_id(0).to(tl.int64) * outs
    out = tl.arange(0, outs)
    column = tl.arange(0, span)
    chunk = tl.arange(0, chunks)
    out_inside = out < num_outs - first_out
    weight_tile = weight_ptr + first_out * width + out[:, None] * width + column[None, :]
    blocks = tl.cdiv(width, block)
    x_scale_tile = x_scale_ptr + chunk // (block // 16)
    if halves:  # each half of the rows has its own blocks, and a tile may have rows of several
        row = (first_out + out).to(tl.int32)
        scale_tile = weight_scale_ptr + (tiles.row_block(row, half, block) * blocks)[:, None]
        scale_tile += chunk[None, :] // (block // 16)
    else:
        scale_tile = weight_scale_ptr + first_out // block * blocks + chunk // (block // 16)
    x_tile = x_ptr + column
    total = tl.zeros((outs, chunks), tl.float32)
    for start in range(0, width, span):
        # Nothing but loads first, and pointers that are ready: otherwise the assembler puts some off until their values
        # are needed, and the loop waits for memory twice
        if unit == span:
            x_scale = tl.load(x_scale_tile)
            x = tl.load(x_tile)
            weight = tl.load(weight_tile, mask=out_inside[:, None], other=0.0, eviction_policy="evict_first")
        else:
            inside = column < width - start
            mask = out_inside[:, None] & inside[None, :]
            x_scale = tl.load(x_scale_tile, mask=chunk * 16 < width - start, other=0.0)
            x = tl.load(x_tile, mask=inside, other=0.0)
            weight = tl.load(weight_tile, mask=mask, other=0.0, eviction_policy="evict_first")
        if halves:
            mask = out_inside[:, None] & (chunk * 16 < width - start)[None, :]
            scale = tl.load(scale_tile, mask=mask, other=0.0) * x_scale[None, :]
        elif unit == span:
            scale = (tl.load(scale_tile) * x_scale)[None, :]
        else:
            mask = chunk * 16 < width - start
            scale = (tl.load(scale_tile, mask=mask, other=0.0) * x_scale)[None, :]
        product = weight.to(tl.float32) * x.to(tl.float32)[None, :]
        total += tl.sum(tl.reshape(product, (outs, chunks, 16)), axis=2) * scale
        x_tile += span
        weight_tile += span
        x_scale_tile += span // block
        scale_tile += span // block
    tl.store(out_ptr + first_out + out, tl.sum(total, axis=1).to(out_ptr.dtype.element_ty), mask=out_inside)


def _options(x: torch.Tensor, half: int) -> dict[str, int]:
    """The fastest of a sweep on an H200; a warp reads 512 bytes of each weight row at once."""
    wide = x.shape[1] > 1024
    if x.dtype == torch.bfloat16:
        span, outs, warps = (2048, 1, 8) if wide else (1024, 1, 4)
    else:
        span, outs, warps = (2048, 2, 4) if wide else (512, 4, 1)
    options = {"unit": tiles.width_unit(x.shape[1], span), "outs": outs, "span": span, "num_warps": warps}
    return options if x.dtype == torch.bfloat16 else options | {"halves": half % BLOCK != 0, "block": BLOCK}


def _key(dtype: torch.dtype, options: dict[str, int]) -> Key:
    name = "one_row_fp8" if "halves" in options else "one_row"
    picked = (options["span"], options["unit"], int(options.get("halves", 0)))
    return (name, *picked, *names(dtype))


def key(x: torch.Tensor, dtype: torch.dtype, half: int = 0) -> Key:
    """What the launch for ``x``, this result dtype and ``half`` (see ``fp8_linear_kernel.run``) is specialised on."""
    return _key(dtype, _options(x, half))


def run(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """``out [1, N] = x [1, K] @ weight[N, K].T``, bf16 operands, fp32 accumulation, rounded once."""
    options = _options(x, 0)
    grid = triton.cdiv(weight.shape[0], options["outs"])
    launch(
        _key(out.dtype, options), _one_row, (grid,), aligned(x), aligned(weight), out,
        x.shape[1] // options["unit"], weight.shape[0], **options,
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
    options = _options(x, half)
    grid = triton.cdiv(weight.shape[0], options["outs"])
    tensors = [aligned(t) for t in (x, x_scale, weight, weight_scale)]
    launch(
        _key(out.dtype, options), _one_row_fp8, (grid,), *tensors, out, x.shape[1] // options["unit"],
        weight.shape[0], half, **options,
    )  # fmt: skip
