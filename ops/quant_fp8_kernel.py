"""FP8 quantisation in 1 x 128 blocks: a program quantises sixteen neighbouring blocks, wherever their rows end.

Input and output are flat arrays of blocks when a row is a whole number of blocks, so few rows still fill the machine.
"""

import torch
import triton
import triton.language as tl

from ._aligned import aligned
from ._quant_kernel import quantize_fp8_rows
from ._triton import dtype_key, launch

_GROUP = 128
_GROUPS = 16  # blocks per program: 4 KiB of bf16


@triton.jit(do_not_specialize=["total", "size"])
def _quant_fp8(
    x_ptr, codes_ptr, scale_ptr, total, size, whole: tl.constexpr, groups: tl.constexpr, group: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * groups
    inside = tl.arange(0, groups) < total - first
    column = tl.arange(0, group)[None, :]
    if whole:
        offset = first * group + tl.arange(0, groups)[:, None] * group + column
        mask = inside[:, None] & (column < group)
    else:
        block = first + tl.arange(0, groups)
        blocks = (size + group - 1) // group
        start = block % blocks * group
        offset = (block // blocks * size + start)[:, None] + column
        mask = inside[:, None] & (start[:, None] + column < size)
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    codes, scale = quantize_fp8_rows(x)
    tl.store(codes_ptr + offset, codes, mask=mask)
    tl.store(scale_ptr + first + tl.arange(0, groups), scale, mask=inside)


def key(x: torch.Tensor) -> tuple[str | int, ...]:
    """What the launch for ``x`` is specialised on."""
    return ("quant_fp8", int(x.shape[-1] % _GROUP == 0), *dtype_key(x))


def run(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> None:
    """Write e4m3 codes ``[..., size]`` and fp32 scales ``[..., ceil(size / 128)]`` of ``x [..., size]``."""
    total = scale.numel()
    launch(
        key(x), _quant_fp8, (triton.cdiv(total, _GROUPS),), aligned(x), codes, scale, total, x.shape[-1],
        whole=x.shape[-1] % _GROUP == 0, groups=_GROUPS, group=_GROUP, num_warps=4,
    )  # fmt: skip
