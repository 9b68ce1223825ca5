import pytest
import torch

from dsv4 import ops
from dsv4.ops import _triton
from dsv4.ops.shapes import Shape, nano, tiny

from ..ops import contract
from ..ops.test_lse_merge import random_parts
from . import interpreter
from .against_reference import compare

interpreter.repair()
SPEC = ops.spec("lse_merge")


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """fp32: a few sums and one exponential; bf16: one rounding, which may fall either way next to a boundary."""
    return {"rtol": 2e-6 if dtype == torch.float32 else 2**-8, "atol": 2e-6}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 33])
@pytest.mark.parametrize("shape", [tiny, nano], ids=lambda s: s.name)
def test_matches_reference(shape: Shape, num_tokens: int, dtype: torch.dtype):
    compare(SPEC, *contract.example(SPEC, shape, num_tokens, dtype, seed=num_tokens), **tolerance(dtype))


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_odd_sizes_empty_rows_and_poison(parts: int):
    outs, lses, sink = random_parts(parts, 11, seed=parts)
    lses[:, 3] = -torch.inf
    outs[lses == -torch.inf] = torch.nan
    compare(SPEC, (outs, lses, sink), {}, **tolerance(torch.float32))
    assert (SPEC.cuda(outs, lses, sink)[0][3] == 0).all()


def test_extreme_values():
    outs = torch.randn(2, 1, 2, 3)
    lses = torch.tensor([[[300.0, -300.0]], [[-300.0, -300.0]]])
    compare(SPEC, (outs, lses, torch.tensor([-torch.inf, 400.0])), {}, **tolerance(torch.float32))


def test_rows_are_bitwise_the_same_alone():
    outs, lses, sink = random_parts(4, 9, seed=3)
    out, lse = SPEC.cuda(outs, lses, sink)
    for t in range(9):
        alone, alone_lse = SPEC.cuda(outs[:, t : t + 1], lses[:, t : t + 1], sink)
        assert torch.equal(alone[0], out[t]) and torch.equal(alone_lse[0], lse[t])


def test_prewarm_case_selects_its_key():
    (case,) = SPEC.prewarm_cases(nano, torch.device("cuda"), 8)
    with _triton.recording() as launches:
        SPEC.cuda(*contract.example(SPEC, nano, 3, torch.bfloat16)[0])
    assert [launch.key for launch in launches] == [case.key]
