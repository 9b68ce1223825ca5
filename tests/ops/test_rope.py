import numpy as np
import pytest
import torch

from dsv4.ops import _rope


def _table(max_positions: int, rope_dim: int, seed: int) -> tuple[torch.Tensor, np.ndarray]:
    angles = np.random.default_rng(seed).uniform(-4, 4, size=(max_positions, rope_dim // 2))
    return torch.tensor(np.concatenate((np.cos(angles), np.sin(angles)), -1), dtype=torch.float32), angles


def _complex_rotation(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Independent form: pairs (2i, 2i+1) of the last dimensions as complex numbers."""
    rope_dim = 2 * angles.shape[-1]
    tail = x[..., -rope_dim:].astype(np.float64)
    angles = angles.reshape(angles.shape[0], *([1] * (x.ndim - 2)), rope_dim // 2)
    turned = (tail[..., 0::2] + 1j * tail[..., 1::2]) * np.exp(1j * angles)
    out = x.astype(np.float64).copy()
    out[..., -rope_dim::2], out[..., x.shape[-1] - rope_dim + 1 :: 2] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("shape", [(5, 64), (7, 3, 96), (0, 2, 96), (1, 2, 3, 80)])
def test_matches_complex_multiplication(shape, inverse):
    table, angles = _table(50, 64, seed=len(shape))
    rng = np.random.default_rng(1)
    x = rng.normal(size=shape).astype(np.float32)
    positions = rng.integers(0, 50, size=shape[0])
    rows = _rope.table_rows(table, torch.from_numpy(positions))
    before = torch.from_numpy(x.copy())
    got = _rope.rotate(before, rows, inverse=inverse)
    want = _complex_rotation(x, -angles[positions] if inverse else angles[positions])
    np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=2e-6)  # |x| < 6: three roundings of 2^-24 * 8 each
    np.testing.assert_array_equal(got.numpy()[..., :-64], x[..., :-64])
    np.testing.assert_array_equal(before.numpy(), x)


def test_inverse_undoes_the_rotation():
    table, _ = _table(9, 32, seed=3)
    x = torch.randn(9, 2, 40)
    turned = _rope.rotate(x, table)
    assert (turned - x).abs().max() > 0.5
    torch.testing.assert_close(_rope.rotate(turned, table, inverse=True), x, rtol=0, atol=4e-6)


def test_bf16_rounds_once():
    table, _ = _table(9, 32, seed=4)
    x = torch.randn(9, 2, 40).bfloat16()
    assert torch.equal(_rope.rotate(x, table), _rope.rotate(x.float(), table).bfloat16())


def test_pad_positions_read_the_first_row():
    table, _ = _table(9, 32, seed=5)
    assert torch.equal(_rope.table_rows(table, torch.tensor([-1, 8, -1, 0])), table[[0, 8, 0, 0]])
