"""The kernels of picks, run over parts of the rows, make what they make over all of them."""

import sys

import pytest
import torch

from dsv4 import ops
from dsv4.ops.shapes import nano, tiny

from ..ops import contract
from ..ops.test_indexer_logits import RATIO, scene
from . import interpreter
from .against_reference import outputs

interpreter.repair()
SPEC = ops.spec("indexer_picks")
module = sys.modules["dsv4.ops.indexer_picks"]  # the package attribute of this name is the op


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 33])
@pytest.mark.parametrize("shape", [tiny, nano], ids=lambda s: s.name)
def test_examples(shape, num_tokens):
    args, options = contract.example(SPEC, shape, num_tokens, torch.float32, seed=num_tokens)
    (want,), (got,) = (outputs(SPEC, f, args, {**options, "dtype": torch.float32}) for f in (SPEC.reference, SPEC.cuda))
    assert got.shape == want.shape and torch.equal(got, want)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts(monkeypatch, dtype, deterministic):
    args, options = scene(20, seed=2, dtype=dtype), {"ratio": RATIO, "dtype": dtype, "deterministic": deterministic}
    monkeypatch.setattr(module, "SCORE_BYTES", 20 * 72 * dtype.itemsize)  # parts of 16 rows
    got = SPEC.cuda(*args, topk=9, **options)
    scores = ops.spec("indexer_logits").cuda(*args, **options)
    assert torch.equal(got, ops.spec("indexer_topk").cuda(scores, args[3], ratio=RATIO, topk=9))
    assert (got >= 0).any() and (got < 0).any()
