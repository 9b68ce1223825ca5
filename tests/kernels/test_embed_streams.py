import pytest
import torch

from dsv4 import ops
from dsv4.ops.shapes import nano, tiny

from ..ops import contract
from . import interpreter
from .against_reference import compare

interpreter.repair()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 33])
@pytest.mark.parametrize("shape", [tiny, nano], ids=lambda s: s.name)
def test_matches_reference(shape, num_tokens, dtype):
    spec = ops.spec("embed_streams")
    compare(spec, *contract.example(spec, shape, num_tokens, dtype, seed=num_tokens), rtol=0, atol=0)


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_odd_widths_and_ids_outside_the_table(id_dtype, dtype):
    """Several tiles with a ragged end, rounding from fp32, and ids that must read nothing."""
    weight = torch.full((11, 1100), float("nan"))  # a row that is read shows
    weight[[0, 4, 10]] = torch.randn(3, 1100)
    ids = torch.tensor([-1, 4, 11, 2**31 - 1, 0, -(2**31), 10], dtype=id_dtype)
    compare(ops.spec("embed_streams"), (ids, weight), {"num_streams": 3, "dtype": dtype}, rtol=0, atol=0)
