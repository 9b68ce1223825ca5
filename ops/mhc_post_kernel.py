"""mHC mixing after a sublayer: one program per row and tile of columns, everything read once and written once.

The tile is kept at 1,024 columns because that divides every published width, gives each of 128 threads one 16-byte
access per stream in bf16, and leaves the row's M * M weights in registers.
"""

import torch
import triton
import triton.language as tl

from ._triton import dtype_key, launch

MAX_BLOCK = 1024


@triton.jit
def _mhc_post(
    y_ptr, streams_ptr, post_ptr, comb_ptr, out_ptr,
    num_streams: tl.constexpr, hidden: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (hidden + block - 1) // block
    row = (tl.program_id(0) // tiles).to(tl.int64)
    column = (tl.program_id(0) % tiles) * block + tl.arange(0, block)
    inside = column < hidden
    target = tl.arange(0, num_streams)
    mixed = tl.zeros([num_streams, block], dtype=tl.float32)
    for source in tl.static_range(num_streams):  # the first index of comb is contracted
        value = tl.load(streams_ptr + (row * num_streams + source) * hidden + column, mask=inside, other=0.0)
        weight = tl.load(comb_ptr + (row * num_streams + source) * num_streams + target)
        mixed += weight[:, None] * value.to(tl.float32)[None, :]
    y = tl.load(y_ptr + row * hidden + column, mask=inside, other=0.0).to(tl.float32)
    mixed = tl.load(post_ptr + row * num_streams + target)[:, None] * y[None, :] + mixed
    out = out_ptr + (row * num_streams + target[:, None]) * hidden + column[None, :]
    tl.store(out, mixed.to(out_ptr.dtype.element_ty), mask=inside[None, :])


def key(streams: torch.Tensor) -> tuple[str | int, ...]:
    """What the launch for ``streams [T, M, D]`` is specialised on."""
    return ("mhc_post", streams.shape[1], streams.shape[2], *dtype_key(streams))


def run(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, out: torch.Tensor) -> None:
    """Write the mixed streams ``[T, M, D]`` to ``out``; needs M to be a power of two."""
    num_tokens, num_streams, hidden = streams.shape
    if num_streams & (num_streams - 1):
        raise NotImplementedError(f"mhc_post num_streams must be a power of two on CUDA, got {num_streams}")
    block = min(triton.next_power_of_2(hidden), MAX_BLOCK)
    inputs = (t.contiguous() for t in (y, streams, post, comb))
    launch(
        key(streams), _mhc_post, (num_tokens * triton.cdiv(hidden, block),), *inputs, out,
        num_streams=num_streams, hidden=hidden, block=block, num_warps=4,
    )  # fmt: skip
