import numpy as np
import pytest
import torch

from dsv4 import ops

from . import number_formats as nf


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_tokens", "inner", "outer"), [(0, 64, 8), (1, 33, 1), (7, 257, 130), (65, 64, 24)])
def test_matches_float64(num_tokens, inner, outer, dtype, deterministic):
    x, weight = torch.randn(num_tokens, inner).to(dtype), torch.randn(outer, inner).to(dtype)
    got = ops.linear(x, weight, dtype=torch.float32, deterministic=deterministic)
    assert got.dtype == torch.float32 and got.shape == (num_tokens, outer)
    x, weight = nf.as_numpy(x), nf.as_numpy(weight)
    error = np.abs(got.numpy() - x.astype(np.float64) @ weight.astype(np.float64).T)
    assert (error <= nf.accumulation_bound(x, weight)).all()


def test_bf16_operands_are_widened_and_the_result_rounds_once():
    x, weight = torch.randn(9, 300).bfloat16(), torch.randn(40, 300).bfloat16()
    exact = ops.linear(x.float(), weight.float(), dtype=torch.float32, deterministic=True)
    assert torch.equal(ops.linear(x, weight, dtype=torch.float32, deterministic=True), exact)
    assert torch.equal(ops.linear(x, weight.float(), dtype=torch.float32, deterministic=True), exact)
    assert torch.equal(ops.linear(x, weight, dtype=torch.bfloat16, deterministic=True), exact.bfloat16())


@pytest.mark.parametrize("num_tokens", [1, 65, 129])
@pytest.mark.parametrize(("inner", "outer"), [(256, 16), (133, 65)])
def test_a_row_alone_is_the_row_in_a_batch(num_tokens, inner, outer):
    x, weight = torch.randn(num_tokens, inner), torch.randn(outer, inner)
    batch = ops.linear(x, weight, dtype=torch.float32, deterministic=True)
    for i in range(num_tokens):
        alone = ops.linear(x[i : i + 1].clone(), weight, dtype=torch.float32, deterministic=True)
        assert torch.equal(alone[0], batch[i])
    order = torch.randperm(num_tokens)
    assert torch.equal(ops.linear(x[order], weight, dtype=torch.float32, deterministic=True), batch[order])


@pytest.mark.parametrize(
    ("x", "weight", "dtype", "message"),
    [
        (torch.randn(2, 8), torch.randn(8), torch.float32, r"weight must be \[out, in\], got \[8\]"),
        (torch.randn(2, 8), torch.randn(3, 9), torch.float32, r"x must be \[num_tokens, 9\], got \[2, 8\]"),
        (torch.randn(2, 2, 8), torch.randn(3, 8), torch.float32, r"x must be \[num_tokens, 8\], got \[2, 2, 8\]"),
        (torch.randn(2, 8).half(), torch.randn(3, 8), torch.float32, r"x must be float32 or bfloat16, got"),
        (torch.randn(2, 8), torch.randn(3, 8).half(), torch.float32, r"weight must be float32 or bfloat16, got"),
        (torch.randn(2, 8), torch.randn(3, 8), torch.int32, r"result must be float32 or bfloat16, got torch.int32"),
    ],
)  # fmt: skip
def test_errors(x, weight, dtype, message):
    with pytest.raises(ValueError, match="linear " + message):
        ops.linear(x, weight, dtype=dtype, deterministic=False)
