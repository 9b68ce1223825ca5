import numpy as np
import pytest
import torch
from safetensors import safe_open

from dsv4 import ops

from . import number_formats as nf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(0, 256), (1, 1), (7, 128), (65, 300), (3, 4, 130)])
def test_matches_numpy(shape, dtype):
    x = torch.from_numpy(nf.wide(np.random.default_rng(shape[0]), *shape)).to(dtype)
    codes, scale = ops.quant_fp8(x)
    want_codes, want_scale = nf.quantize(x.float().numpy(), 128, "fp8")
    assert codes.dtype == torch.float8_e4m3fn and codes.is_contiguous()
    assert scale.dtype == torch.float32 and scale.is_contiguous()
    np.testing.assert_array_equal(nf.as_numpy(codes), want_codes)
    np.testing.assert_array_equal(scale.numpy(), want_scale)


def test_error_is_at_most_half_a_step():
    x = nf.wide(np.random.default_rng(0), 129, 256)
    codes, scale = ops.quant_fp8(torch.from_numpy(x))
    spread = scale.numpy().repeat(128, -1)
    error = np.abs(nf.e4m3_table()[nf.as_numpy(codes)] * spread - x)
    assert (error <= np.maximum(np.abs(x) * 2.0**-4, spread * 2.0**-10)).all()  # 3 mantissa bits; subnormal step 2^-9
    assert error.max() > 0


def test_values_that_are_not_finite_stay_visible():
    x = torch.randn(3, 256)
    x[0, 5], x[1, 200] = float("nan"), float("-inf")
    codes, scale = ops.quant_fp8(x)
    back = codes.float() * scale.repeat_interleave(128, -1)
    assert back[0, 5].isnan() and back[1, 128:].isnan().all()
    assert back[0, 128:].isfinite().all() and back[1, :128].isfinite().all() and back[2].isfinite().all()


@pytest.mark.parametrize("layer", [0, 3, 6])
def test_recorded_activations(layer):
    with safe_open(nf.GOLDEN / "layers_official.safetensors", "pt") as recorded:
        x = recorded.get_tensor(f"p140.layer{layer}.attn_in")
    codes, scale = ops.quant_fp8(x)
    want_codes, want_scale = nf.quantize(x.float().numpy(), 128, "fp8")
    np.testing.assert_array_equal(nf.as_numpy(codes), want_codes)
    np.testing.assert_array_equal(scale.numpy(), want_scale)


@pytest.mark.parametrize("x", [torch.randn(4).half(), torch.tensor(1.0), torch.arange(4)])
def test_errors(x):
    with pytest.raises(ValueError, match=r"quant_fp8 x must be a float32 or bfloat16 \[..., size\], got"):
        ops.quant_fp8(x)
