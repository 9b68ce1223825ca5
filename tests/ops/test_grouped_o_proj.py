import numpy as np
import pytest
import torch

from dsv4 import ops

from . import number_formats as nf

MAX_POSITIONS = 70


def _inputs(num_tokens, heads=6, head_dim=40, rope_dim=16, groups=3, rank=10, dtype=torch.float32, seed=0):
    """o, angles, positions, weight; the op takes ``_table(angles)``."""
    rng = np.random.default_rng(seed)
    o = torch.tensor(rng.normal(size=(num_tokens, heads, head_dim)), dtype=dtype)
    angles = rng.uniform(-4, 4, size=(MAX_POSITIONS, rope_dim // 2))
    positions = torch.from_numpy(rng.integers(0, MAX_POSITIONS, size=num_tokens))
    weight = torch.tensor(rng.normal(size=(groups, rank, heads // groups * head_dim)), dtype=dtype)
    return o, angles, positions, weight


def _table(angles: np.ndarray) -> torch.Tensor:
    return torch.tensor(np.concatenate((np.cos(angles), np.sin(angles)), -1), dtype=torch.float32)


def _unrotated(o: torch.Tensor, angles: np.ndarray, positions: torch.Tensor) -> np.ndarray:
    """float64 conjugate rotation of the last dimensions."""
    x = o.float().numpy().astype(np.float64)
    rope_dim = 2 * angles.shape[1]
    turned = x[..., -rope_dim::2] + 1j * x[..., x.shape[-1] - rope_dim + 1 :: 2]
    turned = turned * np.exp(-1j * angles[positions.numpy()])[:, None]
    x[..., -rope_dim::2], x[..., x.shape[-1] - rope_dim + 1 :: 2] = turned.real, turned.imag
    return x


def _unrotated_bf16(o: torch.Tensor, angles: np.ndarray, positions: torch.Tensor) -> np.ndarray:
    """The same in fp32, one numpy operation at a time, then rounded to bf16."""
    x = o.float().numpy()
    rope_dim = 2 * angles.shape[1]
    cos, sin = np.split(_table(angles).numpy()[positions.numpy()][:, None], 2, axis=-1)
    even, odd = x[..., -rope_dim::2].copy(), x[..., x.shape[-1] - rope_dim + 1 :: 2].copy()
    x[..., -rope_dim::2], x[..., x.shape[-1] - rope_dim + 1 :: 2] = even * cos + odd * sin, odd * cos - even * sin
    return nf.bf16_values(nf.bf16_bits(x)).astype(np.float64)


def _grouped(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    groups, _, width = weight.shape
    return np.concatenate([x.reshape(len(x), groups, width)[:, g] @ weight[g].T for g in range(groups)], axis=-1)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 65])
def test_matches_float64(num_tokens, deterministic):
    o, angles, positions, weight = _inputs(num_tokens)
    got = ops.grouped_o_proj(o, _table(angles), positions, weight, deterministic=deterministic)
    x, w = _unrotated(o, angles, positions), weight.numpy().astype(np.float64)
    # three extra roundings per element for the rotation, two for cosine and sine, beside the 80-term sum
    bound = (80 + 5) * 1.5 * 2.0**-24 * _grouped(np.abs(x) + np.abs(nf.as_numpy(o)), np.abs(w))
    assert got.shape == (num_tokens, 30) and got.dtype == torch.float32
    assert (np.abs(got.numpy() - _grouped(x, w)) <= bound).all()


@pytest.mark.parametrize("shape", [{}, {"heads": 4, "groups": 4}, {"heads": 3, "groups": 1, "rope_dim": 40}])
def test_bf16_rotation_rounds_before_the_product(shape):
    o, angles, positions, weight = _inputs(33, dtype=torch.bfloat16, **shape)
    got = ops.grouped_o_proj(o, _table(angles), positions, weight, deterministic=True)
    assert got.dtype == torch.bfloat16
    w = nf.as_numpy(weight).astype(np.float64)

    def inside(x: np.ndarray) -> np.ndarray:
        want, size = _grouped(x, w), _grouped(np.abs(x), np.abs(w))
        return np.abs(nf.as_numpy(got) - want) <= 2.0**-8 * np.abs(want) + 1.01 * w.shape[-1] * 2.0**-24 * size

    assert inside(_unrotated_bf16(o, angles, positions)).all()
    assert inside(_unrotated(o, angles, positions)).mean() < 0.95  # rounding only after the product shows


def test_a_head_reaches_only_its_own_group():
    o, angles, positions, weight = _inputs(5)
    before = ops.grouped_o_proj(o, _table(angles), positions, weight, deterministic=True).view(5, 3, 10)
    o[:, 3] += 1  # heads 2 and 3 form group 1
    after = ops.grouped_o_proj(o, _table(angles), positions, weight, deterministic=True).view(5, 3, 10)
    assert torch.equal(before[:, [0, 2]], after[:, [0, 2]])
    assert (before[:, 1] != after[:, 1]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fp32_weight_equals_its_bf16_copy(dtype):
    o, angles, positions, weight = _inputs(5, dtype=dtype)
    weight = weight.bfloat16()
    got = [ops.grouped_o_proj(o, _table(angles), positions, w, deterministic=True) for w in (weight, weight.float())]
    assert torch.equal(*got)


def test_pad_rows_give_zeros():
    o, angles, positions, weight = _inputs(6)
    expected = ops.grouped_o_proj(o, _table(angles), positions, weight, deterministic=True)
    o[[1, 5]], positions[[1, 5]] = float("nan"), -1
    expected[[1, 5]] = 0
    assert torch.equal(ops.grouped_o_proj(o, _table(angles), positions, weight, deterministic=True), expected)
    got = ops.grouped_o_proj(o, _table(angles), positions, weight, deterministic=False)
    assert torch.equal(got == 0, expected == 0) and got.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 65, 129])
def test_a_row_alone_is_the_row_in_a_batch(num_tokens, dtype):
    o, angles, positions, weight = _inputs(num_tokens, dtype=dtype)
    table = _table(angles)
    batch = ops.grouped_o_proj(o, table, positions, weight, deterministic=True)
    for i in range(num_tokens):
        row = slice(i, i + 1)
        assert torch.equal(ops.grouped_o_proj(o[row], table, positions[row], weight, deterministic=True)[0], batch[i])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"o": torch.randn(5, 240)}, r"o must be a float32 or bfloat16 \[tokens, heads, head_dim\], got 2-D"),
        ({"weight": torch.randn(3, 10, 80).half()}, r"weight must be a float32 or bfloat16 .* got 3-D torch.float16"),
        ({"weight": torch.randn(4, 10, 60)}, r"groups must divide 6 heads, got 4"),
        ({"weight": torch.randn(3, 10, 40)}, r"weight must take 80 inputs, got 40"),
        ({"positions": torch.arange(5).int()}, r"positions must be 1-D int64, got 1-D torch.int32"),
        ({"positions": torch.tensor([3])}, r"positions must have the 5 rows of o, got 1"),
        ({"table": torch.randn(70, 15)}, r"rope_dim must be even and in \[2, 40\], got 15"),
        ({"table": torch.randn(70, 42)}, r"rope_dim must be even and in \[2, 40\], got 42"),
        ({"table": torch.randn(70, 16).bfloat16()}, r"rope_table must be 2-D float32, got 2-D torch.bfloat16"),
    ],
)
def test_errors(change, message):
    o, angles, positions, weight = _inputs(5)
    given = {"o": o, "table": _table(angles), "positions": positions, "weight": weight} | change
    with pytest.raises(ValueError, match="grouped_o_proj " + message):
        ops.grouped_o_proj(*given.values(), deterministic=False)
