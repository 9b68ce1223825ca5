import numpy as np
import pytest
import torch

from dsv4 import ops
from dsv4.ops.shapes import nano, tiny

from ..ops import contract, number_formats as nf
from . import interpreter
from .against_reference import compare

interpreter.repair()
SPEC = ops.spec("quant_fp4")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 33])
@pytest.mark.parametrize("shape", [tiny, nano], ids=lambda s: s.name)
def test_matches_reference(shape, num_tokens, dtype):
    compare(SPEC, *contract.example(SPEC, shape, num_tokens, dtype, seed=num_tokens), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [(1, 32), (65, 128), (3, 5, 96), (0, 64)])
def test_magnitudes(size, dtype):
    x = torch.from_numpy(nf.wide(np.random.default_rng(3), *size)).to(dtype)
    compare(SPEC, (x,), {}, rtol=0, atol=0)


def test_ties_zeros_and_limits():
    middle = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    step = torch.cat((middle, torch.nextafter(middle, middle + 1), torch.nextafter(middle, middle - 1)))
    step = torch.cat((step, -step, torch.tensor([0.0, -0.0])))
    rows = step.repeat_interleave(32).view(-1, 32).clone()
    rows[:, 31] = 6.0  # fixes the scale
    extremes = torch.stack([torch.full((32,), v) for v in (0.0, -0.0, 1e-40, 6 * 2.0**-126, 3.4e38, -3.4e38)])
    compare(SPEC, (torch.cat((rows, rows * 2.0**40, rows * 2.0**-40, extremes)),), {}, rtol=0, atol=0)
