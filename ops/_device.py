"""Device functions that kernels share: rounding, RoPE, FP8 and FP4 blocks, the Hadamard rotation, rows of paged caches.

Tiles are fp32 ``[n, width]`` with ``width = tile_width(dim)``; columns from ``dim`` on are zero. Everything is a
function of the row alone, and rounds where ``_formats``, ``_rope`` and ``_paged`` round. ``page``, ``row`` and ``keep``
of a cache row are ``[n, 1]``, or scalars for a tile of one row.
"""

import torch
import triton
import triton.language as tl

from . import _formats, _paged

FP8_MAX = tl.constexpr(_formats.FP8_MAX)
FP8_FLOOR = tl.constexpr(_formats.FP8_AMAX_FLOOR)
FP4_MAX = tl.constexpr(_formats.FP4_MAX)
FP4_FLOOR = tl.constexpr(_formats.FP4_AMAX_FLOOR)
FP4_BLOCK = tl.constexpr(_formats.FP4_BLOCK)
KV_BLOCK = tl.constexpr(_formats.KV_BLOCK)
HEAD_DIM = tl.constexpr(_paged.HEAD_DIM)
NOPE_DIM = tl.constexpr(_paged.NOPE_DIM)
HEAD_DATA = tl.constexpr(_paged.HEAD_DATA_BYTES)
HEAD_SCALE = tl.constexpr(_paged.HEAD_SCALE_BYTES)
HEAD_ROW = tl.constexpr(_paged.HEAD_ROW_BYTES)
INDEX_DIM = tl.constexpr(_paged.INDEX_DIM)
INDEX_ROW = tl.constexpr(_paged.INDEX_ROW_BYTES)


def tile_width(dim: int) -> int:
    """Columns of the tile that holds vectors of ``dim``; the pairs of a rotation must not straddle its halves."""
    if dim % 2:
        raise NotImplementedError(f"CUDA kernels need vectors of an even number of dimensions, got {dim}")
    return max(16, triton.next_power_of_2(dim))


def in_place(op: str, buffer: torch.Tensor) -> torch.Tensor:
    """``buffer`` itself, which a kernel changes in place and therefore needs contiguous."""
    if not buffer.is_contiguous():
        raise ValueError(f"{op} buffers that are written must be contiguous, got strides {list(buffer.stride())}")
    return buffer


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """``x`` rounded to ``dtype``, as fp32."""
    return x.to(dtype).to(tl.float32)


@triton.jit
def reciprocal_root(x):
    """``1 / sqrt(x)`` with correctly rounded steps: the same bits as the reference on the CPU."""
    return tl.div_rn(tl.zeros_like(x) + 1.0, tl.sqrt_rn(x))


@triton.jit
def rms_normalize(x, weight, eps, dim: tl.constexpr):
    """``x * rsqrt(mean(x^2) + eps) * weight`` per row; ``weight`` fp32, broadcastable, zero from ``dim`` on."""
    mean = tl.sum(x * x, axis=1) / dim
    return x * reciprocal_root(mean + eps)[:, None] * weight


@triton.jit
def angle_row(table_ptr, position, num_positions, rope_dim: tl.constexpr):
    """Pointer to the RoPE table row of ``position``, clamped to the table."""
    row = tl.minimum(tl.maximum(position, 0), num_positions - 1).to(tl.int64)
    return table_ptr + row * rope_dim


@triton.jit
def rotate(x, angles, dim: tl.constexpr, rope_dim: tl.constexpr, inverse: tl.constexpr):
    """Interleaved RoPE on columns ``dim - rope_dim … dim - 1``; the others are copied. Does not round.

    ``angles``: what :func:`angle_row` returns, a scalar for all rows or ``[n, 1]``.
    """
    rows: tl.constexpr = x.shape[0]
    width: tl.constexpr = x.shape[1]
    pair = tl.arange(0, width // 2)[None, :] - (dim - rope_dim) // 2
    inside = (pair >= 0) & (pair < rope_dim // 2)
    cos = tl.load(angles + pair, mask=inside, other=1.0)
    sin = tl.load(angles + rope_dim // 2 + pair, mask=inside, other=0.0)
    if inverse:
        sin = -sin
    even, odd = tl.split(tl.reshape(x, [rows, width // 2, 2]))
    first = tl.where(inside, even * cos - odd * sin, even)
    second = tl.where(inside, even * sin + odd * cos, odd)
    return tl.reshape(tl.join(first, second), [rows, width])


@triton.jit
def scale_exponent(amax, limit: tl.constexpr):
    """Biased exponent (int32) of the smallest power of two ``>= fp32(amax / limit)``, for a quotient that is normal.

    With ``amax = m * 2^e`` and ``limit = c * 2^k``, m and c in [1, 2), that is ``2^(e-k)`` if ``m <= c`` and else
    ``2^(e-k+1)``. The rounding of the quotient changes nothing for the two limits in use: the next m above c gives
    ``1 + 2^-23 / c``, which rounds away from 1 because ``c < 2``.
    """
    tl.static_assert(limit == 448.0 or limit == 6.0)
    shift: tl.constexpr = 8 if limit == 448.0 else 2
    fraction: tl.constexpr = 0x600000 if limit == 448.0 else 0x400000  # of 1.75 and 1.5
    bits = amax.to(tl.int32, bitcast=True)
    return (bits >> 23) - shift + ((bits & 0x7FFFFF) > fraction).to(tl.int32)


@triton.jit
def power_of_two(exponent):
    """fp32 ``2^(exponent - 127)`` of biased exponents 1…254."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def decode_e8m0(code):
    """fp32 ``2^(code - 127)`` of int32 E8M0 codes; 255 gives NaN."""
    bits = tl.where(code == 0, 1 << 22, code << 23)
    return tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def quantize_fp8(x, block: tl.constexpr):
    """e4m3 codes ``[n, width]`` and biased exponents ``[n, width / block]`` of the power-of-two scales."""
    rows: tl.constexpr = x.shape[0]
    width: tl.constexpr = x.shape[1]
    size: tl.constexpr = min(block, width)
    groups = tl.reshape(x, [rows, width // size, size])
    amax = tl.maximum(tl.max(tl.abs(groups), axis=2), FP8_FLOOR)
    exponent = scale_exponent(amax, FP8_MAX)
    scaled = groups * power_of_two(254 - exponent)[:, :, None]  # the reciprocal of a power of two is exact
    codes = tl.minimum(tl.maximum(scaled, -FP8_MAX), FP8_MAX).to(tl.float8e4nv)
    return tl.reshape(codes, [rows, width]), exponent


@triton.jit
def simulate_fp8(x, block: tl.constexpr):
    """``x`` rounded to FP8 blocks and back; exact in bf16."""
    rows: tl.constexpr = x.shape[0]
    width: tl.constexpr = x.shape[1]
    size: tl.constexpr = min(block, width)
    codes, exponent = quantize_fp8(x, block)
    groups = tl.reshape(codes.to(tl.float32), [rows, width // size, size])
    return tl.reshape(groups * power_of_two(exponent)[:, :, None], [rows, width])


@triton.jit
def simulate_kv(x, nope_dim: tl.constexpr):
    """``x`` with its first ``nope_dim`` columns rounded to FP8 blocks of 64 (the last may be shorter) and back."""
    nope = tl.arange(0, x.shape[1])[None, :] < nope_dim
    return tl.where(nope, simulate_fp8(tl.where(nope, x, 0.0), KV_BLOCK), x)


@triton.jit
def simulate_fp4(x):
    """``x`` rounded to FP4 (e2m1) blocks of 32 and back; exact in bf16."""
    rows: tl.constexpr = x.shape[0]
    width: tl.constexpr = x.shape[1]
    groups = tl.reshape(x, [rows, width // FP4_BLOCK, FP4_BLOCK])
    amax = tl.maximum(tl.max(tl.abs(groups), axis=2), FP4_FLOOR)
    exponent = scale_exponent(amax, FP4_MAX)
    scaled = groups * power_of_two(254 - exponent)[:, :, None]
    size = tl.minimum(tl.abs(scaled), FP4_MAX)
    # steps between 0, 0.5, 1, 1.5, 2, 3, 4, 6 at their midpoints, ties to the even code
    low = tl.where(size > 0.25, 0.5, 0.0) + tl.where(size >= 0.75, 0.5, 0.0)
    middle = tl.where(size > 1.25, 0.5, 0.0) + tl.where(size >= 1.75, 0.5, 0.0)
    high = tl.where(size > 2.5, 1.0, 0.0) + tl.where(size >= 3.5, 1.0, 0.0) + tl.where(size > 5.0, 2.0, 0.0)
    sign = scaled.to(tl.int32, bitcast=True) & -0x80000000  # a negative zero stays negative
    value = ((low + middle + high).to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return tl.reshape(value * power_of_two(exponent)[:, :, None], [rows, width])


@triton.jit
def hadamard(x, stages: tl.constexpr):
    """Hadamard transform of rows of ``2^stages`` columns, without the factor ``2^(-stages / 2)``.

    Every stage adds and subtracts neighbours and puts sums before differences, which moves the lowest index bit to the
    top. Stage k therefore pairs bit k of the original index, as the reference does (same sums, same bits), and after
    all stages the columns are in their original order.
    """
    rows: tl.constexpr = x.shape[0]
    width: tl.constexpr = x.shape[1]
    tl.static_assert(width == 2**stages)
    for _ in tl.static_range(stages):
        even, odd = tl.split(tl.reshape(x, [rows, width // 2, 2]))
        x = tl.reshape(tl.permute(tl.join(even + odd, even - odd), (0, 2, 1)), [rows, width])
    return x


@triton.jit
def find_row(table_ptr, table_width, request, index, keep, page_rows: tl.constexpr):
    """Where entry or position ``index`` of ``request`` lies: (page int64, row within it, whether it exists).

    ``table_ptr``: ``[requests, table_width]`` int32. Negative requests and indices, indices beyond the table and
    absent pages (−1) do not exist; nothing is read for them, nor where ``keep`` is false.
    """
    page = index // page_rows
    keep = keep & (index >= 0) & (page < table_width) & (request >= 0)
    physical = tl.load(table_ptr + request.to(tl.int64) * table_width + page, mask=keep, other=-1).to(tl.int64)
    return physical, index % page_rows, keep & (physical >= 0)


@triton.jit
def store_rows(cache_ptr, page, row, keep, x, dim: tl.constexpr, page_rows: tl.constexpr):
    """Write the rows of ``x``; a uint8 cache takes the FP8 layout of ``dim``, any other is dense."""
    column = tl.arange(0, x.shape[1])[None, :]
    if cache_ptr.dtype.element_ty != tl.uint8:
        target = cache_ptr + (page * page_rows + row).to(tl.int64) * dim + column
        tl.store(target, x.to(cache_ptr.dtype.element_ty), mask=keep & (column < dim))
    elif dim == INDEX_DIM:
        codes, exponent = quantize_fp8(x, INDEX_DIM)
        base = cache_ptr + page.to(tl.int64) * (page_rows * INDEX_ROW)
        tl.store(base + row * INDEX_DIM + column, codes.to(tl.uint8, bitcast=True), mask=keep & (column < dim))
        scale = (base + page_rows * INDEX_DIM).to(tl.pointer_type(tl.float32)) + row
        tl.store(scale + tl.arange(0, 1)[None, :], power_of_two(exponent), mask=keep)
    else:
        tl.static_assert(dim == HEAD_DIM)
        nope = column < NOPE_DIM
        codes, exponent = quantize_fp8(tl.where(nope, x, 0.0), KV_BLOCK)
        base = cache_ptr + page.to(tl.int64) * head_page_bytes(page_rows)
        data = base + row * HEAD_DATA
        tl.store(data + column, codes.to(tl.uint8, bitcast=True), mask=keep & nope)
        tail = (data + NOPE_DIM).to(tl.pointer_type(tl.bfloat16)) + (column - NOPE_DIM)
        tl.store(tail, x.to(tl.bfloat16), mask=keep & ~nope)
        block = tl.arange(0, HEAD_SCALE)[None, :]
        scales = tl.where(block < NOPE_DIM // KV_BLOCK, exponent, 0).to(tl.uint8)  # the last byte is padding
        tl.store(base + page_rows * HEAD_DATA + row * HEAD_SCALE + block, scales, mask=keep)


@triton.jit
def load_rows(cache_ptr, page, row, keep, dim: tl.constexpr, width: tl.constexpr, page_rows: tl.constexpr):
    """Rows ``[n, width]``, zero where ``keep`` is false: fp32 from an fp32 cache, else bf16 (exact for FP8)."""
    column = tl.arange(0, width)[None, :]
    if cache_ptr.dtype.element_ty != tl.uint8:
        source = cache_ptr + (page * page_rows + row).to(tl.int64) * dim + column
        return tl.load(source, mask=keep & (column < dim), other=0.0)
    elif dim == INDEX_DIM:
        base = cache_ptr + page.to(tl.int64) * (page_rows * INDEX_ROW)
        codes = tl.load(base + row * INDEX_DIM + column, mask=keep & (column < dim), other=0)
        scale = (base + page_rows * INDEX_DIM).to(tl.pointer_type(tl.float32)) + row
        factor = tl.load(scale + tl.arange(0, 1)[None, :], mask=keep, other=0.0)
        return (codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * factor).to(tl.bfloat16)
    else:
        tl.static_assert(dim == HEAD_DIM)
        nope = column < NOPE_DIM
        base = cache_ptr + page.to(tl.int64) * head_page_bytes(page_rows)
        data = base + row * HEAD_DATA
        codes = tl.load(data + column, mask=keep & nope, other=0)
        code = tl.load(base + page_rows * HEAD_DATA + row * HEAD_SCALE + column // KV_BLOCK, mask=keep & nope, other=0)
        value = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * decode_e8m0(code.to(tl.int32))
        tail = (data + NOPE_DIM).to(tl.pointer_type(tl.bfloat16)) + (column - NOPE_DIM)
        return tl.where(nope, value.to(tl.bfloat16), tl.load(tail, mask=keep & ~nope, other=0.0))


@triton.jit
def head_page_bytes(page_rows: tl.constexpr):
    """Bytes of an FP8 page of ``page_rows`` head vectors: whole multiples of a row's data."""
    return (page_rows * HEAD_ROW + HEAD_DATA - 1) // HEAD_DATA * HEAD_DATA
