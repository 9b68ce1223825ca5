"""A small Triton kernel, and a stand-in for the CUDA driver under which Triton compiles for it without a device.

The stand-in only says which target to compile for; ``warmup`` goes through Triton's own launch path up to the point
where a binary would be loaded on a device. What needs a device is tested on one.
"""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGET = GPUTarget("cuda", 90, 32)


@triton.jit(do_not_specialize=["count"])
def scale_rows(x_ptr, count, WIDTH: tl.constexpr):
    offsets = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    values = tl.load(x_ptr + offsets, mask=offsets < count)
    tl.store(x_ptr + offsets, values * 2, mask=offsets < count)


class NoDevice:
    """What Triton asks of a driver before it has a binary."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGET


def compile_directly(width: int) -> Any:
    """``triton.compile`` without a launch."""
    signature = {"x_ptr": "*fp32", "count": "i32", "WIDTH": "constexpr"}
    return triton.compile(ASTSource(scale_rows, signature, constexprs={(2,): width}), target=TARGET)


def launch_up_to_the_device(width: int) -> Callable[..., Any]:
    """The launch path, without a device."""
    import torch

    return scale_rows.warmup(torch.float32, 5, WIDTH=width, grid=(1,))
