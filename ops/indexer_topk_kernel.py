"""Exact top-k of a row by radix selection, one program per row.

Scores become unsigned integers of the same order. Eight bits at a time, from the top, a histogram of the scores that
share the bits found so far tells the next bits of the k-th largest score; then one pass in entry order keeps every
larger score and as many equal ones as are still wanted. That takes 3 passes over a row of bf16 scores and 5 of fp32;
rows with no more visible entries than picks need only the last one.
"""

import torch
import triton
import triton.language as tl

from ._triton import launch, names

ALIGNMENT = tl.constexpr(16)  # scores; a row length that is a multiple allows vector loads, as the model's are
BLOCK = 2048  # scores per step
FILL = 512


@triton.jit
def _ordered(score, bits: tl.constexpr):
    """uint32 keys of ``bits`` bits that order like the scores; −0 and +0 have one key."""
    pattern = (score.to(tl.float32) + 0.0).to(tl.int32, bitcast=True)
    pattern = tl.where(score == 0.0, 0, pattern)
    key = pattern ^ ((pattern >> 31) | -0x80000000)  # negative: all bits flipped; else: sign bit set
    return key.to(tl.uint32, bitcast=True) >> (32 - bits)


@triton.jit
def _load(scores_ptr, first, count, block: tl.constexpr):
    """Entry numbers, scores, and which of them may be picked: visible, not −inf and not NaN."""
    entry = first + tl.arange(0, block)
    score = tl.load(scores_ptr + entry, mask=entry < count, other=float("-inf"))
    return entry, score, score > float("-inf")


@triton.jit
def _next_digit(
    scores_ptr, searched, count, threshold, wanted, step: tl.constexpr, bits: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """``threshold`` with its next eight bits, and ``wanted`` less the keys that are larger whatever follows."""
    shift: tl.constexpr = bits - 8 - 8 * step
    histogram = tl.zeros([256], tl.int32)
    for first in range(0, searched, block):
        _, score, candidate = _load(scores_ptr, first, count, block)
        key = _ordered(score, bits)
        if step > 0:
            candidate &= (key >> (shift + 8)) == threshold
        histogram += tl.histogram(((key >> shift) & 255).to(tl.int32), 256, mask=candidate)
    from_here = tl.cumsum(histogram, axis=0, reverse=True)
    if step == 0:
        wanted = tl.minimum(wanted, tl.sum(histogram, axis=0))
    digit = tl.sum((from_here >= wanted).to(tl.int32), axis=0) - 1
    wanted -= tl.sum(tl.where(tl.arange(0, 256) > digit, histogram, 0), axis=0)
    return (threshold << 8) | digit.to(tl.uint32), wanted


@triton.jit(do_not_specialize=["num_entries", "num_picks", "ratio"])
def _indexer_topk(
    scores_ptr, positions_ptr, picks_ptr, num_entries, num_picks, ratio,
    bits: tl.constexpr, aligned: tl.constexpr, block: tl.constexpr, fill: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offset = row * num_entries
    scores_ptr += tl.multiple_of(offset, ALIGNMENT) if aligned else offset
    picks_ptr += row * num_picks
    count = tl.minimum((tl.load(positions_ptr + row) + 1) // ratio, num_entries).to(tl.int32)
    searched = tl.where(count > num_picks, count, 0)

    threshold = tl.zeros((), tl.uint32)  # the bits of the k-th largest key found so far
    wanted = num_picks + tl.zeros((), tl.int32)  # how many keys that start with these bits are to be picked
    for step in tl.static_range(bits // 8):
        threshold, wanted = _next_digit(scores_ptr, searched, count, threshold, wanted, step, bits, block)
    threshold = tl.where(searched > 0, threshold, 0)  # every pickable key is above 0

    picked = tl.zeros((), tl.int32)
    ties = tl.zeros((), tl.int32)
    for first in range(0, count, block):
        entry, score, candidate = _load(scores_ptr, first, count, block)
        key = _ordered(score, bits)
        tie = candidate & (key == threshold)
        tie_number = ties + tl.cumsum(tie.to(tl.int32), axis=0)
        take = (candidate & (key > threshold)) | (tie & (tie_number <= wanted))
        place = picked + tl.cumsum(take.to(tl.int32), axis=0) - 1
        tl.store(picks_ptr + place, entry, mask=take)
        ties += tl.sum(tie.to(tl.int32), axis=0)
        picked += tl.sum(take.to(tl.int32), axis=0)
    for first in range(picked, num_picks, fill):
        place = first + tl.arange(0, fill)
        tl.store(picks_ptr + place, tl.full([fill], -1, tl.int32), mask=place < num_picks)


def key(dtype: torch.dtype, num_entries: int) -> tuple[str | int, ...]:
    """What a launch is specialised on."""
    return ("indexer_topk", *names(dtype), int(num_entries % ALIGNMENT.value == 0))


def run(scores: torch.Tensor, positions: torch.Tensor, picks: torch.Tensor, ratio: int) -> None:
    """Write ``picks [T, num_picks]``; every argument as in the op."""
    num_tokens, num_entries = scores.shape
    launch(
        key(scores.dtype, num_entries), _indexer_topk, (num_tokens,),
        scores.contiguous(), positions.contiguous(), picks, num_entries, picks.shape[1], ratio,
        bits=16 if scores.dtype == torch.bfloat16 else 32, aligned=num_entries % ALIGNMENT.value == 0, block=BLOCK,
        fill=FILL, num_warps=8, num_stages=1,
    )  # fmt: skip
