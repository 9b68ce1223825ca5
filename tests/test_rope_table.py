"""RoPE tables against the published formula in float64, and the blend of YaRN."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsv4.config import ModelConfig, flash_config
from dsv4.rope import frequencies, rope_table, yarn_range

NANO = Path(__file__).resolve().parent.parent / "assets" / "nano"


def published_frequency(index: int, ratio: int) -> float:
    """Frequency ``index`` of 32, from the formula with constants written out."""
    if ratio == 0:
        return 10000.0 ** (-2 * index / 64)
    frequency = 160000.0 ** (-2 * index / 64)
    ramp = min(max((index - 15) / (25 - 15), 0.0), 1.0)
    return frequency * (1 - ramp) + frequency / 16 * ramp


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_frequencies(ratio):
    got = frequencies(flash_config(), ratio)
    expected = torch.tensor([published_frequency(i, ratio) for i in range(32)], dtype=torch.float64)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=0)  # a few fp32 roundings: 2^-24 each


def test_yarn_range():
    assert yarn_range(flash_config()) == (15, 25)
    corrections = [64 * math.log(65536 / (n * 2 * math.pi)) / (2 * math.log(160000)) for n in (32, 1)]
    assert [round(c, 2) for c in corrections] == [15.45, 24.71]


def test_yarn_keeps_fast_and_divides_slow_frequencies():
    config = flash_config()
    plain = config.compress_rope_theta ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    blend = (frequencies(config, 4).double() / plain).tolist()
    assert blend[:16] == pytest.approx([1.0] * 16, rel=1e-6)
    assert blend[25:] == pytest.approx([1 / 16] * 7, rel=1e-6)
    assert all(a > b for a, b in zip(blend[15:25], blend[16:26]))


@pytest.mark.parametrize("ratio", [0, 4])
def test_table_is_cos_then_sin_of_fp32_angles(ratio):
    config = ModelConfig.from_json(NANO)
    table = rope_table(config, ratio, 100_000)
    assert table.shape == (100_000, 64) and table.dtype == torch.float32
    rows = torch.tensor([0, 1, 7, 128, 16_777, 99_999])
    angles = (rows.float()[:, None] * frequencies(config, ratio)).double()  # the product rounds to fp32
    expected = torch.cat((angles.cos(), angles.sin()), dim=-1)
    torch.testing.assert_close(table[rows].double(), expected, rtol=0, atol=2.0**-23)


def test_equals_complex_table():
    """``torch.polar`` of the same angles, the form the official code stores."""
    config = flash_config()
    angles = torch.outer(torch.arange(4096), frequencies(config, 4))
    polar = torch.polar(torch.ones_like(angles), angles)
    got = rope_table(config, 4, 4096)
    torch.testing.assert_close(got[:, :32], polar.real, rtol=0, atol=2.0**-23)
    torch.testing.assert_close(got[:, 32:], polar.imag, rtol=0, atol=2.0**-23)


def test_window_and_compressed_layers_differ():
    config = flash_config()
    plain, four, hundred = (rope_table(config, ratio, 64) for ratio in (0, 4, 128))
    assert torch.equal(four, hundred)
    assert (plain - four).abs().max() > 0.5
    assert torch.equal(plain[0], four[0])  # position 0: no rotation


@pytest.mark.parametrize("beta_slow, kept", [(11_000, 1), (1e-9, 32)], ids=["all slow", "all fast"])
def test_bounds_that_meet(beta_slow, kept):
    """Rotation bounds outside the frequencies make a step, not a division by zero."""
    config = flash_config()
    scaling = replace(config.rope_scaling, beta_slow=beta_slow, beta_fast=2 * beta_slow)
    blend = frequencies(config.resized(rope_scaling=scaling), 4).double()
    blend /= config.compress_rope_theta ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    assert blend.tolist() == pytest.approx([1.0] * kept + [1 / 16] * (32 - kept), rel=1e-6)


def test_bad_arguments():
    config = flash_config()
    with pytest.raises(ValueError, match=r"ratio must be one of \[0, 4, 128\], got 2"):
        rope_table(config, 2, 16)
    for count in (0, -1, 1_048_577):
        with pytest.raises(ValueError, match=rf"max_positions must be in 1\.\.\.1048576, got {count}"):
            rope_table(config, 4, count)
