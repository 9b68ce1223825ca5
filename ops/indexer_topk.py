"""Entries that a row attends to: the ``topk`` visible ones with the highest indexer scores.

Shapes: scores ``[T, N]`` fp32 or bf16; positions ``[T]`` int64, −1 for a pad. Returns picks ``[T, min(topk, N)]``
int32, ascending, padded with −1 at the end.
Numerics: entry w is visible if ``w < (position + 1) // ratio``. A score of −inf (absent entry) or NaN is never
picked. Ties go to the smallest entry number, so the result is unique and a row never depends on the others.
Memory: temporaries stay under ``TEMPORARY_BYTES`` (beyond one row, which must fit).
Errors: ``ValueError`` for other dtypes or shapes, or a ratio or topk below one.
Source: indexer of the official inference code, which leaves ties open.
"""

import torch

from . import _rows
from ._example_rows import example_rows
from ._registry import Arguments, PrewarmCase, register
from .shapes import BLOCK_TOKENS, Shape

TEMPORARY_BYTES = 64 << 20
_BYTES_PER_SCORE = 32  # masked copy, sorted values and order of one score, and the sort's own buffer
_RATIO = 4  # of the layers that have an indexer


def check_numbers(dtype: torch.dtype, ratio: int, topk: int) -> None:
    """Raise the op's errors; ``dtype`` is that of the scores."""
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"indexer_topk scores must be float32 or bfloat16, got {dtype}")
    if ratio < 1:
        raise ValueError(f"indexer_topk ratio must be at least 1, got {ratio}")
    if topk < 1:
        raise ValueError(f"indexer_topk topk must be at least 1, got {topk}")


def _alloc(scores: torch.Tensor, positions: torch.Tensor, ratio: int, topk: int) -> torch.Tensor:
    check_numbers(scores.dtype, ratio, topk)
    _rows.check_indices("indexer_topk", 1, positions=positions)
    _rows.check_rows("indexer_topk", "scores", scores.shape[0], positions=positions)
    return scores.new_empty((scores.shape[0], min(topk, scores.shape[1])), dtype=torch.int32)


def reference(scores: torch.Tensor, positions: torch.Tensor, *, ratio: int, topk: int) -> torch.Tensor:
    """Pick the ``topk`` highest visible scores of every row."""
    picks = _alloc(scores, positions, ratio, topk)
    visible = torch.div(positions + 1, ratio, rounding_mode="floor").unsqueeze(1)
    rows_per_pass = max(1, TEMPORARY_BYTES // (_BYTES_PER_SCORE * max(1, scores.shape[1])))
    for first in range(0, scores.shape[0], rows_per_pass):
        rows = slice(first, first + rows_per_pass)
        picks[rows] = _pick(scores[rows], visible[rows], picks.shape[1])
    return picks


def _pick(scores: torch.Tensor, visible: torch.Tensor, count: int) -> torch.Tensor:
    num_entries = scores.shape[1]
    keep = (torch.arange(num_entries, device=scores.device) < visible) & (scores > -torch.inf)
    value = torch.where(keep, scores + 0.0, -torch.inf)  # adding zero turns −0 into +0: they tie
    value, order = value.sort(dim=1, descending=True, stable=True)
    chosen = torch.where(value[:, :count] > -torch.inf, order[:, :count], num_entries).sort(dim=1).values
    return torch.where(chosen < num_entries, chosen, -1)


def fake(scores: torch.Tensor, positions: torch.Tensor, *, ratio: int, topk: int) -> torch.Tensor:
    return _alloc(scores, positions, ratio, topk)


def example(shape: Shape, *, num_tokens: int, device: torch.device, dtype: torch.dtype, seed: int) -> Arguments:
    rows = example_rows(shape, num_tokens=num_tokens, device=device, seed=seed)
    g = torch.Generator(device="cpu").manual_seed(seed)
    num_entries = rows.block_tables.shape[1] * BLOCK_TOKENS // _RATIO
    scores = torch.randn(num_tokens, num_entries, generator=g).to(device, dtype)
    return (scores, rows.positions), {"ratio": _RATIO, "topk": shape.index_topk}


def cuda(scores: torch.Tensor, positions: torch.Tensor, *, ratio: int, topk: int) -> torch.Tensor:
    from . import indexer_topk_kernel

    picks = _alloc(scores, positions, ratio, topk)
    indexer_topk_kernel.run(scores, positions, picks, ratio)
    return picks


def cuda_cases(shape: Shape, device: torch.device, max_tokens: int) -> tuple[PrewarmCase, ...]:
    """Scores of both numerics, in rows of whole blocks; lengths, ratio and topk are run-time numbers."""
    from . import indexer_topk_kernel

    cases = []
    for dtype in (torch.bfloat16, torch.float32):

        def arguments(dtype: torch.dtype = dtype) -> Arguments:
            return example(shape, num_tokens=1, device=device, dtype=dtype, seed=0)

        key = indexer_topk_kernel.key(dtype, BLOCK_TOKENS // _RATIO)
        cases.append(PrewarmCase(op="indexer_topk", key=key, arguments=arguments))
    return tuple(cases)


indexer_topk = register(
    "indexer_topk",
    "(Tensor scores, Tensor positions, *, int ratio, int topk) -> Tensor",
    reference=reference,
    fake=fake,
    example=example,
    cuda=cuda,
    cuda_cases=cuda_cases,
    role="part",
)
