import pytest
import torch

from dsv4 import ops
from dsv4.ops.shapes import nano, tiny

from ..ops import contract
from .against_reference import compare


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 33])
@pytest.mark.parametrize("shape", [tiny, nano], ids=lambda s: s.name)
def test_matches_reference(shape, num_tokens, dtype):
    spec = ops.spec("rms_norm")
    # one bf16 rounding step is 2^-8; the fp32 sums differ in order only
    rtol = 2e-5 if dtype == torch.float32 else 2**-7
    compare(spec, *contract.example(spec, shape, num_tokens, dtype, seed=num_tokens), rtol=rtol, atol=1e-6)
