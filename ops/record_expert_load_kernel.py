"""Counting expert ids: a histogram per program, added to the counters with integer atomics, which are exact."""

import torch
import triton
import triton.language as tl

from . import _device
from ._triton import launch

BLOCK = 2048  # ids per program


@triton.jit(do_not_specialize=["num_ids", "num_experts"])
def _record_expert_load(
    ids_ptr, enabled_ptr, counts_ptr, num_ids, num_experts, experts_block: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    if tl.load(enabled_ptr) != 0:
        index = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        ids = tl.load(ids_ptr + index, mask=index < num_ids, other=-1)
        counts = tl.histogram(ids, experts_block, mask=(ids >= 0) & (ids < num_experts))
        expert = tl.arange(0, experts_block)
        tl.atomic_add(counts_ptr + expert, counts.to(tl.int64), mask=counts > 0, sem="relaxed")


def key(num_experts: int) -> tuple[str | int, ...]:
    """What a launch is specialised on."""
    return ("record_expert_load", triton.next_power_of_2(max(num_experts, 2)))


def run(ids: torch.Tensor, enabled: torch.Tensor, counts: torch.Tensor) -> None:
    """Add the occurrences of every expert in ``ids`` to ``counts``; every argument as in the op."""
    num_experts = counts.shape[0]
    launch(
        key(num_experts), _record_expert_load, (triton.cdiv(ids.numel(), BLOCK),),
        ids.contiguous(), enabled, _device.in_place("record_expert_load", counts), ids.numel(), num_experts,
        experts_block=triton.next_power_of_2(max(num_experts, 2)), block=BLOCK, num_warps=8,
    )  # fmt: skip
