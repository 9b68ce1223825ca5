"""Grouped expert products under the interpreter, against the reference."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from dsv4 import ops
from dsv4.ops import _expert_blocks_kernel, _formats, _fp4_kernel, expert_ffn_kernel
from dsv4.ops.shapes import nano, tiny

from ..ops import contract, moe_numpy as moe
from . import interpreter, prewarm
from .against_reference import compare

interpreter.repair()
SPEC = ops.spec("expert_ffn")
# fp32: sums of a few hundred products in another order. Rounded formats: such a sum may land on the other side of a
# bf16 or e4m3 boundary, which moves one code of one row's activation; fewer than one in a hundred do.
BOUND = {"fp32": 1e-6, "bf16_weights": 1e-6, "bf16": 1e-3, "fp8": 1e-3, "fp4": 1e-3}
SIZES = {"fp32": (72, 40), "bf16_weights": (72, 40), "bf16": (72, 40), "fp8": (192, 160), "fp4": (160, 96)}
LIMIT = {"fp8": 8.0, "fp4": 8.0}  # the clamp bites: gate and up are about this large


def make(kind, num_tokens, seed, *, num_experts=5, topk=3):
    rng = np.random.default_rng(seed)
    weights = moe.make_experts(rng, kind, num_experts, *SIZES[kind])
    x, x_scale, _ = moe.make_rows(rng, kind, num_tokens, SIZES[kind][0])
    ids, route = moe.make_routing(rng, num_tokens, topk, num_experts)
    return (x, x_scale, ids, route, *weights.tensors), {"limit": LIMIT.get(kind, 0.7)}


@triton.jit
def _decode(words_ptr, codes_ptr, out_ptr, rows: tl.constexpr, words: tl.constexpr):
    row, word = tl.arange(0, rows)[:, None], tl.arange(0, words)[None, :]
    scale = _fp4_kernel.e8m0(tl.load(codes_ptr + row * (words // 8) + tl.arange(0, words // 8)[None, :]))
    w0, w1, w2, w3 = _fp4_kernel.e2m1(tl.load(words_ptr + row * words + word), scale)
    out_ptr += row * (4 * words) + 4 * word
    tl.store(out_ptr, w0)
    tl.store(out_ptr + 1, w1)
    tl.store(out_ptr + 2, w2)
    tl.store(out_ptr + 3, w3)


def test_every_code_and_scale():
    """All 65,536 words, and every scale byte but NaN's beside every code, to the bit: signed zeros, subnormals."""
    g = torch.Generator().manual_seed(0)
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(256, 256)
    alike = (torch.arange(16) * 0x1111).to(torch.int16).expand(256, 16)
    words = torch.cat((alike, every, every[torch.randperm(256, generator=g), :240]), dim=1)
    codes = torch.randint(0, 255, (256, 64), generator=g, dtype=torch.uint8)
    codes[:, :2] = torch.arange(256)[:, None] % 255
    out = torch.full((256, 2048), float("nan"), dtype=torch.bfloat16)
    _decode[(1,)](words, codes, out, rows=256, words=512)
    want = _formats.dequantize_fp4(words.view(torch.uint8), codes).bfloat16()
    assert torch.equal(out.view(torch.int16), want.view(torch.int16)) and want.isfinite().float().mean() > 0.95


@triton.jit
def _decode_fp16(bytes_ptr, out_ptr, n: tl.constexpr):
    low, high = _fp4_kernel.e2m1_fp16(tl.load(bytes_ptr + tl.arange(0, n)))
    tl.store(out_ptr + 2 * tl.arange(0, n), low)
    tl.store(out_ptr + 2 * tl.arange(0, n) + 1, high)


def test_every_byte_as_fp16():
    """Times 2^14 they are the values, to the bit: signed zeros, and the subnormal 0.5."""
    g = torch.Generator().manual_seed(1)
    every = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    codes = torch.cat((every, every[torch.randperm(256, generator=g)]))
    out = torch.full((1024,), float("nan"), dtype=torch.float16)
    _decode_fp16[(1,)](codes, out, n=512)
    want = _formats.dequantize_fp4(codes, torch.full((32,), 127, dtype=torch.uint8))
    assert torch.equal((out.float() * 2**14).view(torch.int32), want.view(torch.int32))


@pytest.fixture
def poisoned(monkeypatch):
    """Memory that kernels are given holds NaN, so that what they read without having written it shows."""
    empty = torch.empty

    def poison(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        if tensor.numel() and tensor.is_floating_point():
            tensor.fill_(float("nan"))
        return tensor

    monkeypatch.setattr(torch, "empty", poison)


def test_which_kernel_serves():
    """A bounded number of rows whatever the experts, then few pairs for their number; FP4 alone."""
    cpu = torch.device("cpu")
    for rows, experts, alone in ((1, 1, True), (4, 1, True), (5, 40, True), (5, 39, False), (64, 512, True)):
        for weight, deterministic in ((torch.uint8, False), (torch.uint8, True), (torch.float8_e4m3fn, False)):
            size = expert_ffn_kernel.block_m(rows, 6, experts, weight, deterministic, cpu)
            assert (size == 0) == (alone and weight == torch.uint8 and not deterministic)


@pytest.mark.parametrize("sizes", [(160, 96), (64, 32), pytest.param((544, 320), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_few_rows(num_tokens, sizes, poisoned, monkeypatch):
    """Columns that end inside a step, rows that end inside a tile, pairs of no expert; the same bits again."""
    monkeypatch.setitem(SIZES, "fp4", sizes)
    args, kwargs = make("fp4", num_tokens, seed=sum(sizes) + num_tokens)
    args[2][-1, 1] = -1
    got = SPEC.cuda(*args, **kwargs, deterministic=False)
    want = SPEC.reference(*args, **kwargs, deterministic=False)
    assert want.any() and moe.relative_rms(got, want) < BOUND["fp4"]
    assert torch.equal(got, SPEC.cuda(*args, **kwargs, deterministic=False))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, pytest.param(33, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", moe.FORMATS)
def test_matches_reference(kind, num_tokens, deterministic):
    args, kwargs = make(kind, num_tokens, seed=num_tokens)
    got = SPEC.cuda(*args, **kwargs, deterministic=deterministic)
    want = SPEC.reference(*args, **kwargs, deterministic=deterministic)
    assert got.shape == want.shape and got.dtype == want.dtype
    if num_tokens:
        assert want.any() and moe.relative_rms(got, want) < BOUND[kind]
    empty = (args[2] == -1).all(1)
    assert not got[empty].any()


@pytest.mark.slow
def test_long_lines_of_fp4(monkeypatch):
    """Sizes whose blocks of 64 pairs take 256 columns a step, a NaN scale among them."""
    monkeypatch.setitem(SIZES, "fp4", (1024, 1024))
    args, kwargs = make("fp4", 7, seed=8, num_experts=4, topk=2)
    args[5][1, 3, 17] = 255
    got = SPEC.cuda(*args, **kwargs, deterministic=True)
    want = SPEC.reference(*args, **kwargs, deterministic=True)
    spoilt = want.isnan()
    assert spoilt.any() and not spoilt.all() and torch.equal(got.isnan(), spoilt)
    assert moe.relative_rms(got[~spoilt], want[~spoilt]) < BOUND["fp4"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("shape", "num_tokens"),
    [(tiny, 5), pytest.param(nano, 3, marks=pytest.mark.slow)],
    ids=lambda v: getattr(v, "name", str(v)),
)
def test_examples(shape, num_tokens, dtype):
    # one bf16 step of a part is 2^-8 of it, and parts are of the order of one
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    compare(SPEC, *contract.example(SPEC, shape, num_tokens, dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", moe.FORMATS)
def test_row_alone_equals_row_in_batch(kind):
    (x, x_scale, ids, route, *weights), kwargs = make(kind, 33, seed=2, num_experts=3, topk=2)

    def run(rows):
        scale = x_scale[rows] if x_scale.numel() else x_scale
        return SPEC.cuda(x[rows], scale, ids[rows], route[rows], *weights, **kwargs, deterministic=True)

    full = run(slice(0, 33))
    assert torch.equal(run(slice(5, 33)), full[5:])
    for row in (0, 32):
        assert torch.equal(run(slice(row, row + 1)), full[row : row + 1])


@pytest.mark.parametrize(("kind", "num_tokens"), [("fp32", 13), ("fp4", 4), ("fp4", 13)])
def test_absent_experts_and_pads_are_not_read(kind, num_tokens):
    args, kwargs = make(kind, num_tokens, seed=4)
    x, x_scale, ids, route, *weights = args
    ids[2] = -1
    outside = torch.where(ids == -1, torch.tensor(99, dtype=torch.int32), ids)
    outside[:, 1] = -7
    absent = torch.where((outside < 0) | (outside > 4), torch.tensor(-1, dtype=torch.int32), outside)
    empty_rows = (absent == -1).all(1)
    x.view(torch.uint8)[empty_rows] = 0xFF
    route[absent == -1] = float("nan")
    got = SPEC.cuda(x, x_scale, outside, route, *weights, **kwargs, deterministic=False)
    assert torch.equal(got, SPEC.cuda(x, x_scale, absent, route, *weights, **kwargs, deterministic=False))
    assert got.isfinite().all() and empty_rows.any() and not got[empty_rows].any() and got[~empty_rows].any()


@pytest.mark.parametrize(("num_tokens", "deterministic"), [(7, True), (7, False), (3, False)])
def test_extreme_scales_and_nan(num_tokens, deterministic):
    """E8M0 bytes from 2^-127 to 2^8 are exact, and a NaN scale reaches the rows of its expert alone."""
    args, kwargs = make("fp4", num_tokens, seed=6)
    _, _, ids, _, _, w13_scale, _, w2_scale = args
    w13_scale[0], w13_scale[1, ::2], w2_scale[2] = 0, 1, 135
    ids[:] = torch.arange(3, dtype=torch.int32)
    ids[0] = torch.tensor([4, 1, 0])
    w2_scale[4, 7] = 255
    got = SPEC.cuda(*args, **kwargs, deterministic=deterministic)
    want = SPEC.reference(*args, **kwargs, deterministic=True)
    assert want[0].isnan().any() and torch.equal(got[0].isnan(), want[0].isnan())
    assert want[1:].isfinite().all() and moe.relative_rms(got[1:], want[1:]) < BOUND["fp4"]


@pytest.mark.parametrize(("num_tokens", "deterministic"), [(7, True), (3, False)])
def test_scales_whose_product_overflows(num_tokens, deterministic):
    """A row's scale times a weight's passes 2^128 where the sums, some of them zero, do not."""
    args, kwargs = make("fp4", num_tokens, seed=9)
    x, x_scale, ids, _, w13, w13_scale, *_ = args
    x[:, :128], x_scale[:, 0] = 0.0, 2.0**40
    x[:, 0] = 2.0**-9
    w13[:, ::2, 0], w13_scale[:, ::2, 0] = torch.tensor([0x01, 0x09, 0x00]).repeat(32).to(torch.uint8), 127 + 93
    ids[:] = torch.arange(3, dtype=torch.int32)
    got = SPEC.cuda(*args, **kwargs, deterministic=deterministic)
    want = SPEC.reference(*args, **kwargs, deterministic=True)
    assert want.isfinite().all() and want.any() and moe.relative_rms(got, want) < BOUND["fp4"]


@pytest.mark.parametrize("pairs_per_block", [16, 64, 128])
@pytest.mark.parametrize("num_tokens", [1, 33, 700])
def test_blocks(num_tokens, pairs_per_block):
    """Every pair once, in blocks of its expert, in order; the bound on blocks is never passed."""
    experts, topk = 5, 3
    ids, _ = moe.make_routing(np.random.default_rng(num_tokens), num_tokens, topk, experts)
    ids[0, 0] = experts  # nobody's
    slots, owner = _expert_blocks_kernel.run(ids, experts, pairs_per_block)
    used = int((owner >= 0).sum())
    assert (owner[:used] >= 0).all() and (owner[used:] == -1).all()
    got = slots[: used * pairs_per_block].view(used, pairs_per_block)
    for expert in range(experts):
        want = (ids.flatten() == expert).nonzero().flatten().int()
        mine = got[owner[:used] == expert].flatten()
        assert mine.numel() == -(-want.numel() // pairs_per_block) * pairs_per_block
        assert torch.equal(mine[: want.numel()], want) and (mine[want.numel() :] == -1).all()


@pytest.mark.parametrize("counts", [[1, 1, 1], [49, 1, 1], [17, 16, 15], [48, 0, 0], [16, 17, 33]])
def test_block_bound(counts):
    need = sum(-(-n // 16) for n in counts)
    assert need <= _expert_blocks_kernel.num_blocks(sum(counts), 3, 16)


def test_cases_cover_every_launch():
    keys = set()
    for kind in ("bf16", "fp8", "fp4"):
        for tokens, deterministic in ((1, True), *((tokens, False) for tokens in (1, 50, 200, 600))):
            rng = np.random.default_rng(0)
            weights = moe.make_experts(rng, kind, tiny.num_experts, tiny.hidden, tiny.expert_hidden)
            rows = moe.make_rows(rng, kind, tokens, tiny.hidden)[:2]
            routing = moe.make_routing(rng, tokens, tiny.experts_per_token, tiny.num_experts)
            kwargs = {"limit": 1.0, "deterministic": deterministic}
            keys |= prewarm.launched(SPEC, (*rows, *routing, *weights.tensors), kwargs)
    assert keys == prewarm.enumerated(SPEC, tiny, 64)
