import numpy as np
import pytest
import torch

from dsv4 import ops


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 65])
def test_matches_numpy(num_tokens):
    rng = np.random.default_rng(num_tokens)
    x, weight = rng.normal(size=(num_tokens, 96)), rng.normal(size=96)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight
    got = ops.rms_norm(torch.tensor(x, dtype=torch.float32), torch.tensor(weight, dtype=torch.float32), eps=1e-6)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_bf16_rounds_once():
    x = torch.randn(5, 96).bfloat16()
    weight = torch.randn(96).bfloat16()
    exact = ops.rms_norm(x.float(), weight.float(), eps=1e-6)
    assert torch.equal(ops.rms_norm(x, weight, eps=1e-6), exact.bfloat16())


def test_wrong_weight():
    with pytest.raises(ValueError, match=r"rms_norm weight must have shape \[8\], got \[4\]"):
        ops.rms_norm(torch.randn(2, 8), torch.randn(4), eps=1e-6)
