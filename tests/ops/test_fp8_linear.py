import json

import numpy as np
import pytest
import torch
from safetensors import safe_open

from dsv4 import ops

from . import number_formats as nf


def _operands(num_tokens: int, inner: int, outer: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    rng = np.random.default_rng(seed)
    x, x_scale = ops.quant_fp8(torch.from_numpy(nf.wide(rng, num_tokens, inner)))
    weight = torch.from_numpy(rng.normal(size=(outer, inner)).astype(np.float32) * 60).to(torch.float8_e4m3fn)
    weight_scale = 2.0 ** rng.integers(-12, 4, size=(-(-outer // 128), -(-inner // 128)))
    return x, x_scale, weight, torch.tensor(weight_scale, dtype=torch.float32)


def _dequantised(x, x_scale, weight, weight_scale) -> tuple[np.ndarray, np.ndarray]:
    table = nf.e4m3_table()
    values = table[nf.as_numpy(x)] * x_scale.numpy().repeat(128, -1)[:, : x.shape[1]]
    spread = np.kron(weight_scale.numpy(), np.ones((128, 128)))[: weight.shape[0], : weight.shape[1]]
    return values, table[nf.as_numpy(weight)] * spread


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "inner", "outer"), [(0, 128, 128), (1, 64, 32), (7, 200, 130), (65, 256, 128), (3, 257, 300)]
)
def test_matches_float64(num_tokens, inner, outer, deterministic):
    operands = _operands(num_tokens, inner, outer)
    got = ops.fp8_linear(*operands, dtype=torch.float32, deterministic=deterministic)
    assert got.dtype == torch.float32 and got.shape == (num_tokens, outer)
    values, weights = _dequantised(*operands)
    assert (np.abs(got.numpy() - values @ weights.T) <= nf.accumulation_bound(values, weights)).all()


def test_bf16_rounds_once():
    operands = _operands(9, 300, 140)
    exact = ops.fp8_linear(*operands, dtype=torch.float32, deterministic=True)
    assert torch.equal(ops.fp8_linear(*operands, dtype=torch.bfloat16, deterministic=True), exact.bfloat16())


@pytest.mark.parametrize("num_tokens", [1, 65, 129])
def test_a_row_alone_is_the_row_in_a_batch(num_tokens):
    x, x_scale, weight, weight_scale = _operands(num_tokens, 200, 70)
    for dtype in (torch.float32, torch.bfloat16):
        batch = ops.fp8_linear(x, x_scale, weight, weight_scale, dtype=dtype, deterministic=True)
        for i in range(num_tokens):
            row = slice(i, i + 1)
            alone = ops.fp8_linear(x[row], x_scale[row], weight, weight_scale, dtype=dtype, deterministic=True)
            assert torch.equal(alone[0], batch[i])


@pytest.mark.parametrize("name", ["wq_a", "wkv"])
def test_recorded_activations_through_nano_weights(name):
    """Recorded layer inputs through a trained FP8 weight: within one bf16 rounding of the float64 product."""
    with safe_open(nf.GOLDEN / "layers_official.safetensors", "pt") as recorded:
        x, x_scale = ops.quant_fp8(recorded.get_tensor("p140.layer3.attn_in"))
    index = json.loads((nf.NANO / "model.safetensors.index.json").read_text())["weight_map"]
    with safe_open(nf.NANO / index[f"layers.3.attn.{name}.weight"], "pt") as checkpoint:
        weight = checkpoint.get_tensor(f"layers.3.attn.{name}.weight")
        scale_bytes = checkpoint.get_tensor(f"layers.3.attn.{name}.scale").view(torch.uint8)
    operands = x, x_scale, weight, torch.exp2(scale_bytes.float() - 127)
    got = ops.fp8_linear(*operands, dtype=torch.bfloat16, deterministic=False).float().numpy()
    values, weights = _dequantised(*operands)
    want = values @ weights.T
    error = np.abs(got - want)
    assert (error <= 2.0**-8 * np.abs(want) + 1.01 * nf.accumulation_bound(values, weights)).all()
    assert np.abs(want).mean() > 0.01


def _replace(position: int, value: torch.Tensor) -> list[torch.Tensor]:
    operands = list(_operands(3, 200, 130))
    operands[position] = value
    return operands


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, torch.randn(3, 200), r"x must be 2-D torch.float8_e4m3fn, got 2-D torch.float32"),
        (0, torch.randn(3, 199).to(torch.float8_e4m3fn), r"x must be \[num_tokens, 200\], got \[3, 199\]"),
        (1, torch.rand(3, 1), r"x_scale must be \[num_tokens, 2\], got \[3, 1\]"),
        (1, torch.rand(1, 2), r"x_scale must have the 3 rows of x, got 1"),
        (1, torch.ones(3, 2, dtype=torch.uint8), r"x_scale must be 2-D torch.float32, got 2-D torch.uint8"),
        (2, torch.randn(200).to(torch.float8_e4m3fn), r"weight must be 2-D torch.float8_e4m3fn, got 1-D"),
        (3, torch.rand(1, 2), r"weight_scale must be \[2, 2\], got \[1, 2\]"),
    ],
)
def test_errors(position, value, message):
    with pytest.raises(ValueError, match="fp8_linear " + message):
        ops.fp8_linear(*_replace(position, value), dtype=torch.float32, deterministic=False)


def test_wrong_result_dtype():
    with pytest.raises(ValueError, match="fp8_linear dtype must be float32 or bfloat16, got torch.float16"):
        ops.fp8_linear(*_operands(3, 64, 8), dtype=torch.float16, deterministic=False)
