"""The composition of ops; on CPU tensors they run their references, so the result is bitwise the reference."""

import pytest
import torch

from dsv4 import ops
from dsv4.ops.shapes import tiny

from ..ops import contract
from .against_reference import compare

SPEC = ops.spec("pcp_moe_shard")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", [0, 1], ids=["topk", "hash"])
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_matches_reference(num_tokens, seed, dtype):
    compare(SPEC, *contract.example(SPEC, tiny, num_tokens, dtype, seed=seed), rtol=0, atol=0)


def test_launches_nothing_of_its_own():
    assert SPEC.prewarm_cases(tiny, torch.device("cuda"), 8) == ()
