import pytest
import torch

from dsv4 import ops
from dsv4.ops.shapes import nano, tiny

from ..ops import contract
from ..ops.test_ep_combine import make
from . import interpreter, prewarm
from .against_reference import compare, outputs

interpreter.repair()
SPEC = ops.spec("ep_combine")


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 33])
@pytest.mark.parametrize("shape", [tiny, nano], ids=lambda s: s.name)
def test_matches_reference(shape, num_tokens):
    compare(SPEC, *contract.example(SPEC, shape, num_tokens, torch.bfloat16, seed=num_tokens), rtol=0, atol=0)


@pytest.mark.parametrize(("capacity", "count", "num_tokens"), [(9, 5, 7), (4, 4, 4), (3, 0, 5), (3, 0, 0), (2, 1, 1)])
def test_poison_behind_the_count(capacity, count, num_tokens):
    args = make(capacity, count, num_tokens, seed=count)
    compare(SPEC, args, {"group": ""}, rtol=0, atol=0)
    assert outputs(SPEC, SPEC.cuda, args, {"group": ""})[0].isfinite().all()


def test_bookkeeping_outside_the_buffers_is_dropped():
    y, source, count, out = make(4, 4, 6, seed=1)
    want = outputs(SPEC, SPEC.reference, (y, source, count, out), {"group": ""})[0]
    assert torch.equal(outputs(SPEC, SPEC.cuda, (y, source, count + 3, out), {"group": ""})[0], want)
    source[0], source[1] = -1, 6
    source_kept = source[2:].tolist()
    got = outputs(SPEC, SPEC.cuda, (y, source, count, out), {"group": ""})[0]
    for row in range(6):
        assert torch.equal(got[row], y[2 + source_kept.index(row)] if row in source_kept else torch.zeros(24))


def test_out_must_be_contiguous():
    y, source, count, _ = make(4, 3, 6, seed=2)
    with pytest.raises(ValueError, match="out must be contiguous"):
        SPEC.cuda(y, source, count, torch.empty(24, 6).t(), group="")


def test_cases_cover_every_launch():
    args, kwargs = contract.example(SPEC, tiny, 5, torch.bfloat16)
    assert prewarm.launched(SPEC, args, kwargs) == prewarm.enumerated(SPEC, tiny, 64)
