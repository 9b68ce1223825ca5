"""One launch for queries and keys: a program takes four heads of a row, or the row's key, in registers.

Programs of one row are neighbours, so its RoPE angles are read once from memory. Every output element is written once;
a row is a function of itself alone.
"""

import torch
import triton
import triton.language as tl

from . import _device, _paged
from ._triton import launch, names

HEADS = 4  # heads per program: 2048 elements of head_dim 512, 16 per thread


@triton.jit(do_not_specialize=["eps", "num_parts", "num_heads", "num_positions"])
def _qkv_rope_cache(
    q_ptr, kv_ptr, weight_ptr, table_ptr, positions_ptr, slots_ptr, cache_ptr, out_ptr,
    eps, num_parts, num_heads, num_positions,
    dim: tl.constexpr, rope_dim: tl.constexpr, page_rows: tl.constexpr, quantize: tl.constexpr,
    heads: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    token = (program // num_parts).to(tl.int64)  # tokens times heads times dim passes 2^31 for long prefills
    part = program % num_parts
    act: tl.constexpr = q_ptr.dtype.element_ty
    column = tl.arange(0, width)[None, :]
    position = tl.load(positions_ptr + token)
    angles = _device.angle_row(table_ptr, position, num_positions, rope_dim)
    if part == 0:
        slot = tl.load(slots_ptr + token)
        kv = tl.load(kv_ptr + token * dim + column, mask=column < dim, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + column, mask=column < dim, other=0.0)
        key_row = _device.rounded(_device.rms_normalize(kv, weight, eps, dim), act)
        key_row = _device.rounded(_device.rotate(key_row, angles, dim, rope_dim, False), act)
        if quantize:
            key_row = _device.simulate_kv(key_row, dim - rope_dim)
        _device.store_rows(cache_ptr, slot // page_rows, slot % page_rows, slot >= 0, key_row, dim, page_rows)
    else:
        head = (part - 1) * heads + tl.arange(0, heads)[:, None]
        inside = (head < num_heads) & (column < dim)
        offset = (token * num_heads + head) * dim + column
        q = tl.load(q_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        mean = _device.rounded(tl.sum(_device.rounded(q * q, act), axis=1) / dim, act)
        scale = _device.rounded(_device.reciprocal_root(_device.rounded(mean + eps, act)), act)
        q = _device.rounded(q * scale[:, None], act)
        q = _device.rotate(q, angles, dim, rope_dim, False)
        tl.store(out_ptr + offset, tl.where(position >= 0, q, 0.0).to(act), mask=inside)


def key(
    dim: int, rope_dim: int, page_rows: int, quantize: bool, act: torch.dtype, cache: torch.dtype
) -> tuple[str | int, ...]:
    """What a launch is specialised on."""
    return ("qkv_rope_cache", dim, rope_dim, page_rows, int(quantize), *names(act, cache))


def run(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_norm_weight: torch.Tensor,
    rope_table: torch.Tensor,
    positions: torch.Tensor,
    window_slots: torch.Tensor,
    window_cache: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    quantize: bool,
) -> None:
    """Write ``out`` as ``q`` and the rows of ``window_cache``; every argument as in the op."""
    num_tokens, num_heads, dim = q.shape
    num_positions, rope_dim = rope_table.shape
    page_rows = _paged.page_rows(window_cache, dim)
    num_parts = 1 + triton.cdiv(num_heads, HEADS)
    launch(
        key(dim, rope_dim, page_rows, quantize, q.dtype, window_cache.dtype), _qkv_rope_cache,
        (num_tokens * num_parts,),
        q.contiguous(), kv.contiguous(), kv_norm_weight.float().contiguous(), rope_table.contiguous(),
        positions.contiguous(), window_slots.contiguous(), _device.in_place("qkv_rope_cache", window_cache), out,
        eps, num_parts, num_heads, num_positions,
        dim=dim, rope_dim=rope_dim, page_rows=page_rows, quantize=quantize, heads=HEADS,
        width=_device.tile_width(dim), num_warps=4,
    )  # fmt: skip
