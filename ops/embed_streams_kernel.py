"""Embedding rows copied into every stream: one program per token and tile of columns; the row is read once."""

import torch
import triton
import triton.language as tl

from ._triton import dtype_key, launch

MAX_BLOCK = 1024


@triton.jit(do_not_specialize=["vocab"], do_not_specialize_on_alignment=["ids_ptr"])
def _embed_streams(
    ids_ptr, weight_ptr, out_ptr, vocab, num_streams: tl.constexpr, hidden: tl.constexpr, block: tl.constexpr
):
    tiles: tl.constexpr = (hidden + block - 1) // block
    row = (tl.program_id(0) // tiles).to(tl.int64)
    column = (tl.program_id(0) % tiles) * block + tl.arange(0, block)
    token = tl.load(ids_ptr + row).to(tl.int64)
    inside = column < hidden
    known = (token >= 0) & (token < vocab)  # nothing is read for another id
    value = tl.load(weight_ptr + token * hidden + column, mask=inside & known, other=0.0)
    value = value.to(out_ptr.dtype.element_ty)
    for stream in tl.static_range(num_streams):
        tl.store(out_ptr + (row * num_streams + stream) * hidden + column, value, mask=inside)


def key(token_ids: torch.Tensor, weight: torch.Tensor, num_streams: int, dtype: torch.dtype) -> tuple[str | int, ...]:
    """What the launch for these arguments is specialised on."""
    return ("embed_streams", num_streams, weight.shape[1], *dtype_key(token_ids, weight), str(dtype)[6:])


def run(token_ids: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Write the embedding of every token to all streams of ``out [T, M, D]``; zeros for ids outside the table."""
    num_tokens, num_streams, hidden = out.shape
    block = min(triton.next_power_of_2(hidden), MAX_BLOCK)
    launch(
        key(token_ids, weight, num_streams, out.dtype), _embed_streams, (num_tokens * triton.cdiv(hidden, block),),
        token_ids.contiguous(), weight.contiguous(), out, weight.shape[0],
        num_streams=num_streams, hidden=hidden, block=block, num_warps=4,
    )  # fmt: skip
