"""Sum of routed and shared experts: one program per row and tile of columns, everything read once and written once."""

import torch
import triton
import triton.language as tl

from ._runtime import Key
from ._triton import dtype_key, launch

MAX_BLOCK = 1024  # columns of a tile: 16 bytes of bf16 for each of 128 threads


@triton.jit
def _expert_sum(routed_ptr, shared_ptr, out_ptr, hidden: tl.constexpr, block: tl.constexpr):
    tiles: tl.constexpr = (hidden + block - 1) // block
    row = (tl.program_id(0) // tiles).to(tl.int64)
    column = (tl.program_id(0) % tiles) * block + tl.arange(0, block)
    at, inside = row * hidden + column, column < hidden
    routed = tl.load(routed_ptr + at, mask=inside, other=0.0)
    shared = tl.load(shared_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (routed + shared).to(out_ptr.dtype.element_ty), mask=inside)


def key(shared: torch.Tensor, out: torch.Tensor) -> Key:
    """What the launch is specialised on."""
    return ("expert_sum", out.shape[1], *dtype_key(shared, out))


def run(routed: torch.Tensor, shared: torch.Tensor, out: torch.Tensor) -> None:
    """Write ``routed + shared`` to ``out [T, D]``, contiguous."""
    num_tokens, hidden = out.shape
    block = min(triton.next_power_of_2(hidden), MAX_BLOCK)
    launch(
        key(shared, out), _expert_sum, (num_tokens * triton.cdiv(hidden, block),), routed.contiguous(),
        shared.contiguous(), out, hidden=hidden, block=block, num_warps=4,
    )  # fmt: skip
