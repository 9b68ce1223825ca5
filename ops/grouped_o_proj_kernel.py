"""Inverse RoPE fused into the load of a grouped product; tiles and their order are those of ``_matmul_tiles``.

The columns of a group are summed in two passes: first those of every head that are not rotated, which go straight from
memory to the tensor cores, then the rotated tails, which are turned in registers and rounded to o's dtype.
At most 16 rows have kernels of their own, made as those of ``_one_row_kernel`` and ``_few_rows_kernel`` are, unless the
product must be deterministic.
"""

import torch
import triton
import triton.language as tl

from . import _matmul_tiles as tiles
from ._aligned import aligned
from ._triton import dtype_key, launch

FEW_ROWS = 16  # most rows of the kernel of that name


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


@triton.jit(do_not_specialize=["num_positions"])
def _one_row(
    o_ptr, table_ptr, position_ptr, weight_ptr, out_ptr, num_positions, heads: tl.constexpr, head_dim: tl.constexpr,
    rope_dim: tl.constexpr, rank: tl.constexpr, outs: tl.constexpr, span: tl.constexpr,
):  # fmt: skip
    owner = tl.program_id(1)
    first_out = tl.program_id(0) * outs
    width: tl.constexpr = heads * head_dim
    chunks: tl.constexpr = span // 8
    out = tl.arange(0, outs)
    column = tl.arange(0, span)
    pair = tl.arange(0, span // 2)
    out_inside = out < rank - first_out
    weight_tile = weight_ptr + (owner.to(tl.int64) * rank + first_out) * width + out[:, None] * width + column[None, :]
    position = tl.load(position_ptr)
    valid = position >= 0
    table_row = table_ptr + tl.minimum(tl.maximum(position, 0), num_positions - 1) * rope_dim
    total = tl.zeros((outs, chunks), tl.float32)
    for start in range(0, width, span):
        inside = column < width - start
        mask = out_inside[:, None] & inside[None, :]
        weight = tl.load(weight_tile + start, mask=mask, other=0.0, eviction_policy="evict_first")
        o = tl.load(o_ptr + owner * width + start + column, mask=valid & inside, other=0.0)
        place = (start // 2 + pair) % (head_dim // 2) - (head_dim - rope_dim) // 2  # in the tail of a head
        turns = place >= 0
        cos = tl.load(table_row + place, mask=turns, other=1.0)
        sin = tl.load(table_row + rope_dim // 2 + place, mask=turns, other=0.0)
        even, odd = tl.split(tl.reshape(o.to(tl.float32), (span // 2, 2)))
        turned = tl.join(tl.where(turns, even * cos + odd * sin, even), tl.where(turns, odd * cos - even * sin, odd))
        o = tl.reshape(turned, (span,)).to(o_ptr.dtype.element_ty)
        product = weight.to(tl.float32) * o.to(tl.float32)[None, :]
        total += tl.sum(tl.reshape(product, (outs, chunks, 8)), axis=2)
    result = tl.where(valid, tl.sum(total, axis=1), 0.0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + owner * rank + first_out + out, result, mask=out_inside)


@triton.jit(do_not_specialize=["num_tokens", "num_positions", "groups"])
def _few_rows(
    o_ptr, table_ptr, position_ptr, weight_ptr, out_ptr, num_tokens, num_positions, groups, heads: tl.constexpr,
    head_dim: tl.constexpr, rope_dim: tl.constexpr, rank: tl.constexpr, outs: tl.constexpr, tokens: tl.constexpr,
    parts: tl.constexpr, step: tl.constexpr, turn: tl.constexpr,
):  # fmt: skip
    """Each warp, or part, has a head of its own."""
    owner = tl.program_id(1)
    first_out = tl.program_id(0) * outs
    width: tl.constexpr = heads * head_dim
    plain: tl.constexpr = head_dim - rope_dim
    half: tl.constexpr = rope_dim // 2
    out = tl.arange(0, outs)
    token = tl.arange(0, tokens)
    head = tl.arange(0, parts)[:, None, None]
    out_inside = (out < rank - first_out)[None, :, None]
    stride = groups * width
    weight_row = weight_ptr + (owner.to(tl.int64) * rank + first_out) * width + out[None, :, None] * width
    weight_row += head * head_dim
    o_row = o_ptr + owner * width + token[None, :, None].to(tl.int64) * stride + head * head_dim
    position = tl.load(position_ptr + token, mask=token < num_tokens, other=-1)
    valid = position >= 0
    valid_row = valid[None, :, None]
    total = tl.zeros((parts, outs, tokens), tl.float32)
    rounds: tl.constexpr = (heads + parts - 1) // parts

    if plain > 0:
        column = tl.arange(0, step)[None, None, :]
        pieces: tl.constexpr = (plain + step - 1) // step
        for piece in range(rounds * pieces):
            start = piece % pieces * step
            first = piece // pieces * parts
            offset = first * head_dim + start + column
            inside = (head < heads - first) & (column < plain - start)
            weight = tl.load(weight_row + offset, mask=out_inside & inside, other=0.0)
            o = tl.load(o_row + offset, mask=valid_row & inside, other=0.0)
            total = tl.dot(weight, tl.permute(o, (0, 2, 1)), total)

    table_row = table_ptr + tl.minimum(tl.maximum(position, 0), num_positions - 1) * rope_dim
    tail = tl.arange(0, turn)[None, None, :]
    pair = tl.arange(0, turn // 2)[None, :]
    pair_inside = valid[:, None] & (pair < half)
    cos = tl.load(table_row[:, None] + pair, mask=pair_inside, other=0.0)[None, :, :]
    sin = tl.load(table_row[:, None] + half + pair, mask=pair_inside, other=0.0)[None, :, :]
    for first in tl.static_range(0, heads, parts):
        offset = first * head_dim + plain + tail
        inside = (head < heads - first) & (tail < rope_dim)
        weight = tl.load(weight_row + offset, mask=out_inside & inside, other=0.0)
        o = tl.load(o_row + offset, mask=valid_row & inside, other=0.0)
        even, odd = tl.split(tl.reshape(o.to(tl.float32), (parts, tokens, turn // 2, 2)))
        turned = tl.join(even * cos + odd * sin, odd * cos - even * sin)
        o = tl.reshape(turned, (parts, tokens, turn)).to(o_ptr.dtype.element_ty)
        total = tl.dot(weight, tl.permute(o, (0, 2, 1)), total)

    result = tl.where(valid[None, :], tl.sum(total, axis=0), 0.0).to(out_ptr.dtype.element_ty)
    target = out_ptr + owner * rank + first_out + out[:, None] + token[None, :].to(tl.int64) * (groups * rank)
    tl.store(target, result, mask=(out < rank - first_out)[:, None] & (token < num_tokens)[None, :])


def _kind(o: torch.Tensor, weight: torch.Tensor, deterministic: bool) -> str:
    """Which of the three kernels serves; that of one row needs pairs that start at even columns."""
    few = o.shape[0] <= FEW_ROWS and not deterministic and o.dtype == weight.dtype == torch.bfloat16
    if not few:
        return "grouped_o_proj"
    return "one_row_o_proj" if o.shape[0] == 1 and o.shape[2] % 2 == 0 else "few_rows_o_proj"


def _options(kind: str, o: torch.Tensor, rope_dim: int, weight: torch.Tensor) -> dict[str, int]:
    heads = o.shape[1] // weight.shape[0]
    sizes = {"heads": heads, "head_dim": o.shape[2], "rope_dim": rope_dim, "rank": weight.shape[1]}
    if kind == "one_row_o_proj":
        return sizes | {"outs": 8, "span": 1024, "num_warps": 4}
    turn = max(triton.next_power_of_2(rope_dim), 16)
    if kind == "few_rows_o_proj":
        tokens = 8 if o.shape[0] <= 8 else FEW_ROWS
        tile = {"outs": 2 * tokens, "tokens": tokens, "parts": 4, "step": 64, "turn": turn}
        return sizes | tile | {"num_warps": 4, "num_stages": 3}
    options = tiles.dense_options(tiles.dense_tile(o.shape[0], o), o, weight)
    if options["tokens"] == 64 and o.dtype == weight.dtype == torch.bfloat16:
        options |= {"outs": 128, "num_stages": 3}  # all groups at once are programs enough
    return sizes | options | {"turn": min(turn, options["step"])}


def _key(kind: str, o: torch.Tensor, weight: torch.Tensor, options: dict[str, int]) -> tuple[str | int, ...]:
    picked = (options.get("tokens", 1), *(options[name] for name in ("heads", "head_dim", "rope_dim", "rank")))
    return (kind, *picked, *dtype_key(o, weight))


def key(
    o: torch.Tensor, rope_table: torch.Tensor, weight: torch.Tensor, *, deterministic: bool
) -> tuple[str | int, ...]:
    """What the launch for these tensors is specialised on."""
    kind = _kind(o, weight, deterministic)
    return _key(kind, o, weight, _options(kind, o, rope_table.shape[1], weight))


def run(
    o: torch.Tensor,
    rope_table: torch.Tensor,
    positions: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    deterministic: bool,
) -> None:
    """``out [T, G * rank]``: every group of heads of ``o [T, H, hd]``, rotated back, times ``weight [G, rank, in]``."""
    num_tokens, groups, rank = o.shape[0], weight.shape[0], weight.shape[1]
    kind = _kind(o, weight, deterministic)
    options = _options(kind, o, rope_table.shape[1], weight)
    tensors = (*(aligned(t) for t in (o, rope_table, positions, weight)), out)
    grid = (triton.cdiv(num_tokens, options.get("tokens", 1)) * triton.cdiv(rank, options["outs"]), groups)
    name = _key(kind, o, weight, options)
    if kind == "one_row_o_proj":
        launch(name, _one_row, grid, *tensors, rope_table.shape[0], **options)
    elif kind == "few_rows_o_proj":
        launch(name, _few_rows, grid, *tensors, num_tokens, rope_table.shape[0], groups, **options)
    else:
        launch(
            name, _grouped_o_proj, grid, *tensors, num_tokens, rope_table.shape[0], groups, group=tiles.GROUP, **options
        )
