"""Paged caches: where a row lies, and how rows are stored (fp32, bf16, or the FP8 layouts of docs/ops.md).

The FP8 head layout is FlashMLA's "MODEL1" (448 e4m3 + 64 bf16 + 7 E8M0 scales per token, scales after the data of a
page, page stride a multiple of 576 bytes); the FP8 indexer layout is DeepGEMM's (128 e4m3 per entry, then fp32
scales).
"""

import torch

from . import _formats

HEAD_DIM, ROPE_DIM, NOPE_DIM = 512, 64, 448
HEAD_DATA_BYTES, HEAD_SCALE_BYTES = NOPE_DIM + 2 * ROPE_DIM, 8
HEAD_ROW_BYTES = HEAD_DATA_BYTES + HEAD_SCALE_BYTES
INDEX_DIM, INDEX_ROW_BYTES = 128, 132


def fp8_page_bytes(page_rows: int, dim: int) -> int:
    """Bytes of one FP8 page of ``page_rows`` rows of ``dim`` (512: head vectors, 128: indexer vectors)."""
    if dim == INDEX_DIM:
        return page_rows * INDEX_ROW_BYTES
    if dim != HEAD_DIM:
        raise ValueError(f"FP8 cache rows must have {HEAD_DIM} or {INDEX_DIM} dimensions, got {dim}")
    return -(-page_rows * HEAD_ROW_BYTES // HEAD_DATA_BYTES) * HEAD_DATA_BYTES


def check(op: str, cache: torch.Tensor, dim: int) -> None:
    """Raise unless ``cache`` stores rows of ``dim``: fp32 or bf16 ``[pages, rows, dim]``, uint8 ``[pages, bytes]``."""
    if cache.dtype == torch.uint8:
        if dim not in (HEAD_DIM, INDEX_DIM):
            raise ValueError(f"{op} rows of an FP8 cache must have {HEAD_DIM} or {INDEX_DIM} dimensions, got {dim}")
        rows = page_rows(cache, dim) if cache.dim() == 2 else 0
        if rows < 1 or cache.shape[1] != fp8_page_bytes(rows, dim):
            raise ValueError(f"{op} FP8 cache must be [pages, page bytes of whole rows], got {list(cache.shape)}")
    elif cache.dtype not in (torch.float32, torch.bfloat16):
        raise NotImplementedError(f"{op} cache must be float32, bfloat16 or uint8 (FP8), got {cache.dtype}")
    elif cache.dim() != 3 or cache.shape[2] != dim:
        raise ValueError(f"{op} cache must be [pages, rows, {dim}], got {list(cache.shape)}")


def page_rows(cache: torch.Tensor, dim: int) -> int:
    """Rows per page of a dense ``[pages, rows, dim]`` or FP8 ``[pages, bytes]`` cache."""
    if cache.dtype != torch.uint8:
        return cache.shape[1]
    return cache.shape[1] // (INDEX_ROW_BYTES if dim == INDEX_DIM else HEAD_ROW_BYTES)


def slots(table: torch.Tensor, requests: torch.Tensor, index: torch.Tensor, rows_per_page: int) -> torch.Tensor:
    """Flat cache rows of ``index`` (entry or position numbers) of ``requests``; −1 where there is none.

    Args:
        table: ``[R, pages]`` physical pages, −1 = absent.
        requests: request numbers, broadcastable with ``index``; negative = pad.
        index: row numbers within the request; negative or beyond the table = none.
    """
    page = torch.div(index, rows_per_page, rounding_mode="floor")
    inside = (index >= 0) & (page < table.shape[1]) & (requests >= 0)
    if table.shape[0] == 0 or table.shape[1] == 0:
        return torch.full(torch.broadcast_shapes(index.shape, requests.shape), -1, device=index.device)
    physical = table[requests.clamp_min(0).long(), page.clamp(0, table.shape[1] - 1).long()].long()
    found = physical * rows_per_page + index % rows_per_page
    return torch.where(inside & (physical >= 0), found, -1)


def read(cache: torch.Tensor, flat: torch.Tensor, dim: int) -> torch.Tensor:
    """Rows ``[*flat.shape, dim]`` of a cache; zeros where ``flat`` is −1. FP8 rows come back as bf16 (exact)."""
    rows = page_rows(cache, dim)
    safe = flat.clamp_min(0)
    if cache.shape[0] == 0:
        return torch.zeros(
            *flat.shape, dim, dtype=torch.bfloat16 if cache.dtype == torch.uint8 else cache.dtype, device=cache.device
        )
    if cache.dtype != torch.uint8:
        value = cache[safe // rows, safe % rows]
    elif dim == INDEX_DIM:
        codes, scale = _index_views(cache, rows)
        page, row = safe // rows, safe % rows
        value = (codes[page, row].float() * scale[page, row].unsqueeze(-1)).bfloat16()
    else:
        data, scale = _head_views(cache, rows)
        page, row = safe // rows, safe % rows
        data, scale = data[page, row], _formats.decode_e8m0(scale[page, row][..., :7].contiguous())
        nope = _formats.dequantize_fp8(
            data[..., :NOPE_DIM].contiguous().view(torch.float8_e4m3fn), scale, _formats.KV_BLOCK
        )
        value = torch.cat((nope.bfloat16(), data[..., NOPE_DIM:].contiguous().view(torch.bfloat16)), dim=-1)
    return torch.where((flat >= 0).unsqueeze(-1), value, value.new_zeros(()))


def write(cache: torch.Tensor, flat: torch.Tensor, values: torch.Tensor) -> None:
    """Store ``values [n, dim]`` at rows ``flat [n]``; rows with ``flat`` −1 are dropped."""
    keep = flat >= 0
    flat, values = flat[keep], values[keep]
    dim = values.shape[-1]
    rows = page_rows(cache, dim)
    page, row = flat // rows, flat % rows
    if cache.dtype != torch.uint8:
        cache[page, row] = values.to(cache.dtype)
    elif dim == INDEX_DIM:
        codes, scale = _index_views(cache, rows)
        quantized, factor = _formats.quantize_fp8(values, INDEX_DIM)
        codes.view(torch.uint8)[page, row] = quantized.view(torch.uint8)
        scale[page, row] = factor.squeeze(-1)
    else:
        data, scale = _head_views(cache, rows)
        quantized, factor = _formats.quantize_fp8(values[:, :NOPE_DIM], _formats.KV_BLOCK)
        rope = values[:, NOPE_DIM:].bfloat16().contiguous().view(torch.uint8)
        data[page, row] = torch.cat((quantized.view(torch.uint8), rope), dim=-1)
        scale[page, row] = torch.nn.functional.pad(_formats.encode_e8m0(factor), (0, 1))


def _head_views(cache: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    data_end = rows * HEAD_DATA_BYTES
    data = cache[:, :data_end].unflatten(1, (rows, HEAD_DATA_BYTES))
    return data, cache[:, data_end : data_end + rows * HEAD_SCALE_BYTES].unflatten(1, (rows, HEAD_SCALE_BYTES))


def _index_views(cache: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    data_end = rows * INDEX_DIM
    codes = cache[:, :data_end].unflatten(1, (rows, INDEX_DIM)).view(torch.float8_e4m3fn)
    return codes, cache[:, data_end:].view(torch.float32)
