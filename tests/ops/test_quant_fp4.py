import json

import numpy as np
import pytest
import torch
from safetensors import safe_open

from dsv4 import ops
from dsv4.ops import _formats

from . import number_formats as nf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(0, 64), (1, 32), (7, 96), (65, 128), (3, 5, 64)])
def test_matches_numpy(shape, dtype):
    x = torch.from_numpy(nf.wide(np.random.default_rng(shape[0]), *shape)).to(dtype)
    packed, scale = ops.quant_fp4(x)
    codes, factors = nf.quantize(x.float().numpy(), 32, "fp4")
    assert packed.dtype == scale.dtype == torch.uint8 and packed.is_contiguous() and scale.is_contiguous()
    np.testing.assert_array_equal(packed.numpy(), codes[..., 0::2] + 16 * codes[..., 1::2])
    np.testing.assert_array_equal(scale.numpy(), np.log2(factors).astype(int) + 127)


def test_smallest_and_largest_scale_bytes():
    x = torch.rand(2, 32)
    x[0] *= 2.0**-130
    x[1, 3] = -torch.finfo(torch.float32).max
    packed, scale = ops.quant_fp4(x)
    assert scale.flatten().tolist() == [1, 253]  # 2^-126; 2^126 >= max / 6
    assert packed[1, 1] >> 4 == 8 + 6  # element 3: max / 2^126 = 4 - 2^-22 rounds to 4, code 6


def test_error_is_at_most_half_a_step():
    x = nf.wide(np.random.default_rng(0), 129, 64)
    packed, scale = ops.quant_fp4(torch.from_numpy(x))
    back = _formats.dequantize_fp4(packed, scale).numpy()
    spread = 2.0 ** (scale.numpy().astype(float) - 127).repeat(32, -1)
    step = np.where(np.abs(x) <= 2 * spread, 0.5, np.where(np.abs(x) <= 4 * spread, 1, 2)) * spread
    assert (np.abs(back - x) <= step / 2).all()


@pytest.mark.parametrize("name", ["layers.0.ffn.experts.3.w1", "layers.6.ffn.experts.15.w2"])
def test_trained_weights_requantise_to_themselves(name):
    index = json.loads((nf.NANO / "model.safetensors.index.json").read_text())["weight_map"]
    with safe_open(nf.NANO / index[f"{name}.weight"], "pt") as checkpoint:
        packed = checkpoint.get_tensor(f"{name}.weight").view(torch.uint8)
        scale = checkpoint.get_tensor(f"{name}.scale").view(torch.uint8)
    codes = np.stack((packed.numpy() & 15, packed.numpy() >> 4), -1).reshape(len(packed), -1)
    want = nf.e2m1_table()[codes] * 2.0 ** (scale.numpy().astype(float) - 127).repeat(32, -1)
    value = _formats.dequantize_fp4(packed, scale)
    np.testing.assert_array_equal(value.numpy(), want)
    assert torch.equal(_formats.dequantize_fp4(*ops.quant_fp4(value)), value)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.randn(2, 48), "size must be a multiple of 32, got 48"),
        (torch.randn(2, 64).half(), r"x must be a float32 or bfloat16 \[..., size\], got 2-D torch.float16"),
        (torch.tensor(1.0), r"x must be a float32 or bfloat16 \[..., size\], got 0-D torch.float32"),
    ],
)
def test_errors(x, message):
    with pytest.raises(ValueError, match="quant_fp4 " + message):
        ops.quant_fp4(x)
