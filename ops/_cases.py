"""What the ``cuda_cases`` of several ops share: cache formats that a bf16 model can have, and caches to warm with."""

import torch

from . import _paged

DENSE = (torch.bfloat16, torch.float32)


def cache_formats(dim: int) -> tuple[tuple[bool, torch.dtype], ...]:
    """(quantised numerics, cache dtype) of caches of rows of ``dim``; FP8 only where the row has an FP8 layout."""
    fp8 = (torch.uint8,) if dim in (_paged.HEAD_DIM, _paged.INDEX_DIM) else ()
    return (*((True, dtype) for dtype in (*DENSE, *fp8)), *((False, dtype) for dtype in DENSE))


def empty_cache(num_pages: int, page_rows: int, dim: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A zeroed paged cache in the layout of ``dtype`` (docs/ops.md)."""
    if dtype == torch.uint8:
        return torch.zeros(num_pages, _paged.fp8_page_bytes(page_rows, dim), dtype=dtype, device=device)
    return torch.zeros(num_pages, page_rows, dim, dtype=dtype, device=device)
