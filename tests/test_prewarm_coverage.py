"""Prewarm covers the dispatcher: no call of an op can pick a specialisation that its cases do not reach.

Launches are recorded, not run, on CPU tensors: what is compiled depends on constants and dtypes, which are the same.
"""

from dataclasses import replace

import pytest
import torch

from dsv4 import ops
from dsv4.ops.shapes import flash, nano

from .kernels.prewarm import launched
from .ops import contract

CPU = torch.device("cpu")
MAX_TOKENS = 512
SMALL_FLASH = replace(flash, name="flash-8-experts", num_experts=8, vocab=1024)
SPECS = [spec for spec in ops.specs().values() if spec.cuda is not None and spec.role == "model"]
# first and last token counts of split buckets at 132 multiprocessors, and odd sizes around tile edges
TOKEN_COUNTS = (0, 1, 7, 8, 15, 16, 17, 31, 32, 33, 64, 65, 128, 129, 192, 193, 257, 321, 385, 449, 512)


@pytest.mark.parametrize("shape", [nano, pytest.param(SMALL_FLASH, marks=pytest.mark.slow)], ids=lambda s: s.name)
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_every_launch_is_prewarmed(spec, shape):
    warm = set().union(
        *(launched(ops.spec(case.op), *case.arguments()) for case in spec.cuda_cases(shape, CPU, MAX_TOKENS))
    )
    assert warm, f"{spec.name} prewarms nothing"
    for num_tokens in TOKEN_COUNTS if shape is nano else TOKEN_COUNTS[:6]:
        args, kwargs = contract.example(spec, shape, num_tokens, torch.bfloat16)
        for mode in ({"deterministic": d} for d in (False, True)) if "deterministic" in kwargs else ({},):
            cold = launched(spec, args, kwargs | mode) - warm
            assert not cold, f"T = {num_tokens} {mode} would compile {sorted(map(str, cold))}"


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_keys_are_named_by_the_cases(spec):
    """A case's own key is one that its call launches, so that a skipped warm case skips nothing."""
    for case in spec.cuda_cases(nano, CPU, MAX_TOKENS):
        assert case.key in launched(ops.spec(case.op), *case.arguments())
