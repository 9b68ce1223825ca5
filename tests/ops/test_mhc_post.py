from dataclasses import replace

import pytest
import torch

from dsv4 import ops
from dsv4.ops.mhc_post import example
from dsv4.ops.shapes import tiny

from . import plain_mhc as plain

CPU = torch.device("cpu")


def arguments(num_tokens: int, dtype=torch.float32, num_streams: int = 4, seed: int = 0):
    shape = replace(tiny, num_streams=num_streams)
    return example(shape, num_tokens=num_tokens, device=CPU, dtype=dtype, seed=seed)[0]


@pytest.mark.parametrize("num_streams", [1, 2, 4])
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_matches_loops(num_tokens, num_streams):
    args = arguments(num_tokens, num_streams=num_streams)
    torch.testing.assert_close(ops.mhc_post(*args).double(), plain.post(*args), rtol=1e-6, atol=2e-6)


def test_first_index_of_comb_is_contracted():
    y, streams, post, comb = arguments(7)
    expected = plain.post(y, streams, post, comb)
    untransposed = ops.mhc_post(y, streams, post, comb.transpose(1, 2)).double()
    assert (untransposed - expected).abs().max() > 0.1
    moved = torch.zeros(7, 4, 4)
    moved[:, 1, 3] = 1.0  # stream 1 goes to stream 3, everything else is dropped
    out = ops.mhc_post(y, streams, torch.zeros_like(post), moved)
    assert torch.equal(out[:, 3], streams[:, 1])
    assert not out[:, :3].any()


def test_bf16_rounds_once():
    y, streams, post, comb = arguments(5, torch.bfloat16)
    exact = ops.mhc_post(y.float(), streams.float(), post, comb)
    assert torch.equal(ops.mhc_post(y, streams, post, comb), exact.bfloat16())


def test_row_is_independent_of_the_batch():
    args = arguments(4225)
    plain.assert_rows_independent(lambda rows: [ops.mhc_post(*(a[rows].clone() for a in args))])


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, torch.randn(3, 63), r"mhc_post y must have shape \[T, 64\], got \[3, 63\]"),
        (0, torch.randn(3, 64).bfloat16(), r"mhc_post y must have dtype torch.float32, got torch.bfloat16"),
        (2, torch.randn(3, 3), r"mhc_post post must have shape \[T, 4\], got \[3, 3\]"),
        (3, torch.randn(3, 16), r"mhc_post comb must have shape \[T, 4, 4\], got \[3, 16\]"),
    ],
)
def test_wrong_arguments(position, value, message):
    args = arguments(3)
    args = (*args[:position], value, *args[position + 1 :])
    with pytest.raises(ValueError, match=message):
        ops.mhc_post(*args)
