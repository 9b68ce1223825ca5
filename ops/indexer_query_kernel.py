"""Indexer queries, sixteen heads of a row per program, in registers from load to store."""

import torch
import triton
import triton.language as tl

from . import _device
from ._triton import launch, names

HEADS = 16  # heads per program: 2048 elements of dim 128, 16 per thread


@triton.jit(do_not_specialize=["scale", "num_parts", "num_heads", "num_positions"])
def _indexer_query(
    q_ptr, weights_ptr, table_ptr, positions_ptr, out_ptr, out_weights_ptr,
    scale, num_parts, num_heads, num_positions,
    dim: tl.constexpr, rope_dim: tl.constexpr, fp4: tl.constexpr, heads: tl.constexpr, width: tl.constexpr,
    stages: tl.constexpr, norm: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    token = (program // num_parts).to(tl.int64)
    act: tl.constexpr = q_ptr.dtype.element_ty
    column = tl.arange(0, width)[None, :]
    head = (program % num_parts) * heads + tl.arange(0, heads)
    inside = (head[:, None] < num_heads) & (column < dim)
    offset = (token * num_heads + head[:, None]) * dim + column
    position = tl.load(positions_ptr + token)
    q = tl.load(q_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    angles = _device.angle_row(table_ptr, position, num_positions, rope_dim)
    q = _device.rounded(_device.rotate(q, angles, dim, rope_dim, False), act)
    if fp4:
        q = _device.simulate_fp4(_device.rounded(_device.hadamard(q, stages) * norm, act))
    q = tl.where(position >= 0, q, 0.0)
    gain = tl.load(weights_ptr + token * num_heads + head, mask=head < num_heads, other=0.0).to(tl.float32) * scale
    gain = tl.where(position >= 0, _device.rounded(gain, weights_ptr.dtype.element_ty), 0.0)
    if out_ptr.dtype.element_ty == tl.float8e4nv:
        codes, exponent = _device.quantize_fp8(q, width)
        tl.store(out_ptr + offset, codes, mask=inside)
        gain = gain * tl.reshape(_device.power_of_two(exponent), [heads])
    else:
        tl.store(out_ptr + offset, q.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_weights_ptr + token * num_heads + head, gain, mask=head < num_heads)


def key(
    dim: int, rope_dim: int, quantize: str, act: torch.dtype, weights: torch.dtype, out: torch.dtype
) -> tuple[str | int, ...]:
    """What a launch is specialised on."""
    return ("indexer_query", dim, rope_dim, quantize, *names(act, weights, out))


def run(
    q: torch.Tensor,
    weights: torch.Tensor,
    rope_table: torch.Tensor,
    positions: torch.Tensor,
    out_q: torch.Tensor,
    out_weights: torch.Tensor,
    scale: float,
    quantize: str,
) -> None:
    """Write ``out_q`` and ``out_weights``; every argument as in the op."""
    num_tokens, num_heads, dim = q.shape
    num_positions, rope_dim = rope_table.shape
    num_parts = triton.cdiv(num_heads, HEADS)
    launch(
        key(dim, rope_dim, quantize, q.dtype, weights.dtype, out_q.dtype), _indexer_query, (num_tokens * num_parts,),
        q.contiguous(), weights.contiguous(), rope_table.contiguous(), positions.contiguous(), out_q, out_weights,
        scale, num_parts, num_heads, num_positions,
        dim=dim, rope_dim=rope_dim, fp4=quantize == "fp4", heads=HEADS, width=_device.tile_width(dim),
        stages=(dim - 1).bit_length(), norm=dim**-0.5, num_warps=4,
    )  # fmt: skip
