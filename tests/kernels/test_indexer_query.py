import pytest
import torch

from dsv4 import ops
from dsv4.ops.shapes import nano, tiny

from ..ops import contract
from . import interpreter
from .against_reference import compare, outputs

interpreter.repair()
SPEC = ops.spec("indexer_query")
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 33])
@pytest.mark.parametrize(
    ("dtype", "quantize", "out"),
    [
        (torch.bfloat16, "fp4", torch.bfloat16),
        (torch.bfloat16, "fp4", FP8),
        (torch.bfloat16, "none", torch.bfloat16),
        (torch.bfloat16, "none", FP8),
        (torch.float32, "none", torch.float32),
        (torch.float32, "fp4", torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [tiny, nano], ids=lambda s: s.name)
def test_matches_reference(shape, dtype, quantize, out, num_tokens):
    """Bitwise here: every step is a copy, a product or a sum of two, in the reference's order (a GPU may fuse two)."""
    args, kwargs = contract.example(SPEC, shape, num_tokens, dtype, seed=num_tokens)
    compare(SPEC, args, kwargs | {"quantize": quantize, "dtype": out}, rtol=0, atol=0)


def test_rows_are_independent():
    args, kwargs = contract.example(SPEC, nano, 33, torch.bfloat16)
    together = outputs(SPEC, SPEC.cuda, args, kwargs)
    for t in (0, 17, 32):
        q, weights, table, positions = args
        alone = outputs(SPEC, SPEC.cuda, (q[t : t + 1], weights[t : t + 1], table, positions[t : t + 1]), kwargs)
        assert all(torch.equal(a, b[t : t + 1]) for a, b in zip(alone, together, strict=True))
