"""The shared device functions against the formats, rotation and paging they must reproduce bit by bit."""

import pytest
import torch
import triton
import triton.language as tl

from dsv4.ops import _device, _formats, _paged, _rope

from . import interpreter

interpreter.repair()
CACHES = [
    (torch.float32, 128), (torch.bfloat16, 96), (torch.bfloat16, 512), (torch.uint8, 128), (torch.uint8, 512),
]  # fmt: skip


@triton.jit
def _apply(x_ptr, table_ptr, out_ptr, what: tl.constexpr, n: tl.constexpr, dim: tl.constexpr, width: tl.constexpr):
    row, column = tl.arange(0, n)[:, None], tl.arange(0, width)[None, :]
    x = tl.load(x_ptr + row * dim + column, mask=column < dim, other=0.0).to(tl.float32)
    if what == "fp8":
        x = _device.simulate_fp8(x, 64)
    elif what == "kv":
        x = _device.simulate_kv(x, dim - 32)
    elif what == "fp4":
        x = _device.simulate_fp4(x)
    elif what == "hadamard":
        stages: tl.constexpr = {32: 5, 64: 6, 128: 7, 512: 9}[width]
        x = _device.hadamard(x, stages) * dim**-0.5
    elif what == "rotate":
        x = _device.rotate(x, _device.angle_row(table_ptr, row, n, 32), dim, 32, False)
    else:
        x = _device.rotate(x, _device.angle_row(table_ptr, row, n, 32), dim, 32, True)
    tl.store(out_ptr + row * dim + column, x.to(out_ptr.dtype.element_ty), mask=column < dim)


def apply(x: torch.Tensor, what: str, table: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.full_like(x, float("nan"))
    n, dim = x.shape
    _apply[(1,)](x, x if table is None else table, out, what=what, n=n, dim=dim, width=_device.tile_width(dim))
    return out


def values(dim: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows of very different size, with ties, exact powers of two times the largest code, zeros of both signs."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(16, dim, generator=g) * torch.exp2(torch.randint(-40, 40, (16, 1), generator=g).float())
    x[3:7] = (torch.randint(-24, 25, (4, dim), generator=g) / 4).float()  # multiples of a quarter up to 6: FP4 ties
    x[7] = torch.where(torch.arange(dim) % 2 == 0, 0.0, -0.0)
    x[8:11, ::7] = torch.tensor([448.0, 6.0, 448.00003])[:, None]
    x[11] = 2.0**-130
    return x.to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [32, 64, 128, 512])
def test_formats(dim, dtype):
    x = values(dim, dtype, seed=dim)
    assert same_bits(apply(x, "fp8"), _formats.simulate_fp8(x, 64))
    assert same_bits(apply(x, "fp4"), _formats.simulate_fp4(x))
    assert same_bits(apply(x, "hadamard"), _formats.hadamard(x))


@pytest.mark.parametrize("dim", [64, 136, 512])
def test_rotation_and_kv(dim):
    x, g = values(dim, torch.float32, seed=dim), torch.Generator().manual_seed(1)
    angles = 7 * torch.rand(16, 16, generator=g)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    assert same_bits(apply(x, "rotate", table), _rope.rotate(x, table))
    assert same_bits(apply(x, "inverse", table), _rope.rotate(x, table, inverse=True))
    assert same_bits(apply(x, "kv"), _formats.simulate_kv(x, 32))


@triton.jit
def _copy(
    x_ptr, requests_ptr, index_ptr, table_ptr, cache_ptr, out_ptr, table_width,
    n: tl.constexpr, dim: tl.constexpr, width: tl.constexpr, page_rows: tl.constexpr,
):  # fmt: skip
    row, column = tl.arange(0, n)[:, None], tl.arange(0, width)[None, :]
    request, index = tl.load(requests_ptr + row), tl.load(index_ptr + row)
    page, offset, found = _device.find_row(table_ptr, table_width, request, index, True, page_rows)
    x = tl.load(x_ptr + row * dim + column, mask=column < dim, other=0.0)
    _device.store_rows(cache_ptr, page, offset, found, x, dim, page_rows)
    x = _device.load_rows(cache_ptr, page, offset, found, dim, width, page_rows)
    tl.store(out_ptr + row * dim + column, x, mask=column < dim)


@pytest.mark.parametrize(("dtype", "dim"), CACHES, ids=str)
@pytest.mark.parametrize("page_rows", [2, 64])
def test_paged_rows(dtype, dim, page_rows):
    x = values(dim, torch.float32, seed=dim).clamp(-1e4, 1e4)
    table = torch.tensor([[4, -1, 2], [0, 3, -1]], dtype=torch.int32)
    # ten distinct rows of the two requests, in absent and present pages; then what never exists
    order = torch.randperm(6 * page_rows, generator=torch.Generator().manual_seed(page_rows))[:10]
    requests = torch.cat((order // (3 * page_rows), torch.tensor([-1, -1, 0, 0, 1, 1]))).int()
    index = torch.cat((order % (3 * page_rows), torch.tensor([0, 1, -1, -page_rows, 3 * page_rows, 5 * page_rows - 1])))
    shape = (5, _paged.fp8_page_bytes(page_rows, dim)) if dtype == torch.uint8 else (5, page_rows, dim)
    cache = torch.randint(0, 100, shape, dtype=torch.uint8) if dtype == torch.uint8 else torch.randn(shape).to(dtype)
    flat = _paged.slots(table, requests, index, page_rows)
    assert (flat >= 0).sum() > 4 and (flat < 0).sum() > 6
    want, got = cache.clone(), cache.clone()
    _paged.write(want, flat, x)
    out = torch.full((16, dim), float("nan"), dtype=torch.bfloat16 if dtype == torch.uint8 else dtype)
    _copy[(1,)](
        x, requests, index, table, got, out, 3, n=16, dim=dim, width=_device.tile_width(dim), page_rows=page_rows
    )
    assert same_bits(got, want)
    assert same_bits(out, _paged.read(want, flat, dim))
