import numpy as np
import pytest
import torch
from safetensors import safe_open

from dsv4.ops import _paged

from . import number_formats as nf


@pytest.mark.parametrize("rows_per_page", [1, 2, 64])
def test_slots_match_a_loop(rows_per_page):
    rng = np.random.default_rng(rows_per_page)
    table = rng.integers(-1, 9, size=(4, 5))
    requests = rng.integers(-1, 4, size=70)
    index = rng.integers(-3, 5 * rows_per_page + 4, size=(70, 3))
    want = np.full(index.shape, -1)
    for t, request in enumerate(requests):
        for j, i in enumerate(index[t]):
            if request >= 0 and 0 <= i < 5 * rows_per_page and table[request, i // rows_per_page] >= 0:
                want[t, j] = table[request, i // rows_per_page] * rows_per_page + i % rows_per_page
    for dtype in (torch.int32, torch.int64):
        args = (torch.tensor(a, dtype=dtype) for a in (table, requests[:, None], index))
        np.testing.assert_array_equal(_paged.slots(*args, rows_per_page).numpy(), want)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_slots_of_an_empty_table(shape):
    table = torch.empty(shape, dtype=torch.int32)
    got = _paged.slots(table, torch.tensor([[0], [-1]]), torch.tensor([[0, 5], [1, 2]]), 2)
    assert torch.equal(got, torch.full((2, 2), -1))


def test_head_page_bytes_hold_the_rows_and_are_aligned():
    for rows in range(1, 300):
        size = _paged.fp8_page_bytes(rows, 512)
        assert size % 576 == 0 and 0 <= size - 584 * rows < 576
        assert _paged.page_rows(torch.empty(1, size, dtype=torch.uint8), 512) == rows
        size = _paged.fp8_page_bytes(rows, 128)
        assert size == 132 * rows
        assert _paged.page_rows(torch.empty(1, size, dtype=torch.uint8), 128) == rows
    with pytest.raises(ValueError, match="FP8 cache rows must have 512 or 128 dimensions, got 64"):
        _paged.fp8_page_bytes(2, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dense_write_and_read(dtype):
    cache = torch.randn(6, 5, 24).to(dtype)
    before = cache.clone()
    flat = torch.tensor([29, -1, 0, 13])
    values = torch.randn(4, 24)
    _paged.write(cache, flat, values)
    expected = before.view(30, 24).clone()
    expected[[29, 0, 13]] = values[[0, 2, 3]].to(dtype)
    assert torch.equal(cache.view(30, 24), expected)
    got = _paged.read(cache, torch.tensor([[13, -1], [4, 29]]), 24)
    assert got.dtype == dtype
    assert torch.equal(got[0, 0], expected[13]) and torch.equal(got[1], expected[[4, 29]])
    assert torch.equal(got[0, 1], torch.zeros(24, dtype=dtype))


def _write_head_row(page: np.ndarray, rows: int, row: int, value: np.ndarray) -> None:
    """The documented head layout: data of all rows (448 e4m3, 64 bf16), then 8 scale bytes per row."""
    codes, scale = nf.quantize(value[:448], 64, "fp8")
    page[row * 576 : row * 576 + 448] = codes
    page[row * 576 + 448 : (row + 1) * 576] = nf.bf16_bits(value[448:]).astype("<u2").view(np.uint8)
    start = rows * 576 + row * 8
    page[start : start + 7] = np.log2(scale).astype(int) + 127
    page[start + 7] = 0


def _read_head_row(page: np.ndarray, rows: int, row: int) -> np.ndarray:
    scale = 2.0 ** (page[rows * 576 + row * 8 : rows * 576 + row * 8 + 7].astype(float) - 127)
    nope = nf.e4m3_table()[page[row * 576 : row * 576 + 448]] * scale.repeat(64)
    rope = nf.bf16_values(page[row * 576 + 448 : (row + 1) * 576].view("<u2"))
    return np.concatenate((nope, rope))


def _write_index_row(page: np.ndarray, rows: int, row: int, value: np.ndarray) -> None:
    """The documented indexer layout: 128 e4m3 of all rows, then one fp32 scale per row."""
    codes, scale = nf.quantize(value, 128, "fp8")
    page[row * 128 : (row + 1) * 128] = codes
    page[rows * 128 + row * 4 : rows * 128 + row * 4 + 4] = scale.astype("<f4").view(np.uint8)


def _read_index_row(page: np.ndarray, rows: int, row: int) -> np.ndarray:
    scale = page[rows * 128 + row * 4 : rows * 128 + row * 4 + 4].view("<f4")
    return nf.e4m3_table()[page[row * 128 : (row + 1) * 128]] * scale


LAYOUTS = {512: (_write_head_row, _read_head_row), 128: (_write_index_row, _read_index_row)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [2, 64, 128])
@pytest.mark.parametrize("dim", [512, 128])
def test_fp8_pages_byte_by_byte(dim, rows, dtype):
    """Written rows have the documented bytes, every other byte keeps its poison, and reading decodes the bytes."""
    encode, decode = LAYOUTS[dim]
    rng = np.random.default_rng(dim + rows)
    pages = rng.integers(0, 256, size=(3, _paged.fp8_page_bytes(rows, dim)), dtype=np.uint8)
    flat = rng.permutation(3 * rows)[: min(2 * rows, 30)]
    flat[1] = -1
    values = torch.from_numpy(nf.wide(rng, len(flat), dim)).to(dtype)
    cache = torch.from_numpy(pages.copy())
    _paged.write(cache, torch.from_numpy(flat), values)
    for row, value in zip(flat, values.float().numpy(), strict=True):
        if row >= 0:
            encode(pages[row // rows], rows, row % rows, value)
    np.testing.assert_array_equal(cache.numpy(), pages)
    got = _paged.read(cache, torch.from_numpy(flat).view(-1, 1), dim)
    assert got.dtype == torch.bfloat16 and got.shape == (len(flat), 1, dim)
    for row, value in zip(flat, got[:, 0].float().numpy(), strict=True):
        want = decode(pages[row // rows], rows, row % rows) if row >= 0 else np.zeros(dim)
        np.testing.assert_array_equal(value, want)


@pytest.mark.parametrize("dim", [512, 128])
def test_fp8_pages_decode_every_code(dim):
    decode = LAYOUTS[dim][1]
    rng = np.random.default_rng(dim)
    rows = 64
    pages = rng.integers(0, 256, size=(2, _paged.fp8_page_bytes(rows, dim)), dtype=np.uint8)
    if dim == 512:
        pages[:, rows * 576 :] = rng.integers(90, 150, size=pages[:, rows * 576 :].shape)
        rope = pages[:, : rows * 576].reshape(2, rows, 576)[..., 448:]
        rope[..., 1::2] = rng.integers(60, 66, size=rope[..., 1::2].shape)  # exponent byte: finite bf16
    else:
        scale = 2.0 ** rng.integers(-20, 20, size=(2, rows))
        pages[:, rows * 128 :] = scale.astype("<f4").view(np.uint8).reshape(2, -1)
    got = _paged.read(torch.from_numpy(pages), torch.arange(2 * rows), dim).float().numpy()
    for i in range(2 * rows):
        np.testing.assert_array_equal(got[i], decode(pages[i // rows], rows, i % rows))
    assert np.isnan(got).any()  # the NaN codes were among them


@pytest.mark.parametrize("dim", [512, 128])
def test_fp8_pages_nothing_to_write(dim):
    cache = torch.randint(0, 256, (2, _paged.fp8_page_bytes(2, dim)), dtype=torch.uint8)
    before = cache.clone()
    _paged.write(cache, torch.tensor([-1, -1]), torch.randn(2, dim))
    _paged.write(cache, torch.empty(0, dtype=torch.long), torch.randn(0, dim))
    assert torch.equal(cache, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_read_of_a_cache_without_pages(dtype):
    cache = torch.empty(0, 1728, dtype=dtype) if dtype == torch.uint8 else torch.empty(0, 2, 512, dtype=dtype)
    got = _paged.read(cache, torch.full((3, 4), -1), 512)
    assert got.dtype == (torch.bfloat16 if dtype == torch.uint8 else dtype)
    assert torch.equal(got, torch.zeros(3, 4, 512, dtype=got.dtype))


@pytest.mark.parametrize("layer", [2, 3])
def test_recorded_compressed_kv_survives_a_page(layer):
    with safe_open(nf.GOLDEN / "layers_official.safetensors", "pt") as recorded:
        value = recorded.get_tensor(f"p140.layer{layer}.attn.compressed_kv")
    cache = torch.randint(0, 256, (3, _paged.fp8_page_bytes(64, 512)), dtype=torch.uint8)
    flat = torch.randperm(3 * 64)[: len(value)]
    _paged.write(cache, flat, value)
    assert torch.equal(_paged.read(cache, flat, 512), value)
