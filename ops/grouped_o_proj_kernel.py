"""Inverse RoPE fused into the load of a grouped product; tiles and their order are those of ``_matmul_tiles``.

The columns of a group are summed in two passes: first those of every head that are not rotated, which go straight from
memory to the tensor cores, then the rotated tails, which are turned in registers and rounded to o's dtype.
"""

import torch
import triton
import triton.language as tl

from . import _matmul_tiles as tiles
from ._aligned import aligned
from ._triton import dtype_key, launch


@triton.jit(do_not_specialize=["num_tokens", "num_positions", "groups"])
def _grouped_o_proj(
    o_ptr, table_ptr, position_ptr, weight_ptr, out_ptr, num_tokens, num_positions, groups, heads: tl.constexpr,
    head_dim: tl.constexpr, rope_dim: tl.constexpr, rank: tl.constexpr, outs: tl.constexpr, tokens: tl.constexpr,
    step: tl.constexpr, turn: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    owner = tl.program_id(1)
    first_out, first_token = tiles.place(tl.program_id(0), rank, num_tokens, outs, tokens, group)
    width: tl.constexpr = heads * head_dim
    plain: tl.constexpr = head_dim - rope_dim
    out = tl.arange(0, outs)
    token = tl.arange(0, tokens)
    out_inside = (out < rank - first_out)[:, None]
    token_inside = token < num_tokens - first_token
    stride = groups * width
    weight_row = weight_ptr + (owner.to(tl.int64) * rank + first_out) * width + out[:, None] * width
    o_row = o_ptr + first_token * stride + owner * width + token[:, None].to(tl.int64) * stride
    position = tl.load(position_ptr + first_token + token, mask=token_inside, other=-1)
    valid = position >= 0
    total = tl.zeros((outs, tokens), tl.float32)

    if plain > 0:
        column = tl.arange(0, step)
        pieces: tl.constexpr = (plain + step - 1) // step
        for piece in range(heads * pieces):
            start = piece % pieces * step
            offset = piece // pieces * head_dim + start + column[None, :]
            if plain % step == 0:
                weight = tl.load(weight_row + offset, mask=out_inside, other=0.0)
                o = tl.load(o_row + offset, mask=valid[:, None], other=0.0)
            else:
                inside = (column < plain - start)[None, :]
                weight = tl.load(weight_row + offset, mask=out_inside & inside, other=0.0)
                o = tl.load(o_row + offset, mask=valid[:, None] & inside, other=0.0)
            total = tiles.multiply(weight, o, total)

    half: tl.constexpr = rope_dim // 2
    table_row = table_ptr + tl.minimum(tl.maximum(position, 0), num_positions - 1) * rope_dim
    tail_column = tl.arange(0, turn)
    pair = tl.arange(0, turn // 2)
    for start in tl.static_range(0, rope_dim, turn):
        inside = (tail_column < rope_dim - start)[None, :]
        pair_inside = valid[:, None] & (pair < half - start // 2)[None, :]
        cos = tl.load(table_row[:, None] + start // 2 + pair[None, :], mask=pair_inside, other=0.0)
        sin = tl.load(table_row[:, None] + half + start // 2 + pair[None, :], mask=pair_inside, other=0.0)
        for head in range(heads):
            offset = head * head_dim + plain + start + tail_column[None, :]
            weight = tl.load(weight_row + offset, mask=out_inside & inside, other=0.0)
            tail = tl.load(o_row + offset, mask=valid[:, None] & inside, other=0.0)
            even, odd = tl.split(tl.reshape(tail.to(tl.float32), (tokens, turn // 2, 2)))
            turned = tl.join(even * cos + odd * sin, odd * cos - even * sin)
            tail = tl.reshape(turned, (tokens, turn)).to(o_ptr.dtype.element_ty)
            total = tiles.multiply(weight, tail, total)

    target = out_ptr + first_token * (groups * rank) + owner * rank + first_out
    target += token[:, None].to(tl.int64) * (groups * rank) + out[None, :]
    result = tl.where(valid[:, None], tl.trans(total), 0.0).to(out_ptr.dtype.element_ty)
    tl.store(target, result, mask=token_inside[:, None] & (out < rank - first_out)[None, :])


def _options(o: torch.Tensor, rope_dim: int, weight: torch.Tensor) -> dict[str, int]:
    options = tiles.dense_options(tiles.dense_tile(o.shape[0], o), o, weight)
    turn = min(max(triton.next_power_of_2(rope_dim), 16), options["step"])
    heads = o.shape[1] // weight.shape[0]
    sizes = {"heads": heads, "head_dim": o.shape[2], "rope_dim": rope_dim, "rank": weight.shape[1], "turn": turn}
    return sizes | options


def _key(o: torch.Tensor, weight: torch.Tensor, options: dict[str, int]) -> tuple[str | int, ...]:
    picked = (options[name] for name in ("tokens", "heads", "head_dim", "rope_dim", "rank"))
    return ("grouped_o_proj", *picked, *dtype_key(o, weight))


def key(o: torch.Tensor, rope_table: torch.Tensor, weight: torch.Tensor) -> tuple[str | int, ...]:
    """What the launch for these tensors is specialised on."""
    return _key(o, weight, _options(o, rope_table.shape[1], weight))


def run(
    o: torch.Tensor, rope_table: torch.Tensor, positions: torch.Tensor, weight: torch.Tensor, out: torch.Tensor
) -> None:
    """``out [T, G * rank]``: every group of heads of ``o [T, H, hd]``, rotated back, times ``weight [G, rank, in]``."""
    num_tokens, groups, rank = o.shape[0], weight.shape[0], weight.shape[1]
    options = _options(o, rope_table.shape[1], weight)
    grid = triton.cdiv(num_tokens, options["tokens"]) * triton.cdiv(rank, options["outs"])
    launch(
        _key(o, weight, options), _grouped_o_proj, (grid, groups), aligned(o), aligned(rope_table),
        aligned(positions), aligned(weight), out, num_tokens, rope_table.shape[0], groups,
        group=tiles.GROUP, **options,
    )  # fmt: skip
