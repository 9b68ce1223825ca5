import itertools

import pytest
import torch

from dsv4 import ops
from dsv4.ops import _few_rows_kernel, _triton
from dsv4.ops.shapes import nano, tiny

from ..ops import contract
from . import interpreter, prewarm
from .against_reference import compare

interpreter.repair()
SPEC = ops.spec("linear")
FP32, BF16 = torch.float32, torch.bfloat16
# fp32 results differ in the order of the sums: K * 2^-24 of the sum of magnitudes at worst, K <= 300 here
TOLERANCE = {FP32: {"rtol": 1e-5, "atol": 1e-5}, BF16: {"rtol": 2**-7, "atol": 1e-5}}


def make(num_tokens, width, num_outs, x_dtype, weight_dtype):
    g = torch.Generator().manual_seed(num_tokens * width + num_outs)
    x = torch.randn(num_tokens, width, generator=g).to(x_dtype)
    return x, (torch.randn(num_outs, width, generator=g) * width**-0.5).to(weight_dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 33])
@pytest.mark.parametrize("shape", [tiny, nano], ids=lambda s: s.name)
def test_matches_reference(shape, num_tokens, dtype):
    compare(SPEC, *contract.example(SPEC, shape, num_tokens, dtype, seed=num_tokens), **TOLERANCE[FP32])


@pytest.mark.parametrize("result", [FP32, BF16], ids=str)
@pytest.mark.parametrize("weight_dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("x_dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize(
    "num_tokens, width, num_outs", [(1, 5, 3), (33, 80, 130), (129, 40, 7), (257, 72, 9), (300, 128, 200)]
)
def test_dtypes_and_odd_sizes(num_tokens, width, num_outs, x_dtype, weight_dtype, result):
    args = make(num_tokens, width, num_outs, x_dtype, weight_dtype)
    compare(SPEC, args, {"dtype": result, "deterministic": False}, **TOLERANCE[result])


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 8, 9, 16, 32])
@pytest.mark.parametrize("width, num_outs", [(256, 64), (512, 40), (320, 16), (100, 3), (768, 129), (4096, 9)])
def test_few_rows(num_tokens, width, num_outs):
    """Widths with and without a rest of a step, and ends within a tile."""
    args = make(num_tokens, width, num_outs, BF16, BF16)
    with _triton.recording() as calls:
        SPEC.cuda(*args, dtype=BF16, deterministic=False)
    assert [call.key[0] for call in calls] == ["one_row" if num_tokens == 1 else "few_rows"]
    for dtype in (FP32, BF16):
        compare(SPEC, args, {"dtype": dtype, "deterministic": False}, **TOLERANCE[dtype])


def test_few_rows_of_a_large_matrix_stay_with_the_large_tiles():
    with _triton.recording() as calls:
        for num_outs in (_few_rows_kernel.MOST_OUTS - 1, _few_rows_kernel.MOST_OUTS):
            SPEC.cuda(*make(2, 64, num_outs, BF16, BF16), dtype=BF16, deterministic=False)
    assert [call.key[0] for call in calls] == ["few_rows", "linear"]


def test_fp32_weights_keep_their_24_bits():
    """bf16 x times fp32 weights through three bf16 products: as near to fp64 as fp32 itself."""
    x, weight = make(16, 256, 64, BF16, FP32)
    weight *= torch.exp2(torch.randint(-20, 20, weight.shape, generator=torch.Generator().manual_seed(0)).float())
    want = x.double() @ weight.double().t()
    size = x.double().abs() @ weight.double().abs().t()
    got = SPEC.cuda(x, weight, dtype=FP32, deterministic=True)
    assert ((got - want).abs() / size).max() < 1e-6  # bf16 weights alone would give 2^-9
    one = torch.zeros(1, 256, dtype=BF16)
    one[0, 3] = 1.0
    assert torch.equal(SPEC.cuda(one, weight, dtype=FP32, deterministic=True)[0], weight[:, 3])


@pytest.mark.parametrize("weight_dtype", [FP32, BF16], ids=str)
def test_row_alone_equals_row_in_batch(weight_dtype):
    x, weight = make(260, 192, 70, BF16, weight_dtype)

    def run(rows):
        return SPEC.cuda(rows, weight, dtype=FP32, deterministic=True)

    full = run(x)  # every tile size is used
    for rows in (slice(0, 1), slice(259, 260), slice(16, 32), slice(100, 140), slice(0, 256)):
        assert torch.equal(run(x[rows]), full[rows])


def test_non_contiguous():
    x, weight = make(5, 48, 20, BF16, BF16)
    compare(SPEC, (x.t().contiguous().t(), weight.t().contiguous().t()), {"dtype": FP32, "deterministic": True},
            **TOLERANCE[FP32])  # fmt: skip


@pytest.mark.parametrize("shape", [tiny, nano], ids=lambda s: s.name)
def test_prewarm_covers_every_step(shape):
    keys = prewarm.enumerated(SPEC, shape, 300)
    for count in prewarm.COUNTS:
        for kind, deterministic in itertools.product((FP32, BF16), (False, True)):
            for num_outs in (shape.num_experts, shape.vocab) if kind == FP32 else (shape.index_heads, shape.hidden):
                args = make(count, shape.hidden, num_outs, BF16, BF16)
                assert prewarm.launched(SPEC, args, {"dtype": kind, "deterministic": deterministic}) <= keys
    assert prewarm.enumerated(SPEC, shape, 16) < keys
