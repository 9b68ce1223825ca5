import numpy as np
import pytest
import torch

from dsv4 import ops


def naive(outs, lses, sink):
    parts, tokens, heads, dim = outs.shape
    out, lse = np.zeros((tokens, heads, dim)), np.full((tokens, heads), -np.inf)
    for t in range(tokens):
        for h in range(heads):
            present = [r for r in range(parts) if lses[r, t, h] > -np.inf]
            if not present:
                continue
            top = max(lses[r, t, h] for r in present)
            mass = {r: np.exp(lses[r, t, h] - top) for r in present}
            lse[t, h] = top + np.log(sum(mass.values()))
            total = sum(mass.values()) + np.exp(sink[h] - top)
            out[t, h] = sum(mass[r] * outs[r, t, h] for r in present) / total
    return out, lse


def random_parts(parts, tokens, seed, heads=3, dim=5):
    rng = np.random.default_rng(seed)
    outs, lses = rng.normal(size=(parts, tokens, heads, dim)), 4 * rng.normal(size=(parts, tokens, heads))
    lses[rng.random(lses.shape) < 0.3] = -np.inf
    sink = rng.normal(size=heads)
    sink[0] = -np.inf
    return tuple(torch.tensor(a, dtype=torch.float32) for a in (outs, lses, sink))


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("num_tokens", [0, 1, 33])
def test_matches_numpy(num_tokens, parts):
    args = random_parts(parts, num_tokens, seed=parts)
    out, lse = ops.lse_merge(*args)
    expected_out, expected_lse = naive(*(a.double().numpy() for a in args))
    np.testing.assert_allclose(out.numpy(), expected_out, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(lse.numpy(), expected_lse, rtol=1e-6, atol=1e-6)


def test_bf16_rounds_once():
    outs, lses, sink = random_parts(4, 20, seed=0)
    outs = outs.bfloat16()
    exact, exact_lse = ops.lse_merge(outs.float(), lses, sink)
    out, lse = ops.lse_merge(outs, lses, sink)
    assert torch.equal(out, exact.bfloat16()) and torch.equal(lse, exact_lse)


def test_empty_rows_and_empty_parts():
    outs, lses, sink = random_parts(3, 4, seed=1)
    lses[:, 1], lses[1, 2] = -torch.inf, -torch.inf
    outs[:, 1], outs[1, 2] = torch.nan, torch.nan  # an empty part's output is never looked at
    outs[lses == -torch.inf] = torch.nan
    out, lse = ops.lse_merge(outs, lses, sink)
    assert (out[1] == 0).all() and (lse[1] == -torch.inf).all()
    assert out.isfinite().all()


def test_extreme_values():
    """Masses span more than the range of fp32, and the sink may take everything."""
    outs = torch.randn(2, 1, 2, 3)
    lses = torch.tensor([[[300.0, -300.0]], [[-300.0, -300.0]]])
    out, lse = ops.lse_merge(outs, lses, torch.tensor([-torch.inf, 400.0]))
    assert torch.equal(out[0, 0], outs[0, 0, 0]) and lse[0, 0] == 300.0
    assert (out[0, 1] == 0).all() and lse[0, 1] == torch.tensor(-300.0 + np.log(2.0), dtype=torch.float32)


def test_one_part_only_applies_the_sink():
    outs, lses, _ = random_parts(1, 9, seed=2)
    lses = torch.randn(lses.shape)
    out, lse = ops.lse_merge(outs, lses, torch.full((3,), -torch.inf))
    torch.testing.assert_close(out, outs[0], rtol=1e-6, atol=0)
    assert torch.equal(lse, lses[0])


def test_order_of_parts_does_not_matter_and_rows_are_independent():
    outs, lses, sink = random_parts(4, 11, seed=3)
    out, lse = ops.lse_merge(outs, lses, sink)
    swapped, swapped_lse = ops.lse_merge(outs.flip(0), lses.flip(0), sink)
    torch.testing.assert_close(swapped, out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(swapped_lse, lse, rtol=1e-6, atol=1e-6)
    for t in range(11):
        alone, alone_lse = ops.lse_merge(outs[:, t : t + 1], lses[:, t : t + 1], sink)
        assert torch.equal(alone[0], out[t]) and torch.equal(alone_lse[0], lse[t])


def test_errors():
    outs, lses, sink = random_parts(2, 3, seed=4)
    with pytest.raises(ValueError, match="outs must be float32 or bfloat16, got torch.float16"):
        ops.lse_merge(outs.half(), lses, sink)
    with pytest.raises(ValueError, match="lses and sink must be float32, got torch.float64 and torch.float32"):
        ops.lse_merge(outs, lses.double(), sink)
    with pytest.raises(ValueError, match="outs and lses must have the same parts, got 2 and 1"):
        ops.lse_merge(outs, lses[:1], sink)
    with pytest.raises(ValueError, match=r"lses and sink must have 3 heads, got 3 and \[2\]"):
        ops.lse_merge(outs, lses, sink[:2])
