import numpy as np
import pytest
import torch
from safetensors import safe_open

from dsv4.ops import _formats

from . import number_formats as nf


def test_all_e4m3_codes_decode():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 128)
    scale = torch.tensor([[2.0**-3], [2.0**5]])
    got = _formats.dequantize_fp8(codes, scale).numpy()
    want = nf.e4m3_table().reshape(2, 128) * [[2.0**-3], [2.0**5]]
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


def test_all_finite_e4m3_codes_are_fixed_points():
    codes = np.array([c for c in range(256) if c & 127 != 127], dtype=np.uint8)
    values = nf.e4m3_table()[codes].reshape(2, 127)
    x = np.concatenate((values, [[448.0], [-448.0]]), axis=1)  # the maximum pins the block's scale to 1
    got, scale = _formats.quantize_fp8(torch.tensor(x, dtype=torch.float32))
    assert torch.equal(scale, torch.ones(2, 1))
    np.testing.assert_array_equal(nf.as_numpy(got)[:, :127], codes.reshape(2, 127))


def test_all_fp4_codes_are_fixed_points():
    x = torch.tensor(nf.e2m1_table().repeat(2), dtype=torch.float32).view(1, 32)  # holds ±6, so the scale is 1
    codes, scale = _formats.quantize_fp4(x)
    assert torch.equal(scale, torch.ones(1, 1))
    assert codes.flatten().tolist() == [c for c in range(16) for _ in range(2)]  # −0 keeps its sign


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_ties_to_even_and_both_neighbours(kind):
    positive = nf.e4m3_table()[:127] if kind == "fp8" else nf.e2m1_table()[:8]
    middle = ((positive[:-1] + positive[1:]) / 2).astype(np.float32)
    points = np.concatenate((middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(999))))
    points = np.concatenate((points, -points))
    block, top = (128, 448.0) if kind == "fp8" else (32, 6.0)
    padded = np.resize(points, (-(-len(points) // (block - 1)), block - 1))
    x = np.concatenate((padded, np.full((len(padded), 1), top, np.float32)), axis=1)
    quantize = _formats.quantize_fp8 if kind == "fp8" else _formats.quantize_fp4
    codes, scale = quantize(torch.from_numpy(x))
    assert torch.equal(scale, torch.ones_like(scale))
    got = nf.as_numpy(codes)[:, :-1].flatten()[: len(points)]
    encode = nf.e4m3_encode if kind == "fp8" else nf.e2m1_encode
    np.testing.assert_array_equal(got, encode(points))
    ties = np.concatenate((got[: len(middle)], got[len(points) // 2 : len(points) // 2 + len(middle)]))
    assert (ties % 2 == 0).all()


@pytest.mark.parametrize("limit", [448.0, 6.0])
def test_scale_is_the_smallest_power_of_two_that_fits(limit):
    edge = np.float32(limit) * np.exp2(np.arange(-22, 100, dtype=np.float32))
    amax = np.concatenate((edge, np.nextafter(edge, np.float32(0)), np.nextafter(edge, np.float32(np.inf))))
    x = torch.zeros(len(amax), 32)
    x[:, 7] = torch.from_numpy(amax)
    _, scale = _formats.quantize_fp8(x, 32) if limit == 448 else _formats.quantize_fp4(x)
    np.testing.assert_array_equal(scale[:, 0].numpy(), nf.block_scale(amax, limit))


@pytest.mark.parametrize(("kind", "smallest"), [("fp8", 2.0**-22), ("fp4", 2.0**-126)])
def test_scale_floor(kind, smallest):
    x = torch.rand(3, 64) * (9e-5 if kind == "fp8" else 2.0**-130)
    codes, scale = _formats.quantize_fp8(x, 64) if kind == "fp8" else _formats.quantize_fp4(x)
    assert torch.equal(scale, torch.full_like(scale, smallest))
    want, _ = nf.quantize(x.numpy(), 64 if kind == "fp8" else 32, kind)
    np.testing.assert_array_equal(nf.as_numpy(codes), want)


def test_all_fp4_codes_decode_under_all_scale_bytes():
    packed = torch.arange(256, dtype=torch.uint8).repeat(256, 1)  # every pair of codes, under every scale byte
    packed = packed.view(256, 16, 16)
    scale_bytes = torch.arange(256, dtype=torch.uint8).view(256, 1, 1).expand(256, 16, 1).contiguous()
    got = _formats.dequantize_fp4(packed, scale_bytes).numpy()
    pairs = np.arange(256)
    codes = np.stack((pairs % 16, pairs // 16), axis=-1).reshape(16, 32)  # the even element is the low nibble
    factor = 2.0 ** (np.arange(256.0) - 127)
    factor[255] = np.nan
    with np.errstate(over="ignore"):
        want = (nf.e2m1_table()[codes] * factor[:, None, None]).astype(np.float32)
    np.testing.assert_array_equal(got, want)


def test_pack_and_unpack_all_bytes():
    packed = torch.arange(256, dtype=torch.uint8)
    codes = _formats.unpack_fp4(packed)
    np.testing.assert_array_equal(codes.numpy(), np.array([[b & 15, b >> 4] for b in range(256)]).flatten())
    assert torch.equal(_formats.pack_fp4(codes), packed)
    assert torch.equal(_formats.unpack_fp4(packed.view(torch.int8)), codes)  # checkpoints store signed bytes


def test_all_e8m0_bytes():
    codes = torch.arange(256, dtype=torch.uint8)
    value = _formats.decode_e8m0(codes)
    want = 2.0 ** (np.arange(256.0) - 127)
    want[255] = np.nan
    np.testing.assert_array_equal(value.numpy(), want)
    np.testing.assert_array_equal(_formats.decode_e8m0(codes.view(torch.float8_e8m0fnu)).numpy(), want)
    assert torch.equal(_formats.encode_e8m0(value[1:255]), codes[1:255])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "block", "size"), [("fp8", 128, 300), ("fp8", 64, 448), ("fp4", 32, 96)])
def test_quantize_matches_numpy(kind, block, size, dtype):
    x = torch.from_numpy(nf.wide(np.random.default_rng(size), 65, size)).to(dtype)
    codes, scale = _formats.quantize_fp8(x, block) if kind == "fp8" else _formats.quantize_fp4(x)
    want_codes, want_scale = nf.quantize(x.float().numpy(), block, kind)
    np.testing.assert_array_equal(nf.as_numpy(codes), want_codes)
    np.testing.assert_array_equal(scale.numpy(), want_scale)


def test_quantize_no_rows():
    for codes, scale in (_formats.quantize_fp8(torch.randn(0, 130)), _formats.quantize_fp4(torch.randn(0, 64))):
        assert codes.shape[0] == scale.shape[0] == 0 and scale.shape[1] == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_simulation_is_the_round_trip_and_idempotent(dtype):
    x = torch.from_numpy(nf.wide(np.random.default_rng(3), 129, 192)).to(dtype)
    for once, again, kind, block in (
        (_formats.simulate_fp8(x, 64), lambda v: _formats.simulate_fp8(v, 64), "fp8", 64),
        (_formats.simulate_fp4(x), _formats.simulate_fp4, "fp4", 32),
    ):
        codes, scale = nf.quantize(x.float().numpy(), block, kind)
        table = nf.e4m3_table() if kind == "fp8" else nf.e2m1_table()
        np.testing.assert_array_equal(once.float().numpy(), table[codes] * scale.repeat(block, -1))
        assert once.dtype == dtype and not torch.equal(once, x)
        assert torch.equal(again(once), once)


@pytest.mark.parametrize("shape", [(128, 128), (200, 300), (3, 130, 1)])
def test_weight_blocks(shape):
    rng = np.random.default_rng(len(shape))
    rows, cols = shape[-2:]
    weight = torch.from_numpy(rng.normal(size=shape).astype(np.float32)).to(torch.float8_e4m3fn)
    scale = 2.0 ** rng.integers(-9, 9, size=(*shape[:-2], -(-rows // 128), -(-cols // 128)))
    spread = np.kron(scale, np.ones((128, 128)))[..., :rows, :cols]
    got = _formats.dequantize_fp8_weight(weight, torch.tensor(scale, dtype=torch.float32))
    np.testing.assert_array_equal(got.numpy(), nf.e4m3_table()[nf.as_numpy(weight)] * spread)


def _sylvester(size: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.kron(np.array([[1, 1], [1, -1]]), matrix)
    return matrix / np.sqrt(size)


@pytest.mark.parametrize("size", [1, 2, 64, 128])
@pytest.mark.parametrize("rows", [0, 1, 65])
def test_hadamard_is_the_kronecker_power(size, rows):
    x = np.random.default_rng(rows).normal(size=(rows, 3, size)).astype(np.float32)
    got = _formats.hadamard(torch.from_numpy(x))
    # log2(size) levels of fp32 additions and one product: a few ulp of the largest value a row can reach
    np.testing.assert_allclose(got.numpy(), x.astype(np.float64) @ _sylvester(size).T, rtol=0, atol=1e-5)
    np.testing.assert_allclose(_formats.hadamard(got).numpy(), x, rtol=0, atol=1e-5)
    for i in range(rows):
        assert torch.equal(_formats.hadamard(torch.from_numpy(x[i])), got[i])


def test_hadamard_rounds_once():
    x = torch.randn(7, 128).bfloat16()
    assert torch.equal(_formats.hadamard(x), _formats.hadamard(x.float()).bfloat16())


def test_hadamard_size():
    with pytest.raises(ValueError, match="Hadamard size must be a power of two, got 96"):
        _formats.hadamard(torch.randn(2, 96))


@pytest.mark.parametrize("layer", [2, 3])
def test_recorded_compressed_kv_is_a_fixed_point(layer):
    with safe_open(nf.GOLDEN / "layers_official.safetensors", "pt") as recorded:
        value = recorded.get_tensor(f"p140.layer{layer}.attn.compressed_kv")
    assert torch.equal(_formats.simulate_fp8(value[:, :448], 64), value[:, :448])
    assert not torch.equal(_formats.simulate_fp8(value, 64), value)  # the rotated dimensions are not quantised
