"""Quantisation of register tiles, shared by every kernel that writes e4m3 activations or FP4 (inlined device code).

The largest magnitude is taken on bit patterns: for non-negative floats integer order is float order, and NaN is above
everything, so a NaN reaches the scale as it does in the reference. ``_device`` has a shorter way for numbers.
"""

import triton
import triton.language as tl

_AMAX_FLOOR_BITS = tl.constexpr(0x38D1B717)  # 1e-4
_FP8_MAX = tl.constexpr(448.0)


@triton.jit
def magnitude_bits(x):
    """Bit patterns (int32) of ``|x|``, fp32."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def block_scale(bits, floor: tl.constexpr, limit: tl.constexpr):
    """Smallest power of two ``>= amax / limit``: its biased exponent (int32), itself and its inverse. ``bits`` is the
    pattern of the largest magnitude, ``floor`` that of the least one to assume."""
    amax = tl.maximum(bits, floor).to(tl.float32, bitcast=True)
    ratio = tl.div_rn(amax, tl.full(amax.shape, limit, tl.float32)).to(tl.int32, bitcast=True)
    exponent = (ratio >> 23) + ((ratio & 0x7FFFFF) != 0).to(tl.int32)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    return exponent, scale, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def _codes(scaled):
    return tl.clamp(scaled, -_FP8_MAX, _FP8_MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def quantize_fp8_rows(x):
    """e4m3 codes ``[B, n]`` and power-of-two scales ``[B]`` of the rows of ``x [B, n]`` fp32; bitwise the reference.

    Multiplying by the reciprocal of a power of two is the division, exactly.
    """
    _, scale, inverse = block_scale(tl.max(magnitude_bits(x), axis=1), _AMAX_FLOOR_BITS, _FP8_MAX)
    return _codes(x * inverse[:, None]), scale


@triton.jit
def round_columns_to_fp8(x):
    """Columns of ``x [n, B]`` fp32 quantised in the same way, and their values again."""
    _, scale, inverse = block_scale(tl.max(magnitude_bits(x), axis=0), _AMAX_FLOOR_BITS, _FP8_MAX)
    return _codes(x * inverse[None, :]).to(tl.float32) * scale[None, :]
