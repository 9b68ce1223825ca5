"""Merging attention parts, one program per few (row, head) pairs: every part is read once, after its log-sum-exp."""

import torch
import triton
import triton.language as tl

from ._triton import dtype_key, launch

PAIRS = 4  # (row, head) pairs of one program


@triton.jit(
    do_not_specialize=["num_parts", "num_pairs", "heads"], do_not_specialize_on_alignment=["lses_ptr", "sink_ptr"]
)
def _lse_merge(
    outs_ptr, lses_ptr, sink_ptr, out_ptr, lse_ptr, num_parts, num_pairs, heads, dim: tl.constexpr,
    dim_block: tl.constexpr, pairs: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64) * pairs + tl.arange(0, pairs)
    stride = tl.cast(num_pairs, tl.int64)  # parts times pairs times dim passes 2^31
    column = tl.arange(0, dim_block)
    inside = pair < num_pairs
    maximum = tl.full((pairs,), float("-inf"), tl.float32)
    for part in range(num_parts):
        lse = tl.load(lses_ptr + pair + part * stride, mask=inside, other=float("-inf"))
        maximum = tl.maximum(maximum, lse)
    empty = maximum == float("-inf")
    maximum = tl.where(empty, 0.0, maximum)
    total = tl.zeros((pairs,), tl.float32)
    weighted = tl.zeros((pairs, dim_block), tl.float32)
    pair_at = pair[:, None] * dim + column[None, :]
    for part in range(num_parts):
        lse = tl.load(lses_ptr + pair + part * stride, mask=inside, other=float("-inf"))
        mass = tl.exp(lse - maximum)
        used = (lse > float("-inf"))[:, None] & (column < dim)[None, :]  # what an empty part holds is not even read
        value = tl.load(outs_ptr + pair_at + part * stride * dim, mask=used, other=0.0)
        total += mass
        weighted += mass[:, None] * value.to(tl.float32)
    sink = tl.load(sink_ptr + pair % heads, mask=inside, other=0.0)
    share = 1.0 / (total + tl.exp(sink - maximum))
    merged = tl.where(empty[:, None], 0.0, weighted * share[:, None])
    tl.store(out_ptr + pair_at, merged.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (column < dim)[None, :])
    tl.store(lse_ptr + pair, tl.where(empty, float("-inf"), maximum + tl.log(total)), mask=inside)


def key(outs: torch.Tensor) -> tuple[str | int, ...]:
    """What the launch is specialised on; the numbers of parts, rows and heads are run-time arguments."""
    return ("lse_merge", outs.shape[3], *dtype_key(outs))


def run(outs: torch.Tensor, lses: torch.Tensor, sink: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Write the merged ``out [T, H, hd]`` and ``lse [T, H]``."""
    num_parts, num_rows, heads, dim = outs.shape
    num_pairs = num_rows * heads
    dim_block = triton.next_power_of_2(dim)
    launch(
        key(outs), _lse_merge, (triton.cdiv(num_pairs, PAIRS),), outs.contiguous(), lses.contiguous(),
        sink.contiguous(), out, lse, num_parts, num_pairs, heads,
        dim=dim, dim_block=dim_block, pairs=PAIRS, num_warps=min(max(PAIRS * dim_block // 512, 1), 4),
    )  # fmt: skip
