"""FP4 quantisation in 1 x 32 blocks, packed two codes to a byte; a program takes 64 neighbouring blocks of any rows."""

import torch
import triton
import triton.language as tl

from ._aligned import aligned
from ._quant_kernel import block_scale, magnitude_bits
from ._triton import dtype_key, launch

_GROUP = 32
_GROUPS = 64
_AMAX_FLOOR_BITS = tl.constexpr(0x01C00000)  # 6 * 2^-126


@triton.jit(do_not_specialize=["total"])
def _quant_fp4(x_ptr, packed_ptr, scale_ptr, total, groups: tl.constexpr, group: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * groups
    row = tl.arange(0, groups)
    inside = row < total - first
    offset = row[:, None] * group + tl.arange(0, group)[None, :]
    x = tl.load(x_ptr + first * group + offset, mask=inside[:, None], other=0.0).to(tl.float32)
    exponent, _, inverse = block_scale(tl.max(magnitude_bits(x), axis=1), _AMAX_FLOOR_BITS, 6.0)
    size = tl.abs(x * inverse[:, None])
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    code += ((x.to(tl.int32, bitcast=True) >> 31) & 1) * 8
    low, high = tl.split(tl.reshape(code, (groups, group // 2, 2)))
    target = row[:, None] * (group // 2) + tl.arange(0, group // 2)[None, :]
    packed = (low | (high << 4)).to(tl.uint8)
    tl.store(packed_ptr + first * (group // 2) + target, packed, mask=inside[:, None])
    tl.store(scale_ptr + first + row, exponent.to(tl.uint8), mask=inside)


def key(x: torch.Tensor) -> tuple[str | int, ...]:
    """What the launch for ``x`` is specialised on."""
    return ("quant_fp4", *dtype_key(x))


def run(x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor) -> None:
    """Write packed codes ``[..., size / 2]`` and E8M0 bytes ``[..., size / 32]`` of ``x [..., size]``."""
    total = scale.numel()
    launch(
        key(x), _quant_fp4, (triton.cdiv(total, _GROUPS),), aligned(x), packed, scale, total,
        groups=_GROUPS, group=_GROUP, num_warps=4,
    )  # fmt: skip
