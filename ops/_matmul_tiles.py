"""Tiles of the matrix products ``x @ weight.T``, shared by every kernel that has one.

A program owns ``[outs, tokens]`` of the TRANSPOSED result: weight rows are the M side of the tensor-core product and
tokens the N side. The M side is at least 64 on Hopper and Blackwell, the N side may be 16, so few tokens cost little
and every size runs the same instruction. Only the token tile varies with the number of rows; the order in which a row's
products are summed does not: it runs over K in steps of one constant length. A row's result is therefore the same
alone and in any batch.
"""

import torch
import triton
import triton.language as tl

TOKEN_TILES = (16, 32, 64, 128)
_SIZES = (16, 128, 256)  # most rows for which each but the last tile is used
GROUP = 8  # token tiles that run side by side while they share weight rows in L2


def token_tile(num_tokens: int) -> int:
    """Tokens per program."""
    return TOKEN_TILES[sum(num_tokens > size for size in _SIZES)]


def sample_counts(max_tokens: int) -> tuple[int, ...]:
    """Row counts up to ``max_tokens`` that between them select every kernel and token tile that smaller steps can."""
    few = (1, 2, 9, 17, 33, 65)  # of ``_one_row_kernel`` and ``_few_rows_kernel``, and those after them
    return tuple(n for n in sorted({*few, *(size + 1 for size in _SIZES)}) if n <= max(max_tokens, 1))


def width_unit(width: int, step: int) -> int:
    """Largest of ``step``, 16 and 1 that divides ``width``: what a kernel may assume of a row's length."""
    return step if width % step == 0 else 16 if width % 16 == 0 else 1


@triton.jit
def place(tile, num_outs, num_tokens, outs: tl.constexpr, tokens: tl.constexpr, group: tl.constexpr):
    """First weight row and first token (int64) of program ``tile``: groups of token tiles walk the weight together."""
    out_tiles = tl.cdiv(num_outs, outs)
    token_tiles = tl.cdiv(num_tokens, tokens)
    first = tile // (out_tiles * group) * group
    side = tl.minimum(token_tiles - first, group)
    inner = tile % (out_tiles * group)
    return (inner // side).to(tl.int64) * outs, (first + inner % side).to(tl.int64) * tokens


@triton.jit
def row_block(row, half, step: tl.constexpr):
    """Block of scales of weight row ``row`` in two stacked matrices, the first of ``half`` rows; each has its own."""
    return tl.where(row >= half, (row - half) // step + tl.cdiv(half, step), row // step)


@triton.jit
def multiply(weight, x, total):
    """``total + weight @ x.T`` for tiles ``weight [outs, k]`` and ``x [tokens, k]`` with fp32 accumulation.

    bf16 operands: tensor cores, products exact. fp32 weight and bf16 x: the weight is split into three bf16 parts,
    each the rounded remainder of the parts before; 8 + 8 + 8 significant bits hold all 24, so the three exact products
    sum to the fp32 product (smallest first). Below 2^-110 the parts leave the range of bf16 and only the relative, not
    the absolute, accuracy is lost. fp32 x: fp32 products without TF32.
    """
    if x.dtype == tl.float32:
        return tl.dot(weight.to(tl.float32), tl.trans(x), total, input_precision="ieee")
    elif weight.dtype == tl.float32:
        high = weight.to(tl.bfloat16)
        rest = weight - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        turned = tl.trans(x)
        total = tl.dot(low, turned, total)
        total = tl.dot(middle, turned, total)
        return tl.dot(high, turned, total)
    else:
        return tl.dot(weight, tl.trans(x), total)


def fp8_options(tile: int) -> dict[str, int]:
    """Tile sizes, warps and stages of an FP8 product: a step of K is one block of 128 codes, which has one scale."""
    return {"outs": 64, "tokens": tile, "step": 128, "num_warps": 4, "num_stages": 3 if tile == 128 else 4}


def dense_tile(num_tokens: int, x: torch.Tensor) -> int:
    """Token tile of a dense product; fp32 x runs without tensor cores, where a large tile only costs registers."""
    return min(token_tile(num_tokens), 64) if x.dtype == torch.float32 else token_tile(num_tokens)


def dense_options(tile: int, x: torch.Tensor, weight: torch.Tensor) -> dict[str, int]:
    """Tile sizes, warps and stages of a dense product: K advances 64 elements (one 128-byte swizzle of bf16) a step."""
    if x.dtype == torch.float32:
        return {"outs": 64, "tokens": tile, "step": 32, "num_warps": 4 if tile <= 32 else 8, "num_stages": 2}
    if weight.dtype == torch.float32:
        outs, warps, stages = {16: (64, 4, 4), 32: (64, 4, 2), 64: (128, 8, 2), 128: (128, 8, 2)}[tile]
    else:
        outs, warps, stages = {16: (64, 4, 4), 32: (64, 4, 6), 64: (64, 4, 6), 128: (128, 8, 3)}[tile]
    return {"outs": outs, "tokens": tile, "step": 64, "num_warps": warps, "num_stages": stages}
