import pytest
import torch

from dsv4 import ops
from dsv4.ops import indexer_topk_kernel
from dsv4.ops.shapes import nano, tiny

from ..ops import contract
from . import interpreter
from .against_reference import compare

interpreter.repair()
SPEC = ops.spec("indexer_topk")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 33])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [tiny, nano], ids=lambda s: s.name)
def test_examples(shape, dtype, num_tokens):
    compare(SPEC, *contract.example(SPEC, shape, num_tokens, dtype, seed=num_tokens), rtol=0, atol=0)


def hard_scores(num_entries: int, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """Rows with few distinct values, zeros of both signs, infinities, NaN, subnormals and neighbouring floats."""

    def integers(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (num_entries,), generator=g)

    specials = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 1e-40, -1e-40, 3e38, -3e38])
    rows = [
        integers(-2, 3).float(),
        torch.where(integers(0, 2) == 0, 0.0, -0.0),
        specials[integers(0, len(specials))],
        torch.full((num_entries,), -torch.inf),
        torch.full((num_entries,), torch.nan),
        (0x3F800000 + integers(-3, 4)).int().view(torch.float32),
        torch.randn(num_entries, generator=g),
        -torch.rand(num_entries, generator=g).exp(),
    ]
    return torch.stack(rows).to(dtype)


@pytest.mark.parametrize("topk", [1, 5, 64, 200])
@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_and_special_values(monkeypatch, dtype, block, topk):
    """Small steps, so that ties and picks run over their edges; byte-equal."""
    monkeypatch.setattr(indexer_topk_kernel, "BLOCK", block)
    monkeypatch.setattr(indexer_topk_kernel, "FILL", 16)
    g = torch.Generator().manual_seed(topk + block)
    scores = hard_scores(100, dtype, g)
    for visible in (100, 61, topk, topk + 1):
        positions = torch.full((len(scores),), 4 * visible + 2)
        compare(SPEC, (scores, positions), {"ratio": 4, "topk": topk}, rtol=0, atol=0)


def test_more_entries_than_a_step():
    g = torch.Generator().manual_seed(0)
    scores = torch.cat((hard_scores(5001, torch.float32, g), torch.randn(2, 5001, generator=g)))
    positions = torch.tensor([20003, 20003, 20003, 20003, 20003, 20003, 20003, 9000, 8191, -1])
    compare(SPEC, (scores, positions), {"ratio": 4, "topk": 1024}, rtol=0, atol=0)


def test_no_entries():
    compare(SPEC, (torch.empty(3, 0), torch.arange(3)), {"ratio": 4, "topk": 8}, rtol=0, atol=0)
