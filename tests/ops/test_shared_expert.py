import numpy as np
import pytest
import torch

from dsv4 import ops

from . import moe_numpy as moe

BOUND = {"fp32": 1e-6, "bf16_weights": 1e-6, "bf16": 1e-3, "fp8": 1e-3, "fp4": 1e-3}  # as in test_expert_ffn.py
SIZES = {"fp32": (72, 40), "bf16_weights": (72, 40), "bf16": (72, 40), "fp8": (192, 160), "fp4": (160, 96)}
LIMIT = {"fp8": 8.0, "fp4": 8.0}


def make(kind: str, num_tokens: int, seed: int):
    rng = np.random.default_rng(seed)
    hidden, inner = SIZES[kind]
    weights = moe.make_experts(rng, kind, 1, hidden, inner)
    x, x_scale, values = moe.make_rows(rng, kind, num_tokens, hidden)
    return (x, x_scale, *weights.first), LIMIT.get(kind, 0.7), values, weights


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 13])
@pytest.mark.parametrize("kind", moe.FORMATS)
def test_matches_numpy(kind, num_tokens, deterministic):
    args, limit, values, weights = make(kind, num_tokens, seed=num_tokens)
    got = ops.shared_expert(*args, limit=limit, dtype=torch.float32, deterministic=deterministic)
    rounds, quantize = kind in ("bf16", "fp8", "fp4"), kind in ("fp8", "fp4")
    want = np.zeros(values.shape)
    for row, x in zip(want, values, strict=True):
        w13, w2 = weights.w13_values[0], weights.w2_values[0]
        row[:] = moe.expert(x, 1.0, w13, w2, limit=limit, rounds=rounds, quantize=quantize)
    assert got.shape == want.shape and got.dtype == torch.float32
    if num_tokens:
        assert want.any() and moe.relative_rms(got, want) < BOUND[kind]


@pytest.mark.parametrize("kind", moe.FORMATS)
def test_equals_a_routed_expert_of_weight_one(kind):
    (x, x_scale, *weights), limit, _, _ = make(kind, 13, seed=1)
    routed = [w.unsqueeze(0) if w.numel() else w for w in weights]
    ids, ones = torch.zeros(13, 1, dtype=torch.int32), torch.ones(13, 1)
    want = ops.expert_ffn(x, x_scale, ids, ones, *routed, limit=limit, deterministic=True)
    got = ops.shared_expert(x, x_scale, *weights, limit=limit, dtype=torch.float32, deterministic=True)
    assert torch.equal(got, want) and want.any()


@pytest.mark.parametrize("kind", ["bf16", "fp8", "fp4"])
def test_bf16_result_is_the_rounded_product(kind):
    args, limit, _, _ = make(kind, 13, seed=2)
    wide = ops.shared_expert(*args, limit=limit, dtype=torch.float32, deterministic=True)
    got = ops.shared_expert(*args, limit=limit, dtype=torch.bfloat16, deterministic=True)
    assert got.dtype == torch.bfloat16 and torch.equal(got.float(), wide)


@pytest.mark.parametrize("kind", moe.FORMATS)
def test_row_alone_equals_row_in_batch(kind):
    (x, x_scale, *weights), limit, _, _ = make(kind, 129, seed=3)

    def run(rows):
        scale = x_scale[rows] if x_scale.numel() else x_scale
        return ops.shared_expert(x[rows], scale, *weights, limit=limit, dtype=torch.float32, deterministic=True)

    full = run(slice(0, 129))
    assert torch.equal(run(slice(0, 65)), full[:65])
    for row in range(0, 129, 4):
        assert torch.equal(run(slice(row, row + 1)), full[row : row + 1])


def test_zero_rows_stay_zero():
    (x, x_scale, *weights), limit, _, _ = make("fp8", 3, seed=4)
    x[1] = 0
    got = ops.shared_expert(x, x_scale, *weights, limit=limit, dtype=torch.bfloat16, deterministic=False)
    assert not got[1].any() and got[0].any() and got[2].any()


def test_wrong_arguments():
    (x, x_scale, w13, w13_scale, w2, w2_scale), _, _, _ = make("fp8", 2, seed=5)
    keywords = {"limit": 1.0, "dtype": torch.bfloat16, "deterministic": False}
    with pytest.raises(ValueError, match=r"shared_expert w13_scale must have shape \[4, 2\], got \[3, 2\]"):
        ops.shared_expert(x, x_scale, w13, w13_scale[1:], w2, w2_scale, **keywords)
    with pytest.raises(ValueError, match="shared_expert w13 must have 2 dimensions, got 3"):
        ops.shared_expert(x, x_scale, w13[None], w13_scale, w2, w2_scale, **keywords)
    with pytest.raises(ValueError, match="shared_expert dtype must be float32 or bfloat16, got torch.float16"):
        ops.shared_expert(x, x_scale, w13, w13_scale, w2, w2_scale, **(keywords | {"dtype": torch.float16}))
