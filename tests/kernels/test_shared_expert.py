import numpy as np
import pytest
import torch

from dsv4 import ops
from dsv4.ops.shapes import nano, tiny

from ..ops import contract, moe_numpy as moe
from . import interpreter, prewarm
from .against_reference import compare

interpreter.repair()
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # silu of large negative values: 0
SPEC = ops.spec("shared_expert")
FP32, BF16 = torch.float32, torch.bfloat16
SIZES = {"fp32": (72, 40), "bf16_weights": (72, 40), "bf16": (72, 40), "fp8": (192, 160), "fp4": (160, 96)}
# As for the reference against numpy: rounded activations may move by one step where two sums differ in their last bit
BOUND = {"fp32": 1e-6, "bf16_weights": 1e-6, "bf16": 1e-3, "fp8": 1e-3, "fp4": 1e-3}


def make(kind, num_tokens, seed):
    rng = np.random.default_rng(seed)
    hidden, inner = SIZES[kind]
    weights = moe.make_experts(rng, kind, 1, hidden, inner)
    x, x_scale, _ = moe.make_rows(rng, kind, num_tokens, hidden)
    return (x, x_scale, *weights.first), 8.0 if kind in ("fp8", "fp4") else 0.7


def run(function, args, limit, dtype=FP32, deterministic=True):
    return function(*args, limit=limit, dtype=dtype, deterministic=deterministic)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 33])
@pytest.mark.parametrize("shape", [tiny, nano], ids=lambda s: s.name)
def test_matches_reference(shape, num_tokens, dtype):
    # e4m3 rounding may move one activation by 2^-4, one product of 128 or fewer, then bf16
    tolerance = {"rtol": 2e-5, "atol": 2e-5} if dtype == FP32 else {"rtol": 2**-6, "atol": 2**-6}
    compare(SPEC, *contract.example(SPEC, shape, num_tokens, dtype, seed=num_tokens), **tolerance)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 13, 70])
@pytest.mark.parametrize("kind", moe.FORMATS)
def test_formats_and_odd_sizes(kind, num_tokens, deterministic):
    args, limit = make(kind, num_tokens, seed=num_tokens)
    got, want = run(SPEC.cuda, args, limit, deterministic=deterministic), run(SPEC.reference, args, limit)
    assert got.shape == want.shape and got.dtype == FP32
    if num_tokens:
        assert want.any() and moe.relative_rms(got, want) < BOUND[kind]


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_fp32_result_holds_the_rounded_product(kind):
    args, limit = make(kind, 13, seed=2)
    wide, got = run(SPEC.cuda, args, limit), run(SPEC.cuda, args, limit, BF16)
    assert got.dtype == BF16 and torch.equal(got.float(), wide)


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_row_alone_equals_row_in_batch(kind):
    (x, x_scale, *weights), limit = make(kind, 260, seed=3)

    def rows(part):
        return run(SPEC.cuda, (x[part], x_scale[part] if x_scale.numel() else x_scale, *weights), limit)

    full = rows(slice(0, 260))  # every tile size is used
    for part in (slice(259, 260), slice(100, 140)):
        assert torch.equal(rows(part), full[part])


def test_zero_rows_stay_zero():
    (x, *rest), limit = make("fp8", 3, seed=4)
    x[1] = 0
    got = run(SPEC.cuda, (x, *rest), limit, BF16)
    assert not got[1].any() and got[0].any() and got[2].any()


def test_wrong_number_of_scale_rows():
    (x, x_scale, *weights), limit = make("fp8", 3, seed=5)
    with pytest.raises(ValueError, match="shared_expert x_scale must have the 3 rows of x, got 1"):
        run(SPEC.cuda, (x, x_scale[:1], *weights), limit)


@pytest.mark.parametrize("shape", [tiny, nano], ids=lambda s: s.name)
def test_prewarm_covers_every_step(shape):
    prewarm.check_every_step(SPEC, shape)
