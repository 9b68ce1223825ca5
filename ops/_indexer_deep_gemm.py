"""Indexer scores by DeepGEMM: e4m3 queries against an FP8 cache, fp32 scores, 32 or 64 heads of 128.

DeepGEMM's paged kernel compiles once per 32 requests and one or two rows a request; the plain one has a single key but
wants every key in one array. So the pages of all requests are gathered, and every row scores the range of its request.
That pays where rows share requests: on an H200, scores of 8,192 rows on 8,192 entries of one request take 3.6 ms
against 5.6 ms with our kernel, those of 64 requests of one row 2.7 ms against 0.2 ms.
"""

import torch

from . import _backends, _deep_gemm, _paged
from ._registry import Arguments, PrewarmCase
from .shapes import Shape

HEADS = (32, 64)
ROWS_PER_REQUEST = 64  # fewest rows per request that are worth gathering its pages
_BYTES_PER_SCORE = 12  # the kernel's result, a copy, and three masks


def serves(
    q: torch.Tensor, cache: torch.Tensor, block_tables: torch.Tensor, dtype: torch.dtype, *, deterministic: bool,
    max_bytes: int,
) -> bool:  # fmt: skip
    """The dispatch rule, of the backend, dtypes and shapes alone.

    Not with ``deterministic``, since the rule looks at the number of rows; and not if the gathered pages would exceed
    ``max_bytes``.
    """
    stored = q.dtype == torch.float8_e4m3fn and cache.dtype == torch.uint8 and dtype == torch.float32
    if _backends.backend("gemm") != "deep_gemm" or not stored or deterministic:
        return False
    suits = q.shape[1] in HEADS and q.shape[2] == _paged.INDEX_DIM and not cache.shape[1] % (4 * _paged.INDEX_ROW_BYTES)
    gathered = block_tables.numel() * cache.shape[1]
    return suits and q.shape[0] >= ROWS_PER_REQUEST * block_tables.shape[0] and gathered <= max_bytes


def cases(shape: Shape, device: torch.device, page_rows: int, ratio: int) -> tuple[PrewarmCase, ...]:
    """The only kernel for so many heads, whatever the number of rows and of entries."""
    if (
        _backends.backend("gemm") != "deep_gemm"
        or shape.index_heads not in HEADS
        or shape.index_dim != _paged.INDEX_DIM
    ):
        return ()

    def arguments() -> Arguments:
        def zeros(*size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        rows, int32 = ROWS_PER_REQUEST, torch.int32
        q = zeros(rows, shape.index_heads, shape.index_dim, dtype=torch.float32).to(torch.float8_e4m3fn)
        cache = zeros(1, page_rows * _paged.INDEX_ROW_BYTES, dtype=torch.uint8)
        places = zeros(rows, dtype=torch.int64), zeros(rows, dtype=int32), zeros(1, 1, dtype=int32)
        weights = zeros(rows, shape.index_heads, dtype=torch.float32)
        return (q, weights, cache, *places), {"ratio": ratio, "dtype": torch.float32, "deterministic": False}

    key = _deep_gemm.keys.mqa_logits(shape.index_heads, _paged.INDEX_DIM, _deep_gemm.num_sms())
    return (PrewarmCase("indexer_logits", key, arguments),)


def run(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    positions: torch.Tensor,
    row_requests: torch.Tensor,
    block_tables: torch.Tensor,
    scores: torch.Tensor,
    *,
    ratio: int,
    max_bytes: int,
) -> None:
    """Write every element of ``scores [T, entries]``; arguments as those of ``indexer_logits``.

    The gathered pages and, of one pass over some rows, the kernel's result and its masks take ``max_bytes`` together,
    beyond one row, which must fit.
    """
    if 0 in scores.shape or block_tables.shape[0] == 0:
        scores.fill_(-torch.inf)
        return
    num_entries = scores.shape[1]
    codes, scales = _gather(cache, block_tables)
    present = (block_tables >= 0).repeat_interleave(num_entries // block_tables.shape[1], 1)
    entry = torch.arange(num_entries, device=q.device)
    is_row = row_requests >= 0
    request = torch.where(is_row, row_requests, 0)
    reach = torch.div(positions + 1, ratio, rounding_mode="floor").clamp(0, num_entries)
    reach = torch.where(is_row, reach, 0).int()  # a pad's range is empty; the kernel must not see a negative one
    starts = request * num_entries
    pitch = _deep_gemm.keys.align(num_entries, 256)  # columns that DeepGEMM allocates
    gathered = sum(pages.numel() * pages.element_size() for pages in (codes, scales))
    step = max(1, (max_bytes - gathered) // (_BYTES_PER_SCORE * pitch))
    for rows in (slice(first, first + step) for first in range(0, len(q), step)):
        got = _deep_gemm.mqa_logits(
            q[rows].contiguous(), codes, scales, weights[rows].contiguous(), starts[rows], starts[rows] + reach[rows],
            num_entries,
        )  # fmt: skip
        seen = present[request[rows].long()] & (entry < reach[rows].unsqueeze(1))
        scores[rows] = torch.where(seen, got, -torch.inf)


def _gather(cache: torch.Tensor, block_tables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``[R * entries, 128]`` and scales ``[R * entries]`` of every request; absent pages hold page 0."""
    data_bytes = cache.shape[1] // _paged.INDEX_ROW_BYTES * _paged.INDEX_DIM
    pages = block_tables.clamp_min(0).flatten()
    codes = cache[:, :data_bytes].index_select(0, pages).view(torch.float8_e4m3fn)
    scales = cache[:, data_bytes:].index_select(0, pages).view(torch.float32)
    return codes.view(-1, _paged.INDEX_DIM), scales.view(-1)
