import pytest
import torch

from dsv4 import ops
from dsv4.ops.mhc_head import example
from dsv4.ops.shapes import tiny

from . import plain_mhc as plain

CPU = torch.device("cpu")


def arguments(num_tokens: int, dtype=torch.float32, seed: int = 0):
    return example(tiny, num_tokens=num_tokens, device=CPU, dtype=dtype, seed=seed)


def loops(streams, fn, scale, base, norm_weight, *, eps, hc_eps, round_x=list, **_) -> torch.Tensor:
    fn, (scale,), base, norm_weight = fn.tolist(), scale.tolist(), base.tolist(), norm_weight.tolist()
    rows = []
    for row in streams.tolist():
        weights = [plain.logistic(m * scale + b) + hc_eps for m, b in zip(plain.mixes(row, fn, eps), base, strict=True)]
        rows.append(plain.rms_norm(round_x(plain.collapse(row, weights)), norm_weight, eps))
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_matches_loops(num_tokens, deterministic):
    args, kwargs = arguments(num_tokens)
    got = ops.mhc_head(*args, **{**kwargs, "deterministic": deterministic})
    torch.testing.assert_close(got.double(), loops(*args, **kwargs), rtol=1e-5, atol=2e-6)


def test_bf16_rounds_after_the_collapse_and_after_the_norm():
    args, kwargs = arguments(6, torch.bfloat16)
    got = ops.mhc_head(*args, **kwargs)
    # fp32 and float64 round apart only within 1e-6 of a bf16 tie: far fewer than 1 % of the elements.
    assert (got != loops(*args, **kwargs, round_x=plain.round_bf16).bfloat16()).double().mean() < 0.01
    assert (got != loops(*args, **kwargs).bfloat16()).double().mean() > 0.1


def test_row_is_independent_of_the_batch():
    args, kwargs = arguments(4225)
    plain.assert_rows_independent(lambda rows: [ops.mhc_head(args[0][rows].clone(), *args[1:], **kwargs)])


def test_golden_mtp_logits():
    """The MTP block has the only recorded streams whose logits are recorded too."""
    golden = plain.golden("layers_exact")
    parameters = [plain.nano(f"mtp.0.{name}") for name in ("hc_head_fn", "hc_head_scale", "hc_head_base")]
    keywords = {"eps": 1e-6, "hc_eps": 1e-6, "deterministic": True}
    hidden = ops.mhc_head(golden["p40.mtp.out_streams"], *parameters, plain.nano("mtp.0.norm.weight"), **keywords)
    logits = hidden @ plain.nano("head.weight").float().T
    # Logits reach 15 and sum 256 products; another fp32 order measured 6e-6.
    torch.testing.assert_close(logits, golden["p40.mtp.logits"], rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (1, torch.randn(24, 256), r"mhc_head fn must have shape \[4, 256\], got \[24, 256\]"),
        (2, torch.randn(3), r"mhc_head scale must have shape \[1\], got \[3\]"),
        (3, torch.randn(4).bfloat16(), r"mhc_head base must have dtype torch.float32, got torch.bfloat16"),
        (4, torch.randn(64, 1), r"mhc_head norm_weight must have shape \[64\], got \[64, 1\]"),
    ],
)
def test_wrong_arguments(position, value, message):
    args, kwargs = arguments(3)
    args = (*args[:position], value, *args[position + 1 :])
    with pytest.raises(ValueError, match=message):
        ops.mhc_head(*args, **kwargs)
