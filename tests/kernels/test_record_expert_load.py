import pytest
import torch

from dsv4 import ops
from dsv4.ops.shapes import nano, tiny

from ..ops import contract
from . import interpreter
from .against_reference import compare

interpreter.repair()
SPEC = ops.spec("record_expert_load")


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 33, 900])
@pytest.mark.parametrize("shape", [tiny, nano], ids=lambda s: s.name)
def test_matches_reference(shape, num_tokens):
    compare(SPEC, *contract.example(SPEC, shape, num_tokens, torch.bfloat16, seed=num_tokens), rtol=0, atol=0)


@pytest.mark.parametrize("num_experts", [1, 5, 384])
@pytest.mark.parametrize("enabled", [0, 1, -3])
def test_switch_and_ids_of_no_expert(enabled, num_experts):
    g = torch.Generator().manual_seed(num_experts)
    ids = torch.randint(-3, num_experts + 3, (50, 6), generator=g, dtype=torch.int32)
    ids[3, 2], ids[4, 4] = 2**31 - 1, -(2**31)
    counts = torch.randint(0, 2**40, (num_experts,), generator=g)
    compare(SPEC, (ids, torch.tensor([enabled], dtype=torch.int32), counts), {}, rtol=0, atol=0)
