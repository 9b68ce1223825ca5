import numpy as np
import pytest
import torch

from dsv4 import ops

FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E4M3 = torch.float8_e4m3fn


def call(q, weights, table, positions, quantize="none", dtype=torch.float32, scale=0.1):
    return ops.indexer_query(q, weights, table, positions, scale=scale, quantize=quantize, dtype=dtype)


def random_table(rng, rows, rope_dim):
    angles = rng.uniform(-3, 3, size=(rows, rope_dim // 2))
    return angles, torch.tensor(np.concatenate((np.cos(angles), np.sin(angles)), axis=1), dtype=torch.float32)


def quarter_turns(rng, rows, rope_dim):
    """Rotations by multiples of 90 degrees: exact in every precision."""
    turns = rng.integers(0, 4, size=(rows, rope_dim // 2))
    cos, sin = np.array([1, 0, -1, 0])[turns], np.array([0, 1, 0, -1])[turns]
    return cos + 1j * sin, torch.tensor(np.concatenate((cos, sin), axis=1), dtype=torch.float32)


def turn(vector, factors):
    """Interleaved rotation of the last dimensions of one vector, as complex numbers."""
    out, tail = vector.astype(np.float64).copy(), 2 * len(factors)
    pairs = (vector[-tail::2] + 1j * vector[len(vector) - tail + 1 :: 2]) * factors
    out[-tail::2], out[len(vector) - tail + 1 :: 2] = pairs.real, pairs.imag
    return out


def sylvester(size):
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def naive_fp4(vector):
    """Nearest e2m1 value per block of 32, ties to the even code, scale the smallest power of two that fits."""
    out = []
    for block in vector.reshape(-1, 32):
        scale = 2.0 ** np.ceil(np.log2(max(np.abs(block).max(), 6 * 2.0**-126) / 6))
        for value in block / scale:
            distance = np.abs(FP4 - abs(value))
            ties = np.flatnonzero(distance == distance.min())
            code = next((c for c in ties if c % 2 == 0), ties[0])
            out.append(np.copysign(FP4[code], value) * scale)
    return np.array(out)


def bf16(x):
    return torch.tensor(x, dtype=torch.float32).bfloat16()


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 33])
def test_rotation_and_weights(num_tokens):
    rng = np.random.default_rng(num_tokens)
    q, weights = rng.normal(size=(num_tokens, 3, 24)), rng.normal(size=(num_tokens, 3))
    angles, table = random_table(rng, 50, 8)
    positions = rng.integers(0, 50, size=num_tokens)
    got_q, got_weights = call(
        torch.tensor(q, dtype=torch.float32), torch.tensor(weights, dtype=torch.float32), table, torch.tensor(positions)
    )
    expected = np.array([[turn(h, np.exp(1j * angles[p])) for h in row] for row, p in zip(q, positions, strict=True)])
    np.testing.assert_allclose(got_q.numpy(), expected.reshape(q.shape), rtol=0, atol=2e-6)
    np.testing.assert_allclose(got_weights.numpy(), weights * 0.1, rtol=3e-7)


def test_fp4_is_bit_exact():
    """Quarter turns and small integers keep every step before the two roundings exact."""
    rng = np.random.default_rng(1)
    q = rng.integers(-6, 7, size=(9, 2, 64)).astype(np.float64)
    factors, table = quarter_turns(rng, 16, 32)
    positions = rng.integers(0, 16, size=9)
    got, _ = call(bf16(q), bf16(rng.normal(size=(9, 2))), table, torch.tensor(positions), "fp4", torch.bfloat16)
    for t in range(9):
        for h in range(2):
            rotated = bf16(sylvester(64) @ turn(q[t, h], factors[positions[t]]) / 8).double().numpy()
            np.testing.assert_array_equal(got[t, h].double().numpy(), naive_fp4(rotated))


def test_bf16_weights_round_after_scaling():
    weights = torch.randn(40, 4).bfloat16()
    scale = 8192**-0.5
    _, got = call(torch.randn(40, 4, 32).bfloat16(), weights, torch.randn(8, 16), torch.arange(40) % 8, scale=scale)
    assert got.dtype == torch.float32
    assert torch.equal(got, (weights * scale).float())
    assert not torch.equal(got, weights.float() * scale)


def test_output_dtype_only_rounds():
    q, weights, table = torch.randn(5, 2, 32), torch.randn(5, 2), torch.randn(8, 16)
    exact, gain = call(q, weights, table, torch.arange(5))
    rounded, same = call(q, weights, table, torch.arange(5), dtype=torch.bfloat16)
    assert torch.equal(rounded, exact.bfloat16()) and torch.equal(gain, same)
    wide, _ = call(q.bfloat16(), weights.bfloat16(), table, torch.arange(5))
    narrow, _ = call(q.bfloat16(), weights.bfloat16(), table, torch.arange(5), dtype=torch.bfloat16)
    assert wide.dtype == torch.float32 and torch.equal(wide, narrow.float())


@pytest.mark.parametrize("act", [torch.float32, torch.bfloat16], ids=str)
def test_e4m3_folds_one_power_of_two_per_head_into_the_weight(act):
    q = (torch.randn(17, 3, 128) * torch.rand(17, 3, 1).exp2()).to(act)
    weights, table, positions = torch.randn(17, 3).to(act), torch.randn(17, 64), torch.arange(17)
    exact, gain = call(q, weights, table, positions)
    codes, folded = call(q, weights, table, positions, dtype=E4M3)
    factor = (folded / gain).unsqueeze(-1)
    mantissa, _ = torch.frexp(factor)
    assert codes.dtype == E4M3 and (mantissa == 0.5).all()
    peak = codes.float().abs().amax(-1)
    assert ((peak > 224 - 16) & (peak <= 448)).all()  # the smallest scale that fits: above half the range
    # e4m3 keeps three mantissa bits: half a step is 2^-4 of the value, or 2^-10 of the scale below 2^-6
    error = (codes.float() * factor - exact.float()).abs()
    assert (error <= exact.float().abs() * 2**-4 + factor * 2**-10).all()


def test_e4m3_of_fp4_values_changes_no_score():
    """Values of one FP4 block are exact in e4m3 when the blocks' scales are close."""
    q = torch.randn(20, 4, 128).bfloat16()
    args = (q, torch.randn(20, 4).bfloat16(), torch.randn(20, 64).bfloat16().float(), torch.arange(20), "fp4")
    dense, gain = call(*args, dtype=torch.bfloat16)
    codes, folded = call(*args, dtype=E4M3)
    assert torch.equal(dense.float() * gain.unsqueeze(-1), codes.float() * folded.unsqueeze(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, E4M3], ids=str)
@pytest.mark.parametrize("quantize", ["none", "fp4"])
def test_pads_are_zero_and_rows_do_not_see_each_other(quantize, dtype):
    q, weights, table = torch.randn(6, 2, 32), torch.randn(6, 2), torch.randn(9, 16)
    q[[1, 4]], weights[[1, 4]] = torch.nan, torch.nan
    positions = torch.tensor([3, -1, 8, 0, -4, 5])
    got_q, got_weights = call(q, weights, table, positions, quantize, dtype)
    assert (got_q[[1, 4]].float() == 0).all() and (got_weights[[1, 4]] == 0).all()
    for t in (0, 2, 3, 5):
        one = slice(t, t + 1)
        alone_q, alone_weights = call(q[one], weights[one], table, positions[one], quantize, dtype)
        assert torch.equal(alone_q.float(), got_q[one].float()) and torch.equal(alone_weights, got_weights[one])


def test_errors():
    q, weights, table, positions = torch.randn(2, 3, 48), torch.randn(2, 3), torch.randn(4, 16), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="quantize must be one of .*, got 'fp8'"):
        call(q, weights, table, positions, "fp8")
    with pytest.raises(ValueError, match="FP4 head dimension must be a power of two from 32, got 48"):
        call(q, weights, table, positions, "fp4")
    with pytest.raises(ValueError, match="dtype must be one of .*, got torch.float16"):
        call(q, weights, table, positions, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"weights must have 3 heads, got \[2\]"):
        call(q, weights[:, :2], table, positions)
    with pytest.raises(ValueError, match="rope_dim must be even and at most 48, got 64"):
        call(q, weights, torch.randn(4, 64), positions)
    with pytest.raises(ValueError, match="inputs must be float32 or bfloat16, got torch.float16"):
        call(q.half(), weights, table, positions)
