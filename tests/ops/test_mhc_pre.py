from dataclasses import replace

import pytest
import torch

from dsv4 import ops
from dsv4.ops.mhc_pre import example
from dsv4.ops.shapes import tiny

from . import plain_mhc as plain

CPU = torch.device("cpu")


def arguments(num_tokens: int, dtype=torch.float32, num_streams: int = 4, seed: int = 0):
    shape = replace(tiny, num_streams=num_streams)
    return example(shape, num_tokens=num_tokens, device=CPU, dtype=dtype, seed=seed)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("num_streams", [2, 4])
def test_matches_loops(num_streams, deterministic):
    args, kwargs = arguments(5, num_streams=num_streams)
    expected = plain.pre(*args, **kwargs)
    got = ops.mhc_pre(*args, **{**kwargs, "deterministic": deterministic})
    # fp32 sums of 128 to 256 products of order 1, then gates of slope at most 1: a few 1e-7.
    for value, want in zip(got, expected, strict=True):
        torch.testing.assert_close(value.double(), want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("iters", [1, 2, 3, 20])
def test_sinkhorn_rounds_count(iters):
    args, kwargs = arguments(9)
    args = (*args[:2], args[2] * 6, *args[3:])  # large logits converge slowly, so that every round is visible
    comb = ops.mhc_pre(*args, **{**kwargs, "sinkhorn_iters": iters})[2].double()
    for rounds in range(max(iters - 1, 1), iters + 2):
        distance = (comb - plain.pre(*args, **{**kwargs, "sinkhorn_iters": rounds})[2]).abs().max()
        assert distance < 2e-6 if rounds == iters else distance > 1e-4


def test_columns_sum_to_one_for_extreme_logits():
    args, kwargs = arguments(9)
    args = (*args[:2], torch.tensor([80.0, 80.0, 80.0]), *args[3:])
    x, post, comb = ops.mhc_pre(*args, **kwargs)
    assert x.isfinite().all() and post.isfinite().all() and comb.isfinite().all()
    # The last step turns a column sum s, near 1 after 20 rounds, into s / (s + 1e-6).
    torch.testing.assert_close(comb.sum(-2), torch.ones(9, 4), rtol=0, atol=5e-6)


def test_bf16_rounds_after_the_collapse_and_after_the_norm():
    args, kwargs = arguments(6, torch.bfloat16)
    x, post, comb = ops.mhc_pre(*args, **kwargs)
    twice, want_post, want_comb = plain.pre(*args, **kwargs, round_x=plain.round_bf16)
    once = plain.pre(*args, **kwargs)[0]
    torch.testing.assert_close(post.double(), want_post, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(comb.double(), want_comb, rtol=1e-5, atol=2e-6)
    # fp32 and float64 round apart only within 1e-6 of a bf16 tie: far fewer than 1 % of the elements.
    assert (x != twice.bfloat16()).double().mean() < 0.01
    assert (x != once.bfloat16()).double().mean() > 0.1


def test_row_is_independent_of_the_batch():
    args, kwargs = arguments(4225)
    plain.assert_rows_independent(lambda rows: ops.mhc_pre(args[0][rows].clone(), *args[1:], **kwargs))


def test_golden_first_sublayer():
    """Official numerics: the streams before block 0 are copies of the embedding, so nothing precedes this op."""
    golden = plain.golden("layers_official")
    embedded = plain.nano("embed.weight")[golden["p140.ids"].long()]
    streams = embedded.unsqueeze(1).repeat(1, 4, 1)
    x = ops.mhc_pre(streams, *plain.nano_site("layers.0", "attn"), **plain.KEYWORDS)[0]
    assert x.dtype == torch.bfloat16
    # Bitwise equal where recorded; elsewhere another order of fp32 sums may round a bf16 tie the other way.
    recorded = golden["p140.layer0.attn_in"]
    assert (x != recorded).double().mean() < 1e-3
    torch.testing.assert_close(x, recorded, rtol=2**-7, atol=0)


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, torch.randn(3, 256), r"mhc_pre streams must have 3 dimensions, got 2"),
        (0, torch.randn(3, 4, 64).half(), r"streams must have dtype float32 or bfloat16, got torch.float16"),
        (1, torch.randn(24, 64), r"mhc_pre fn must have shape \[24, 256\], got \[24, 64\]"),
        (1, torch.randn(24, 256).bfloat16(), r"mhc_pre fn must have dtype torch.float32, got torch.bfloat16"),
        (2, torch.randn(1), r"mhc_pre scale must have shape \[3\], got \[1\]"),
        (3, torch.randn(4), r"mhc_pre base must have shape \[24\], got \[4\]"),
        (4, torch.randn(63), r"mhc_pre norm_weight must have shape \[64\], got \[63\]"),
    ],
)
def test_wrong_arguments(position, value, message):
    args, kwargs = arguments(3)
    args = (*args[:position], value, *args[position + 1 :])
    with pytest.raises(ValueError, match=message):
        ops.mhc_pre(*args, **kwargs)


def test_needs_a_sinkhorn_round():
    args, kwargs = arguments(3)
    with pytest.raises(ValueError, match="mhc_pre sinkhorn_iters must be at least 1, got 0"):
        ops.mhc_pre(*args, **{**kwargs, "sinkhorn_iters": 0})
