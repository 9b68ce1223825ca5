"""Kernels of route_topk and route_hash."""

import math

import pytest
import torch

from dsv4 import ops
from dsv4.ops.shapes import nano, tiny

from ..ops import contract
from . import interpreter
from .against_reference import compare, outputs

interpreter.repair()
TOPK, HASH = ops.spec("route_topk"), ops.spec("route_hash")
# A score is exact to a few fp32 ulp (2^-23 each) and a weight a quotient of sums of at most 16 of them.
RTOL = 1e-6


def all_rows(logits):
    return torch.tensor([len(logits)], dtype=torch.int32)


@pytest.mark.parametrize("spec", [TOPK, HASH], ids=lambda s: s.name)
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 33])
@pytest.mark.parametrize("shape", [tiny, nano], ids=lambda s: s.name)
def test_examples(spec, shape, num_tokens):
    compare(spec, *contract.example(spec, shape, num_tokens, torch.bfloat16, seed=num_tokens), rtol=RTOL, atol=1e-12)


@pytest.mark.parametrize("topk", [1, 6, 8])
def test_many_experts(topk):
    g = torch.Generator().manual_seed(topk)
    logits, bias = 3 * torch.randn(9, 384, generator=g), torch.randn(384, generator=g)
    compare(TOPK, (logits, bias, all_rows(logits)), {"topk": topk, "scale": 2.5}, rtol=RTOL, atol=1e-12)


def test_ties_go_to_the_smallest_index():
    logits = torch.tensor([[1.5] * 300, [0.5, 1.5, 0.5] * 100, [-torch.inf] * 300])
    bias = torch.zeros(300)
    bias[7] = -0.0
    ids, weights = TOPK.cuda(logits, bias, all_rows(logits), topk=6, scale=1.0)
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5], [1, 4, 7, 10, 13, 16], [0, 1, 2, 3, 4, 5]]
    torch.testing.assert_close(weights[:2], torch.full((2, 6), 1 / 6))
    assert (weights[2] == 0).all()


def test_unusual_values():
    """Infinite and NaN biases and logits order as the reference's sort orders them."""
    g = torch.Generator().manual_seed(0)
    logits, bias = torch.randn(4, 12, generator=g), torch.randn(12, generator=g)
    logits[1, 3], logits[2, 5], logits[3, 4] = math.nan, -torch.inf, -200.0
    bias[[2, 9]], bias[[0, 6]], bias[7] = torch.inf, -torch.inf, math.nan
    compare(TOPK, (logits, bias, all_rows(logits)), {"topk": 12, "scale": 1.5}, rtol=RTOL, atol=1e-12)


def test_scores_over_the_whole_range():
    """Through route_hash with one expert beside one of score sqrt(ln 2): both ends, subnormal exponentials included."""
    values = torch.cat((torch.linspace(-106, 20, 505), torch.tensor([-1e-3, 0.0, 1e-3, 88.0, 1e4, 1e30])))
    logits = torch.stack((values, torch.zeros_like(values)), dim=1)
    table = torch.tensor([[0, 1]], dtype=torch.int32)
    _, weights = HASH.cuda(logits, table, torch.zeros(len(values), dtype=torch.int64), all_rows(logits), scale=1.0)
    got = (weights[:, 0] / weights[:, 1]).double() * math.log(2) ** 0.5
    x = values.double()
    softplus = x.clamp_min(0) + torch.log1p(torch.exp(-x.abs()))
    # below −87 the exponential is subnormal: a multiple of 2^-149, from half of which on it is not zero
    low, high = softplus - 2.0**-150, softplus + 2.0**-150
    assert (got >= low.clamp_min(0).sqrt() * (1 - RTOL)).all() and (got <= high.sqrt() * (1 + RTOL)).all()
    assert (got[x < -103.98] == 0).all() and (got[x > -103.2] > 0).all()


@pytest.mark.parametrize("num_valid", [0, 1, 5, 7, 100])
def test_pad_rows(num_valid):
    g = torch.Generator().manual_seed(num_valid)
    logits, bias = torch.randn(7, 16, generator=g), torch.randn(16, generator=g)
    logits[num_valid:] = math.nan
    counter = torch.tensor([num_valid], dtype=torch.int32)
    table, tokens = torch.randint(0, 16, (5, 3), generator=g), torch.tensor([0, 4, 5, -1, 2, 2**40, 3])
    compare(TOPK, (logits, bias, counter), {"topk": 6, "scale": 1.5}, rtol=RTOL, atol=1e-12)
    compare(HASH, (logits, table, tokens, counter), {"scale": 1.5}, rtol=RTOL, atol=1e-12)


@pytest.mark.parametrize("table_dtype", [torch.int32, torch.int64], ids=str)
def test_a_wrong_table_reads_nothing(table_dtype):
    logits = torch.zeros(2, 4)
    table = torch.tensor([[1, 4, -1], [3, 0, 2**31 - 1]], dtype=table_dtype)
    ids, weights = HASH.cuda(logits, table, torch.tensor([1, 0], dtype=torch.int32), all_rows(logits), scale=1.0)
    assert ids.tolist() == [[3, 0, -1], [1, -1, -1]]
    torch.testing.assert_close(weights, torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]))


def test_rows_are_independent():
    for spec in (TOPK, HASH):
        args, kwargs = contract.example(spec, nano, 45, torch.bfloat16)
        together = outputs(spec, spec.cuda, args, kwargs)
        for t in (0, 5, 29):
            row = tuple(a[t : t + 1] if a.shape[:1] == (45,) else a for a in args)
            alone = outputs(spec, spec.cuda, row, kwargs)
            assert all(torch.equal(a, b[t : t + 1]) for a, b in zip(alone, together, strict=True))
