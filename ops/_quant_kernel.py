"""FP8 quantisation of register tiles, shared by every kernel that writes e4m3 activations (inlined device code)."""

import triton
import triton.language as tl

_AMAX_FLOOR_BITS = tl.constexpr(0x38D1B717)  # 1e-4
_FP8_MAX = tl.constexpr(448.0)


@triton.jit
def quantize_fp8_rows(x):
    """e4m3 codes ``[B, n]`` and power-of-two scales ``[B]`` of the rows of ``x [B, n]`` fp32; bitwise the reference.

    The largest magnitude is taken on bit patterns: for non-negative floats integer order is float order, and NaN is
    above everything, so a NaN reaches the scale as it does in the reference. Multiplying by the reciprocal of a power
    of two is the division, exactly.
    """
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax = tl.maximum(tl.max(bits, axis=1), _AMAX_FLOOR_BITS).to(tl.float32, bitcast=True)
    ratio = tl.div_rn(amax, tl.full(amax.shape, _FP8_MAX, tl.float32)).to(tl.int32, bitcast=True)
    exponent = (ratio >> 23) + ((ratio & 0x7FFFFF) != 0).to(tl.int32)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    scaled = tl.clamp(x * inverse[:, None], -_FP8_MAX, _FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return scaled.to(tl.float8e4nv), scale
