import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dsv4 import ops

GOLDEN = Path(__file__).parents[1] / "golden"


def naive(scores: np.ndarray, positions: list[int], ratio: int, topk: int) -> list[list[int]]:
    rows = []
    for row, position in zip(scores, positions, strict=True):
        seen = [w for w in range(len(row)) if w < (position + 1) // ratio and row[w] > -np.inf]
        best = sorted(sorted(seen, key=lambda w: (-row[w], w))[:topk])
        rows.append(best + [-1] * (min(topk, len(row)) - len(best)))
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 32, 33, 64, 128, 250, 256])
def test_matches_sorting_with_many_ties(num_tokens, dtype):
    rng = np.random.default_rng(num_tokens)
    scores = rng.integers(-3, 4, size=(num_tokens, 57)).astype(np.float32)  # seven values: ties at every cut
    scores[rng.random(scores.shape) < 0.1] = -np.inf
    positions = rng.integers(0, 260, size=num_tokens)
    positions[rng.random(num_tokens) < 0.2] = -1
    positions[rng.random(num_tokens) < 0.1] = -4
    got = ops.indexer_topk(torch.tensor(scores, dtype=dtype), torch.tensor(positions), ratio=4, topk=16)
    assert got.dtype == torch.int32 and got.shape == (num_tokens, 16)
    assert got.tolist() == naive(scores, positions.tolist(), 4, 16)


def test_ties_go_to_the_smallest_entry_also_between_zeros_of_both_signs():
    zeros = torch.zeros(200).copysign(torch.randn(200)).repeat(3, 1)
    got = ops.indexer_topk(zeros, torch.full((3,), 799), ratio=4, topk=70)
    assert got.tolist() == [list(range(70))] * 3


def test_fewer_entries_than_topk():
    scores = torch.randn(2, 5)
    got = ops.indexer_topk(scores, torch.tensor([11, 100]), ratio=4, topk=64)
    assert got.tolist() == [[0, 1, 2, -1, -1], [0, 1, 2, 3, 4]]


def test_no_entries():
    assert ops.indexer_topk(torch.randn(3, 0), torch.tensor([5, 9, -1]), ratio=4, topk=8).shape == (3, 0)


def test_never_picks_nan_or_the_future():
    scores = torch.tensor([[1.0, torch.nan, 3.0, torch.inf, 9.0]])
    assert ops.indexer_topk(scores, torch.tensor([15]), ratio=4, topk=5).tolist() == [[0, 2, 3, -1, -1]]


def test_row_passes_do_not_matter(monkeypatch):
    module = sys.modules["dsv4.ops.indexer_topk"]  # the package attribute of this name is the op
    scores, positions = torch.randn(9, 40), torch.arange(9) * 20
    expected = ops.indexer_topk(scores, positions, ratio=4, topk=8)
    monkeypatch.setattr(module, "TEMPORARY_BYTES", 40 * 32 * 2)
    assert torch.equal(ops.indexer_topk(scores, positions, ratio=4, topk=8), expected)


@pytest.mark.parametrize("name", ["p300.layer2", "p300.layer4", "p300.layer6"])
def test_recorded_picks_official(name):
    golden = load_file(GOLDEN / "layers_official.safetensors")
    scores, picks = golden[f"{name}.attn.indexer.score"], golden[f"{name}.attn.indexer.topk"]
    assert torch.equal(ops.indexer_topk(scores, torch.arange(300), ratio=4, topk=64), picks)


def test_recorded_picks_exact():
    golden = load_file(GOLDEN / "layers_exact.safetensors")
    scores, picks = golden["p40.layer2.attn.indexer.score"], golden["p40.layer2.attn.indexer.topk"]
    assert torch.equal(ops.indexer_topk(scores, torch.arange(40), ratio=4, topk=64), picks)


def test_errors():
    scores, positions = torch.randn(2, 8), torch.tensor([3, 7])
    with pytest.raises(ValueError, match="topk must be at least 1, got 0"):
        ops.indexer_topk(scores, positions, ratio=4, topk=0)
    with pytest.raises(ValueError, match="ratio must be at least 1, got 0"):
        ops.indexer_topk(scores, positions, ratio=0, topk=4)
    with pytest.raises(ValueError, match="scores must be float32 or bfloat16, got torch.float16"):
        ops.indexer_topk(scores.half(), positions, ratio=4, topk=4)
