import importlib

import pytest
import torch

from dsv4 import ops
from dsv4.ops import _few_rows_kernel, _formats, _triton, fp8_linear_kernel
from dsv4.ops.shapes import flash, nano, tiny

from ..ops import contract
from . import interpreter, prewarm
from .against_reference import compare

interpreter.repair()
SPEC = ops.spec("fp8_linear")
FP32, BF16, FP8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
# fp32: the order of at most 400 sums of values that reach hundreds; bf16: one rounding more
TOLERANCE = {FP32: {"rtol": 1e-5, "atol": 1e-4}, BF16: {"rtol": 2**-7, "atol": 1e-4}}


def make(num_tokens, width, num_outs, row_blocks=None):
    g = torch.Generator().manual_seed(num_tokens * width + num_outs)
    x, x_scale = ops.quant_fp8(torch.randn(num_tokens, width, generator=g) * 3)
    weight = torch.randn(num_outs, width, generator=g).to(FP8)
    blocks = (row_blocks or -(-num_outs // 128), -(-width // 128))
    return x, x_scale, weight, torch.rand(blocks, generator=g) * 0.1 + 0.01  # not powers of two


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 33])
@pytest.mark.parametrize("shape", [tiny, nano], ids=lambda s: s.name)
def test_matches_reference(shape, num_tokens, dtype):
    compare(SPEC, *contract.example(SPEC, shape, num_tokens, dtype, seed=num_tokens), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize(
    "num_tokens, width, num_outs",
    [(1, 5, 3), (1, 4112, 10), (65, 144, 130), (129, 272, 5), (257, 200, 9), (300, 384, 272)],
)
def test_odd_sizes(num_tokens, width, num_outs, dtype):
    compare(SPEC, make(num_tokens, width, num_outs), {"dtype": dtype, "deterministic": False}, **TOLERANCE[dtype])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 3, 9, 40, 70])
@pytest.mark.parametrize("half", [40, 128, 200])
def test_stacked_halves_have_their_own_blocks(half, num_tokens, deterministic):
    x, x_scale, weight, scale = make(num_tokens, 256, 2 * half, 2 * -(-half // 128))
    out = torch.full((num_tokens, 2 * half), float("nan"))
    fp8_linear_kernel.run(x, x_scale, weight, scale, out, half, deterministic=deterministic)
    parts = zip(weight.chunk(2), scale.chunk(2), strict=True)
    weights = torch.cat([_formats.dequantize_fp8_weight(*part) for part in parts])
    torch.testing.assert_close(out, _formats.dequantize_fp8(x, x_scale) @ weights.t(), **TOLERANCE[FP32])


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 8, 9, 16, 31, 64])
@pytest.mark.parametrize("width, num_outs", [(512, 64), (1024, 40), (640, 16), (100, 3), (1536, 129), (8192, 9)])
def test_few_rows(num_tokens, width, num_outs):
    """Widths with and without a rest of a step, scales that are no powers of two, ends within a tile."""
    args = make(num_tokens, width, num_outs)
    with _triton.recording() as calls:
        SPEC.cuda(*args, dtype=BF16, deterministic=False)
    assert [call.key[0] for call in calls] == ["one_row_fp8" if num_tokens == 1 else "few_rows_fp8"]
    for dtype in (FP32, BF16):
        compare(SPEC, args, {"dtype": dtype, "deterministic": False}, **TOLERANCE[dtype])


def test_row_alone_equals_row_in_batch():
    x, x_scale, weight, weight_scale = make(260, 384, 70)

    def run(rows):
        return SPEC.cuda(x[rows], x_scale[rows], weight, weight_scale, dtype=FP32, deterministic=True)

    full = run(slice(0, 260))  # every tile size is used
    for rows in (slice(0, 1), slice(259, 260), slice(16, 32), slice(100, 140), slice(0, 256)):
        assert torch.equal(run(rows), full[rows])


def test_zero_rows_and_nan():
    x, x_scale, weight, weight_scale = make(4, 256, 16)
    x.view(torch.uint8)[1] = 0
    x.view(torch.uint8)[2, 7] = 0x7F
    out = SPEC.cuda(x, x_scale, weight, weight_scale, dtype=BF16, deterministic=False)
    assert not out[1].any() and out[2].isnan().all() and out[[0, 3]].isfinite().all()


def test_every_code():
    """Each of the 254 numbers as a weight, as a lone value of a row, is what it decodes to; both NaN stay NaN."""
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    weight = torch.zeros(256, 16, dtype=FP8)
    weight[:, 3] = codes
    for num_tokens in (1, 2, 9, 17, 65, 257):
        x = torch.zeros(num_tokens, 16, dtype=FP8)
        x[:, 3] = 1.0
        x_scale, weight_scale = torch.ones(num_tokens, 1), torch.ones(2, 1)
        out = SPEC.cuda(x, x_scale, weight, weight_scale, dtype=FP32, deterministic=False)
        assert torch.equal(out.nan_to_num(1e9), codes.float().nan_to_num(1e9).expand(num_tokens, -1))


def test_wrong_number_of_scale_rows():
    x, x_scale, weight, weight_scale = make(4, 256, 16)
    with pytest.raises(ValueError, match="fp8_linear x_scale must have the 4 rows of x, got 1"):
        SPEC.cuda(x, x_scale[:1], weight, weight_scale, dtype=BF16, deterministic=False)


@pytest.mark.parametrize("shape", [tiny, nano], ids=lambda s: s.name)
def test_prewarm_covers_every_step(shape):
    keys = prewarm.enumerated(SPEC, shape, 300)
    for count in prewarm.COUNTS:
        for width in (shape.hidden, shape.q_lora_rank, shape.o_groups * shape.o_lora_rank):
            for deterministic in (False, True):
                keywords = {"dtype": BF16, "deterministic": deterministic}
                assert prewarm.launched(SPEC, make(count, width, shape.hidden), keywords) <= keys
    assert prewarm.enumerated(SPEC, shape, 16) < keys


@pytest.mark.parametrize("max_tokens", [1, 16, 300])
def test_prewarm_covers_every_matrix_of_flash(max_tokens):
    """Those of very many rows too, which have kernels of their own at few tokens."""
    keys = prewarm.enumerated(SPEC, flash, max_tokens)
    needed = set()
    for size in importlib.import_module("dsv4.ops.fp8_linear").matrices(flash):
        for count in (n for n in (1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 300) if n <= max_tokens):
            x, weight = (torch.empty(n, size[1], dtype=FP8, device="meta") for n in (count, size[0]))
            needed |= {fp8_linear_kernel.key(x, weight, BF16, deterministic=d) for d in (False, True)}
    assert needed <= keys and len({key[0] for key in needed}) == (2 if max_tokens == 1 else 3)


def test_few_rows_of_a_large_matrix():
    """16-byte reads of woven columns; a deterministic product sums in the order of the larger tiles."""
    weight = torch.empty(_few_rows_kernel.MOST_OUTS, 1024, dtype=FP8, device="meta")

    def key(num_tokens, deterministic):
        x = torch.empty(num_tokens, 1024, dtype=FP8, device="meta")
        return fp8_linear_kernel.key(x, weight, BF16, deterministic=deterministic)

    assert key(1, False)[0] == "one_row_fp8" and key(2, False)[0] == key(1, True)[0] == "fp8_linear"
    assert key(2, False)[-2] == 1 and key(2, True)[-2] == key(300, True)[-2] == key(300, False)[-2] == 0


def test_prewarm_covers_every_stream():
    """A projection of the MTP block multiplies four rows a token: small steps reach the tiles of larger ones."""
    keys = prewarm.enumerated(SPEC, nano, 100)
    keywords = {"dtype": BF16, "deterministic": False}
    assert prewarm.launched(SPEC, make(400, nano.hidden, nano.hidden), keywords) <= keys
