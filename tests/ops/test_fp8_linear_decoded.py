"""The product that no backend may change: what it computes. Where it never goes is in ``test_deep_gemm``."""

import pytest
import torch

from dsv4 import ops
from dsv4.ops.fp8_linear_decoded import matrix
from dsv4.ops.shapes import flash, nano, tiny

SPEC = ops.spec("fp8_linear_decoded")


def operands(rows: int, outs: int, width: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(rows + outs)
    x, x_scale = ops.quant_fp8(torch.randn(rows, width, generator=g))
    weight = torch.randn(outs, width, generator=g).to(torch.float8_e4m3fn)
    scale = torch.exp2(torch.randint(-6, 2, (-(-outs // 128), -(-width // 128)), generator=g).float())
    return [x, x_scale, weight, scale]


@pytest.mark.parametrize("rows, outs, width", [(0, 24, 40), (1, 24, 40), (5, 200, 300), (17, 130, 256)])
def test_against_float64(rows, outs, width):
    x, x_scale, weight, scale = operands(rows, outs, width)
    values = x.double() * x_scale.double().repeat_interleave(128, 1)[:, :width]
    blocks = scale.double().repeat_interleave(128, 0)[:outs].repeat_interleave(128, 1)[:, :width]
    want = values @ (weight.double() * blocks).T
    got = ops.fp8_linear_decoded(x, x_scale, weight, scale, dtype=torch.float32, deterministic=True)
    bound = values.abs() @ (weight.double() * blocks).abs().T * width * 2.0**-24  # of fp32 sums in any order
    assert got.shape == (rows, outs) and ((got - want).abs() <= bound).all()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_means_what_fp8_linear_means(dtype, deterministic):
    inputs = operands(9, 200, 300)
    results = [op(*inputs, dtype=dtype, deterministic=deterministic) for op in (ops.fp8_linear_decoded, ops.fp8_linear)]
    assert results[0].dtype == dtype and torch.equal(*results)


def test_a_single_scale_row_does_not_broadcast():
    x, x_scale, weight, scale = operands(3, 24, 40)
    with pytest.raises(ValueError, match="x_scale must have the 3 rows of x, got 1"):
        ops.fp8_linear_decoded(x, x_scale[:1], weight, scale, dtype=torch.float32, deterministic=False)


@pytest.mark.parametrize("shape", [tiny, nano, flash], ids=lambda shape: shape.name)
def test_the_example_has_the_index_querys_matrix(shape):
    (x, _, weight, _), _ = SPEC.example(shape, num_tokens=2, device=torch.device("cpu"), dtype=torch.float32, seed=1)
    assert tuple(weight.shape) == matrix(shape) == (shape.index_heads * shape.index_dim, shape.q_lora_rank)
    assert x.shape == (2, shape.q_lora_rank)
