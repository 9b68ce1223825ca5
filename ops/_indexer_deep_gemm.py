"""Indexer scores by DeepGEMM: e4m3 queries against an FP8 cache, fp32 scores, 32 or 64 heads of 128.

DeepGEMM's paged kernel compiles once per 32 requests and one or two rows a request; the plain one has a single key but
wants every key in one array. So the pages are gathered, some requests at a time, and every row scores the range of its
request; rows of other requests get an empty range. Both the gathered pages and the kernel's result stay under the
caller's byte bound, beyond one request and one row, which must fit.
"""

from collections.abc import Iterator

import torch

from . import _backends, _deep_gemm, _paged

HEADS = (32, 64)
_BYTES_PER_SCORE = 12  # the kernel's result, a copy, and three masks


def serves(q: torch.Tensor, cache: torch.Tensor, dtype: torch.dtype) -> bool:
    """The dispatch rule: the backend, what is stored, and the head count."""
    stored = q.dtype == torch.float8_e4m3fn and cache.dtype == torch.uint8 and dtype == torch.float32
    if _backends.backend("gemm") != "deep_gemm" or not stored:
        return False
    suits = q.shape[1] in HEADS and q.shape[2] == _paged.INDEX_DIM
    return suits and _paged.page_rows(cache, _paged.INDEX_DIM) % 4 == 0


def key(q: torch.Tensor) -> _deep_gemm.keys.Key:
    """The only kernel for these queries, whatever their number and that of the entries."""
    return _deep_gemm.keys.mqa_logits(q.shape[1], q.shape[2], _deep_gemm.num_sms())


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
    """Write every element of ``scores [T, entries]``; arguments as those of ``indexer_logits``."""
    num_entries = scores.shape[1]
    scores.fill_(-torch.inf)
    if 0 in scores.shape:
        return
    page_rows = _paged.page_rows(cache, _paged.INDEX_DIM)
    visible = torch.div(positions + 1, ratio, rounding_mode="floor").clamp(0, num_entries)
    entry = torch.arange(num_entries, device=q.device)
    rows_at_once = max(1, max_bytes // (_BYTES_PER_SCORE * _pitch(num_entries)))
    for first, codes, scales in _requests(cache, block_tables, max_bytes):
        tables = block_tables[first : first + len(codes) // num_entries]
        for rows in (slice(start, start + rows_at_once) for start in range(0, len(q), rows_at_once)):
            local = row_requests[rows] - first
            inside = (local >= 0) & (local < len(tables)) & (row_requests[rows] >= 0)
            local = torch.where(inside, local, 0)
            start = local * num_entries
            reach = torch.where(inside, visible[rows], 0)
            got = _deep_gemm.mqa_logits(
                q[rows].contiguous(), codes, scales, weights[rows].contiguous(), start.int(), (start + reach).int(),
                num_entries,
            )  # fmt: skip
            present = (tables >= 0).repeat_interleave(page_rows, 1)[local.long()]
            seen = present & (entry < reach.unsqueeze(1))
            scores[rows] = torch.where(seen, got, scores[rows])


def _pitch(num_entries: int) -> int:
    """Columns that DeepGEMM allocates for a row: whole blocks of 256."""
    return _deep_gemm.keys.align(num_entries, 256)


def _requests(
    cache: torch.Tensor, block_tables: torch.Tensor, max_bytes: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """First request, codes ``[entries, 128]`` and scales ``[entries]`` of each run; absent pages hold page 0."""
    page_rows = _paged.page_rows(cache, _paged.INDEX_DIM)
    data_bytes = page_rows * _paged.INDEX_DIM
    at_once = max(1, max_bytes // (block_tables.shape[1] * cache.shape[1]))
    for first in range(0, len(block_tables), at_once):
        pages = block_tables[first : first + at_once].clamp_min(0).flatten()
        codes = cache[:, :data_bytes].index_select(0, pages).view(torch.float8_e4m3fn)
        scales = cache[:, data_bytes:].index_select(0, pages).view(torch.float32)
        yield first, codes.view(-1, _paged.INDEX_DIM), scales.view(-1)
