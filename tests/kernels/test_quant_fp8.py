import numpy as np
import pytest
import torch

from dsv4 import ops
from dsv4.ops import _formats
from dsv4.ops.shapes import nano, tiny

from ..ops import contract, number_formats as nf
from . import interpreter
from .against_reference import compare

interpreter.repair()
SPEC = ops.spec("quant_fp8")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 33])
@pytest.mark.parametrize("shape", [tiny, nano], ids=lambda s: s.name)
def test_matches_reference(shape, num_tokens, dtype):
    compare(SPEC, *contract.example(SPEC, shape, num_tokens, dtype, seed=num_tokens), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [(1, 1), (65, 300), (3, 4, 130), (2, 1), (5, 2048), (0, 5)])
def test_magnitudes_and_partial_blocks(size, dtype):
    x = torch.from_numpy(nf.wide(np.random.default_rng(7), *size)).to(dtype)
    compare(SPEC, (x,), {}, rtol=0, atol=0)


def test_ties_zeros_and_limits():
    """Every midpoint between neighbouring codes and its neighbours in fp32, at three scales; signed zeros; extremes."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (codes[1:] + codes[:-1]) / 2
    step = torch.cat((middle, torch.nextafter(middle, middle + 1), torch.nextafter(middle, middle - 1)))
    step = torch.cat((step, -step, torch.tensor([0.0, -0.0, 1e-30, -1e-30])))
    rows = step.repeat_interleave(128).view(-1, 128).clone()
    rows[:, 0] = 448.0  # fixes the scale
    x = torch.cat((rows, rows * 2.0**30, rows * 2.0**-12))
    floors = torch.stack([torch.full((128,), v) for v in (0.0, -0.0, 1e-4, 9.9e-5, 1e-38, 3.4e38, -3.4e38)])
    compare(SPEC, (torch.cat((x, floors)),), {}, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_values_that_are_not_finite_stay_visible():
    x = torch.randn(3, 256)
    x[0, 5], x[1, 200] = float("nan"), float("-inf")
    codes, scale = SPEC.cuda(x)
    want_codes, want_scale = SPEC.reference(x)
    torch.testing.assert_close(codes.float(), want_codes.float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(scale, want_scale)
    back = _formats.dequantize_fp8(codes, scale)
    assert back[0, 5].isnan() and back[1, 128:].isnan().all() and back[2].isfinite().all()


def test_non_contiguous():
    x = torch.randn(256, 9).t()
    compare(SPEC, (x,), {}, rtol=0, atol=0)
