import math

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4 import ops
from dsv4.ops import _routing
from dsv4.ops.route_topk import reference

from . import plain_routing as plain


def arguments(num_tokens: int, num_experts: int = 16, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(num_tokens, num_experts, generator=g), torch.randn(num_experts, generator=g)


@pytest.mark.parametrize("topk", [1, 6, 16])
@pytest.mark.parametrize("num_tokens", [1, 33])
def test_matches_loops(num_tokens, topk):
    logits, bias = arguments(num_tokens)
    ids, weights = ops.route_topk(logits, bias, plain.all_rows(logits), topk=topk, scale=2.5)
    for t, row in enumerate(logits.tolist()):
        biased = [plain.score(v) + b for v, b in zip(row, bias.tolist(), strict=True)]
        expected = sorted(range(len(row)), key=lambda e: (-biased[e], e))[:topk]
        assert ids[t].tolist() == expected
        np.testing.assert_allclose(weights[t].numpy(), plain.weights(row, expected, 2.5), rtol=2e-6)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)


def test_ties_go_to_the_smallest_index():
    logits = torch.tensor([[1.5] * 300, [0.5, 1.5, 0.5] * 100])
    ids, weights = ops.route_topk(logits, torch.zeros(300), plain.all_rows(logits), topk=6, scale=1.0)
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5], [1, 4, 7, 10, 13, 16]]
    torch.testing.assert_close(weights, torch.full((2, 6), 1 / 6))


def test_bias_chooses_but_does_not_weigh():
    logits, _ = arguments(9)
    bias = torch.zeros(16)
    bias[[3, 7]] = 100.0
    ids, weights = ops.route_topk(logits, bias, plain.all_rows(logits), topk=2, scale=1.0)
    assert {tuple(sorted(row)) for row in ids.tolist()} == {(3, 7)}
    expected = [plain.weights(row, chosen, 1.0) for row, chosen in zip(logits.tolist(), ids.tolist(), strict=True)]
    np.testing.assert_allclose(weights.numpy(), expected, rtol=2e-6)


def test_score_is_accurate_over_the_whole_range():
    values = [-80.0, -40.0, -20.0, -1e-3, 0.0, 1e-3, 15.0, 19.9, 20.1, 50.0, 88.0, 90.0, 1e4, 1e30]
    got = _routing.scores(torch.tensor([values]))[0]
    expected = [plain.score(v) for v in torch.tensor(values).tolist()]
    np.testing.assert_allclose(got.numpy(), expected, rtol=3e-7)


@pytest.mark.parametrize("lowest", [-120.0, -1e30, -math.inf])
def test_no_affinity_gives_no_weight(lowest):
    logits = torch.full((2, 8), lowest)
    logits[1, 5] = 1.0
    ids, weights = ops.route_topk(logits, torch.zeros(8), plain.all_rows(logits), topk=2, scale=1.5)
    assert ids.tolist() == [[0, 1], [5, 0]]
    torch.testing.assert_close(weights, torch.tensor([[0.0, 0.0], [1.5, 0.0]]))


def test_small_affinities_still_sum_to_the_scale():
    logits = torch.full((1, 8), -80.0)
    weights = ops.route_topk(logits, torch.zeros(8), plain.all_rows(logits), topk=4, scale=1.5)[1]
    torch.testing.assert_close(weights, torch.full((1, 4), 0.375))


@pytest.mark.parametrize("num_valid", [0, 1, 5, 7, 100])
def test_pad_rows(num_valid):
    logits, bias = arguments(7)
    expected_ids, expected = ops.route_topk(logits, bias, plain.all_rows(logits), topk=6, scale=1.5)
    logits[num_valid:] = math.nan
    counter = torch.tensor([num_valid], dtype=torch.int32)
    ids, weights = ops.route_topk(logits, bias, counter, topk=6, scale=1.5)
    assert torch.equal(ids[:num_valid], expected_ids[:num_valid])
    assert torch.equal(weights[:num_valid], expected[:num_valid])
    assert (ids[num_valid:] == -1).all() and (weights[num_valid:] == 0).all()


def test_row_is_independent_of_the_batch():
    logits, bias = arguments(1025, num_experts=23)
    full = ops.route_topk(logits, bias, plain.all_rows(logits), topk=6, scale=1.5)
    for rows in (*(slice(t, t + 1) for t in range(200)), slice(7, 72), slice(64, 193), slice(960, 1025)):
        part = logits[rows].clone()
        for got, want in zip(ops.route_topk(part, bias, plain.all_rows(part), topk=6, scale=1.5), full, strict=True):
            assert torch.equal(got, want[rows])


def test_golden():
    layer = plain.nano_layer(3)
    logits = layer.logits("ffn_in")
    ids, weights = ops.route_topk(logits, layer.bias, plain.all_rows(logits), topk=6, scale=1.5)
    layer.assert_recorded(ids, weights)
    unbiased = ops.route_topk(logits, torch.zeros(16), plain.all_rows(logits), topk=6, scale=1.5)[0]
    assert not torch.equal(unbiased.sort(1).values, ids.sort(1).values)


def test_reads_nothing_back():
    """Under fake tensors a host read or a data-dependent shape raises."""
    with FakeTensorMode() as mode:
        args = [mode.from_tensor(t) for t in (*arguments(5), torch.tensor([3], dtype=torch.int32))]
        assert [t.shape for t in reference(*args, topk=6, scale=1.5)] == [(5, 6), (5, 6)]


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, torch.randn(3), r"route_topk logits must have 2 dimensions, got 1"),
        (0, torch.randn(3, 16).bfloat16(), r"route_topk logits must have dtype torch.float32, got torch.bfloat16"),
        (1, torch.randn(8), r"route_topk bias must be \[16\] torch.float32, got \[8\] torch.float32"),
        (2, torch.tensor([3]), r"route_topk num_valid must be \[1\] torch.int32, got \[1\] torch.int64"),
    ],
)
def test_wrong_arguments(position, value, message):
    args = [*arguments(3), torch.tensor([3], dtype=torch.int32)]
    args[position] = value
    with pytest.raises(ValueError, match=message):
        ops.route_topk(*args, topk=6, scale=1.5)


@pytest.mark.parametrize("topk", [0, 17])
def test_wrong_topk(topk):
    logits, bias = arguments(3)
    with pytest.raises(ValueError, match=rf"route_topk topk must be in \[1, 16\], got {topk}"):
        ops.route_topk(logits, bias, plain.all_rows(logits), topk=topk, scale=1.5)
