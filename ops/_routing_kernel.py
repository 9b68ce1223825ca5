"""Routing kernels: the score of an expert, expert choice by score and by token id."""

import torch
import triton
import triton.language as tl

from ._triton import launch, names

TOPK_ROWS = 4  # rows per program: one per warp
HASH_ROWS = 32
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN2_HIGH = tl.constexpr(0.693359375)  # ten bits: its product with an exponent is exact
_LN2_LOW = tl.constexpr(-2.12194440e-4)
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def _exp_of_negative(x):
    """``exp(x)`` for ``x <= 0`` to about 2 ulp, subnormal results included.

    The hardware's exponential is a power of two of ``x * log2(e)``, whose rounding costs ``|x| / 2`` ulp; here it only
    sees the remainder of ``x`` by ln 2.
    """
    x = tl.maximum(x, -104.5)  # already 0; keeps the exponents below in range
    n = tl.floor(x * _LOG2_E + 0.5)
    value = tl.exp(x - n * _LN2_HIGH - n * _LN2_LOW)
    exponent = n.to(tl.int32)
    half = exponent // 2  # two factors, because 2^-149 is no normal number
    first, second = (half + 127) << 23, (exponent - half + 127) << 23
    return value * first.to(tl.float32, bitcast=True) * second.to(tl.float32, bitcast=True)


@triton.jit
def scores(logits):
    """``sqrt(softplus(logits))``, a few ulp from the reference at both ends."""
    u = _exp_of_negative(-tl.abs(logits))
    w = 1.0 + u
    lost = tl.div_rn(u, tl.where(w == 1.0, 1.0, w - 1.0))  # corrects for what rounding 1 + u lost
    log1p = tl.where(w == 1.0, u, tl.log(w) * lost)
    return tl.sqrt_rn(tl.maximum(logits, 0.0, propagate_nan=tl.PropagateNan.ALL) + log1p)


@triton.jit
def _store(ids_ptr, weights_ptr, row, num_rows, keep, ids, weights, scale, topk: tl.constexpr):
    """Normalise the chosen scores ``[n, block]``, summed in order of choice, and store ids and weights."""
    place = tl.arange(0, ids.shape[1])[None, :]
    total = tl.zeros([ids.shape[0]], tl.float32)
    for k in tl.static_range(topk):
        total += tl.sum(tl.where(place == k, weights, 0.0), axis=1)  # one term: adds nothing but the k-th weight
    total = tl.maximum(total, _TINY, propagate_nan=tl.PropagateNan.ALL)[:, None] + tl.zeros_like(weights)
    weights = tl.div_rn(weights, total) * scale
    target = row.to(tl.int64)[:, None] * topk + place
    inside = (row[:, None] < num_rows) & (place < topk)
    tl.store(ids_ptr + target, tl.where(keep, ids, -1), mask=inside)
    tl.store(weights_ptr + target, tl.where(keep, weights, 0.0), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_experts", "scale"])
def _route_topk(
    logits_ptr, bias_ptr, valid_ptr, ids_ptr, weights_ptr, num_rows, num_experts, scale,
    topk: tl.constexpr, topk_block: tl.constexpr, experts_block: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    valid = row < tl.minimum(tl.load(valid_ptr), num_rows)
    expert = tl.arange(0, experts_block)[None, :]
    inside = valid[:, None] & (expert < num_experts)
    logits = tl.load(logits_ptr + row.to(tl.int64)[:, None] * num_experts + expert, mask=inside, other=0.0)
    score = scores(logits)
    biased = score + tl.load(bias_ptr + expert, mask=expert < num_experts, other=0.0)
    # one integer orders the experts: by biased score (NaN first, as a sort has it), then by smaller number
    pattern = tl.where(biased == 0.0, 0.0, biased).to(tl.int32, bitcast=True)
    ordered = pattern ^ ((pattern >> 31) & 0x7FFFFFFF)
    pattern = tl.where(biased == biased, ordered, 0x7FFFFFFF)  # noqa: PLR0124
    order = (pattern.to(tl.int64) << 32) | (experts_block - 1 - expert)
    order = tl.where(expert < num_experts, order, -0x8000000000000000)
    place = tl.arange(0, topk_block)[None, :]
    ids = tl.zeros([rows, topk_block], tl.int32)
    weights = tl.zeros([rows, topk_block], tl.float32)
    for k in tl.static_range(topk):
        best = tl.max(order, axis=1)[:, None]
        chosen = experts_block - 1 - (best & (experts_block - 1)).to(tl.int32)
        weight = tl.sum(tl.where(expert == chosen, score, 0.0), axis=1)[:, None]
        ids = tl.where(place == k, chosen, ids)
        weights = tl.where(place == k, weight, weights)
        order = tl.where(expert == chosen, -0x8000000000000000, order)
    _store(ids_ptr, weights_ptr, row, num_rows, valid[:, None], ids, weights, scale, topk)


@triton.jit(do_not_specialize=["num_rows", "num_experts", "vocab", "scale"])
def _route_hash(
    logits_ptr, table_ptr, tokens_ptr, valid_ptr, ids_ptr, weights_ptr, num_rows, num_experts, vocab, scale,
    topk: tl.constexpr, topk_block: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    in_step = row < tl.minimum(tl.load(valid_ptr), num_rows)
    token = tl.load(tokens_ptr + row, mask=in_step, other=-1).to(tl.int64)
    place = tl.arange(0, topk_block)[None, :]
    valid = ((token >= 0) & (token < vocab))[:, None] & (place < topk)
    ids = tl.load(table_ptr + token[:, None] * topk + place, mask=valid, other=-1).to(tl.int32)
    valid = valid & (ids >= 0) & (ids < num_experts)  # a wrong table must not read or pass on wrong numbers
    logits = tl.load(logits_ptr + row.to(tl.int64)[:, None] * num_experts + ids, mask=valid, other=0.0)
    weights = tl.where(valid, scores(logits), 0.0)
    _store(ids_ptr, weights_ptr, row, num_rows, valid, ids, weights, scale, topk)


def topk_key(num_experts: int, topk: int) -> tuple[str | int, ...]:
    """What a ``route_topk`` launch is specialised on."""
    return ("route_topk", triton.next_power_of_2(num_experts), topk)


def route_topk(
    logits: torch.Tensor,
    bias: torch.Tensor,
    num_valid: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    scale: float,
) -> None:
    """Write ``ids`` and ``weights [T, K]``; every argument as in the op."""
    num_rows, num_experts = logits.shape
    topk = ids.shape[1]
    launch(
        topk_key(num_experts, topk), _route_topk, (triton.cdiv(num_rows, TOPK_ROWS),),
        logits.contiguous(), bias.contiguous(), num_valid, ids, weights, num_rows, num_experts, scale,
        topk=topk, topk_block=triton.next_power_of_2(topk), experts_block=triton.next_power_of_2(num_experts),
        rows=TOPK_ROWS, num_warps=4,
    )  # fmt: skip


def hash_key(topk: int, table: torch.dtype, tokens: torch.dtype) -> tuple[str | int, ...]:
    """What a ``route_hash`` launch is specialised on."""
    return ("route_hash", topk, *names(table, tokens))


def route_hash(
    logits: torch.Tensor,
    table: torch.Tensor,
    token_ids: torch.Tensor,
    num_valid: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    scale: float,
) -> None:
    """Write ``ids`` and ``weights [T, K]``; every argument as in the op."""
    num_rows, num_experts = logits.shape
    vocab, topk = table.shape
    launch(
        hash_key(topk, table.dtype, token_ids.dtype), _route_hash, (triton.cdiv(num_rows, HASH_ROWS),),
        logits.contiguous(), table.contiguous(), token_ids.contiguous(), num_valid, ids, weights,
        num_rows, num_experts, vocab, scale,
        topk=topk, topk_block=triton.next_power_of_2(topk), rows=HASH_ROWS, num_warps=4,
    )  # fmt: skip
