"""The kernel between the two products of an expert, against the reference of the expert's activation."""

import pytest
import torch
from torch.nn.functional import silu

from dsv4.ops import _swiglu_kernel
from dsv4.ops._formats import dequantize_fp8, quantize_fp8

from . import interpreter

interpreter.repair()
EMPTY = torch.empty(0)
FP8 = torch.float8_e4m3fn


def plain(gate_up, limit, weight):
    """fp32 result, zero for rows of weight 0."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    value = silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    return value if weight is None else (value * weight[:, None]).masked_fill(weight[:, None] == 0, 0.0)


def make(rows, inner, dtype, weighted):
    g = torch.Generator().manual_seed(rows + inner)
    gate_up = (torch.randn(rows, 2 * inner, generator=g) * 4).to(dtype)
    weight = torch.rand(rows, generator=g) if weighted else None
    if weighted and rows > 1:
        weight[1], gate_up[1] = 0.0, float("nan")
    return gate_up, weight


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows, inner", [(0, 32), (1, 32), (7, 128), (33, 200), (3, 1300)])
def test_dense(rows, inner, dtype, weighted):
    gate_up, weight = make(rows, inner, dtype, weighted)
    out = torch.full((rows, inner), float("nan"), dtype=dtype)
    _swiglu_kernel.run(gate_up, out, EMPTY, 3.0, EMPTY if weight is None else weight)
    # fp32: exp and the division are good to a few units of 2^-23; bf16: such an error may move one rounding (2^-8)
    rtol = 2e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(out.float(), plain(gate_up, 3.0, weight), rtol=rtol, atol=1e-7)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rows, inner", [(0, 32), (1, 32), (7, 128), (33, 200), (3, 1300)])
def test_quantised(rows, inner, weighted):
    gate_up, weight = make(rows, inner, torch.bfloat16, weighted)
    out = torch.full((rows, inner), float("nan")).to(FP8)
    scale = torch.full((rows, -(-inner // 128)), float("nan"))
    _swiglu_kernel.run(gate_up, out, scale, 3.0, EMPTY if weight is None else weight)
    rounded = torch.full((rows, inner), float("nan"), dtype=torch.bfloat16)
    _swiglu_kernel.run(gate_up, rounded, EMPTY, 3.0, EMPTY if weight is None else weight)
    want, want_scale = quantize_fp8(rounded)  # the quantiser is bitwise the reference's, on what the same kernel rounds
    assert torch.equal(scale, want_scale) and torch.equal(out.view(torch.uint8), want.view(torch.uint8))
    if weighted and rows > 1:
        assert not dequantize_fp8(out, scale)[1].any()
