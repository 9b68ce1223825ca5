"""Picks made part by part are those of all scores at once, and no more scores than stated exist at a time."""

import sys

import pytest
import torch

from dsv4 import ops
from dsv4.ops.shapes import flash

from .test_indexer_logits import RATIO, scene

module = sys.modules["dsv4.ops.indexer_picks"]  # the package attribute of this name is the op
ENTRIES = 72  # of ``scene``


def picks_of_all_scores(args, topk, **options):
    scores = ops.indexer_logits(*args, ratio=RATIO, **options)
    return ops.indexer_topk(scores, args[3], ratio=RATIO, topk=topk)


@pytest.fixture
def score_sizes(monkeypatch) -> list[tuple[int, int]]:
    """``[rows, bytes]`` of every scores tensor that the op makes."""
    sizes = []
    scores_of = module.score_entries

    def spy(*args, **options):
        scores = scores_of(*args, **options)
        sizes.append((len(scores), scores.numel() * scores.element_size()))
        return scores

    monkeypatch.setattr(module, "score_entries", spy)
    return sizes


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 16, 33, 75])
def test_parts_change_nothing(monkeypatch, score_sizes, num_tokens, dtype, deterministic):
    args = scene(num_tokens, seed=num_tokens, dtype=dtype)
    options = {"dtype": dtype, "deterministic": deterministic}
    bound = 40 * ENTRIES * dtype.itemsize  # 40 rows, so parts of 32
    monkeypatch.setattr(module, "SCORE_BYTES", bound)
    got = ops.indexer_picks(*args, ratio=RATIO, topk=16, **options)
    assert torch.equal(got, picks_of_all_scores(args, 16, **options))
    assert sum(rows for rows, _ in score_sizes) == num_tokens and len(score_sizes) == -(-num_tokens // 32)
    assert all(size <= bound for _, size in score_sizes)


def test_sixteen_rows_are_always_scored_together(monkeypatch, score_sizes):
    args = scene(33, seed=1)
    monkeypatch.setattr(module, "SCORE_BYTES", 1)
    options = {"dtype": torch.float32, "deterministic": False}
    got = ops.indexer_picks(*args, ratio=RATIO, topk=5, **options)
    assert torch.equal(got, picks_of_all_scores(args, 5, **options))
    assert [rows for rows, _ in score_sizes] == [16, 16, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bound_holds_at_a_context_of_a_million(dtype):
    """8,192 rows of Flash against 2^18 entries, as meta tensors: parts cover all rows once and fit."""
    q = torch.empty(8192, flash.index_heads, flash.index_dim, device="meta")
    weights, requests = (torch.empty(8192, device="meta") for _ in range(2))
    cache, tables = torch.empty(1, 64, flash.index_dim, device="meta"), torch.empty(1, 4096, device="meta")
    parts = [part for part, _ in module._parts((q, weights, cache, requests, requests, tables), dtype)]
    rows = [len(range(*part.indices(8192))) for part in parts]
    assert [part.start for part in parts] == [sum(rows[:i]) for i in range(len(rows))] and sum(rows) == 8192
    assert max(rows) * 2**18 * dtype.itemsize <= module.SCORE_BYTES and len(parts) == 8 * dtype.itemsize


def test_no_entries_and_no_requests():
    q, weights, cache, positions, requests, tables = scene(3)
    options = {"ratio": RATIO, "dtype": torch.float32, "topk": 4, "deterministic": False}
    assert ops.indexer_picks(q, weights, cache, positions, requests, tables[:, :0], **options).shape == (3, 0)
    pads = torch.full_like(positions, -1), torch.full_like(requests, -1), tables[:0]
    assert (ops.indexer_picks(q, weights, cache, *pads, **options) == -1).all()


def test_arguments_are_checked():
    args = scene(2)
    options = {"ratio": RATIO, "dtype": torch.float32, "topk": 4, "deterministic": False}
    for wrong, message in (
        ({"topk": 0}, "indexer_topk topk must be at least 1, got 0"),
        ({"ratio": 0}, "indexer_logits ratio must be at least 1, got 0"),
        ({"dtype": torch.float16}, "indexer_logits dtype must be float32 or bfloat16, got torch.float16"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.indexer_picks(*args, **(options | wrong))
