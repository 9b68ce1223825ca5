"""SwiGLU between the two products of an expert, with the FP8 quantisation of its result.

One program takes up to 1,024 columns of one row: gate and up are read once and the result is written once.
"""

import torch
import triton
import triton.language as tl

from ._quant_kernel import quantize_fp8_rows
from ._triton import dtype_key, launch

_GROUP = 128


@triton.jit
def swiglu(gate, up, limit):
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)`` of fp32 tiles; NaN stays NaN."""
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["limit"])
def _swiglu(
    gate_up_ptr, out_ptr, scale_ptr, weight_ptr, limit,
    inner: tl.constexpr, groups: tl.constexpr, group: tl.constexpr, quantize: tl.constexpr, weighted: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # rows times inner passes 2^31 for long prefills
    block = tl.program_id(1) * groups + tl.arange(0, groups)
    column = block[:, None] * group + tl.arange(0, group)[None, :]
    inside = column < inner
    if weighted:
        weight = tl.load(weight_ptr + row + tl.zeros((groups, 1), tl.int32))
        read = inside & (weight != 0.0)
    else:
        weight = 1.0
        read = inside
    base = gate_up_ptr + row * (2 * inner)
    gate = tl.load(base + column, mask=read, other=0.0).to(tl.float32)
    up = tl.load(base + inner + column, mask=read, other=0.0).to(tl.float32)
    value = swiglu(gate, up, limit)
    if weighted:
        value = value * weight
    if quantize:
        codes, scale = quantize_fp8_rows(value.to(tl.bfloat16).to(tl.float32))
        tl.store(out_ptr + row * inner + column, codes, mask=inside)
        blocks = (inner + group - 1) // group
        tl.store(scale_ptr + row * blocks + block, scale, mask=block < blocks)
    else:
        tl.store(out_ptr + row * inner + column, value.to(out_ptr.dtype.element_ty), mask=inside)


def key(gate_up: torch.Tensor, out: torch.Tensor, row_weight: torch.Tensor) -> tuple[str | int, ...]:
    """What the launch for these tensors is specialised on."""
    return ("swiglu", out.shape[-1], int(row_weight.numel() > 0), *dtype_key(gate_up, out))


def run(gate_up: torch.Tensor, out: torch.Tensor, scale: torch.Tensor, limit: float, row_weight: torch.Tensor) -> None:
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)`` in fp32, times the row's weight, rounded to ``out``.

    Rows are independent of each other.

    Args:
        gate_up: ``[rows, 2 * inner]`` contiguous, fp32 or bf16: gate columns, then up columns, as the first product
            rounded them.
        out: ``[rows, inner]`` contiguous. fp32 or bf16: the rounded result. e4m3: the result rounded to bf16, then
            quantised in blocks of 1 x 128.
        scale: ``[rows, ceil(inner / 128)]`` fp32 for an e4m3 ``out``, otherwise empty.
        limit: SwiGLU clamp.
        row_weight: ``[rows]`` fp32, or empty for unweighted rows. A row of weight 0 is masked: its gate and up are not
            read (they may be uninitialised) and its result is zero.
    """
    rows, inner = out.shape
    groups = min(triton.next_power_of_2(triton.cdiv(inner, _GROUP)), 8)
    launch(
        key(gate_up, out, row_weight), _swiglu, (rows, triton.cdiv(inner, groups * _GROUP)),
        gate_up, out, scale, row_weight, limit,
        inner=inner, groups=groups, group=_GROUP, quantize=out.dtype == torch.float8_e4m3fn,
        weighted=row_weight.numel() > 0, num_warps=4 if groups > 2 else 1,
    )  # fmt: skip
