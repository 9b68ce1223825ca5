"""Scatter of received rows to their sources, for a group of one rank."""

import torch
import triton
import triton.language as tl

from ._triton import launch

_COLUMNS = 1024


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["source_ptr"])
def _scatter(y_ptr, source_ptr, count_ptr, out_ptr, rows, width: tl.constexpr, block: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64)
    if slot >= tl.load(count_ptr):
        return
    row = tl.load(source_ptr + slot)
    if (row < 0) | (row >= rows):
        return
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    tl.store(out_ptr + row * width + column, tl.load(y_ptr + slot * width + column, mask=inside), mask=inside)


def key(width: int) -> tuple[str | int, ...]:
    """What the launch is specialised on."""
    return ("ep_combine", width)


def run(y: torch.Tensor, recv_source: torch.Tensor, recv_count: torch.Tensor, out: torch.Tensor) -> None:
    """Write row ``recv_source[i]`` of ``out`` (zeroed by the caller) from row i of ``y``, for i below the count."""
    width = y.shape[1]
    block = min(triton.next_power_of_2(width), _COLUMNS)
    launch(
        key(width), _scatter, (min(y.shape[0], recv_source.shape[0]), triton.cdiv(width, block)),
        y.contiguous(), recv_source.contiguous(), recv_count, out, out.shape[0],
        width=width, block=block, num_warps=4,
    )  # fmt: skip
