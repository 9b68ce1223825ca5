import numpy as np
import pytest
import torch

from dsv4 import ops
from dsv4.ops import _formats, _paged
from dsv4.ops.shapes import nano, tiny

from . import contract

EPS, PAGE = 1e-6, 128


def inputs(num_tokens: int, *, head_dim: int = 96, rope_dim: int = 16, dtype=torch.float32, cache_dtype=None, seed=0):
    """Random rows; every third row is not written, the last of more than one is a pad."""
    g = torch.Generator().manual_seed(seed + num_tokens)
    angles = torch.rand(600, rope_dim // 2, generator=g) * 6.28
    positions = torch.randperm(600, generator=g)[:num_tokens]
    slots = torch.randperm(3 * PAGE, generator=g)[:num_tokens]
    slots[2::3] = -1
    if num_tokens > 1:
        positions[-1] = slots[-1] = -1
    if cache_dtype == torch.uint8:
        cache = torch.full((3, _paged.fp8_page_bytes(PAGE, head_dim)), 255, dtype=torch.uint8)
    else:
        cache = torch.full((3, PAGE, head_dim), float("nan"), dtype=cache_dtype or dtype)
    return {
        "q": (torch.randn(num_tokens, 3, head_dim, generator=g) * 4).to(dtype),
        "kv": (torch.randn(num_tokens, head_dim, generator=g) * 4).to(dtype),
        "kv_norm_weight": torch.randn(head_dim, generator=g).to(dtype),
        "rope_table": torch.cat((angles.cos(), angles.sin()), dim=-1),
        "positions": positions,
        "window_slots": slots,
        "window_cache": cache,
    }


def call(args: dict, *, quantize: bool = False) -> torch.Tensor:
    return ops.qkv_rope_cache(*args.values(), eps=EPS, quantize=quantize)


def turn(x: np.ndarray, row: np.ndarray) -> np.ndarray:
    rope_dim = row.size
    z = (x[-rope_dim::2] + 1j * x[-rope_dim + 1 :: 2]) * (row[: rope_dim // 2] + 1j * row[rope_dim // 2 :])
    return np.concatenate((x[:-rope_dim], np.stack((z.real, z.imag), axis=-1).reshape(-1)))


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 65])
def test_matches_numpy(num_tokens):
    args = inputs(num_tokens)
    got = call(args)
    cache, weight = args["window_cache"].view(-1, 96), args["kv_norm_weight"].double().numpy()
    written = set()
    for t, (position, slot) in enumerate(zip(args["positions"].tolist(), args["window_slots"].tolist(), strict=True)):
        if position < 0:
            assert slot == -1 and (got[t] == 0).all()
            continue
        row = args["rope_table"][position].double().numpy()
        for head, q in zip(got[t].numpy(), args["q"][t].double().numpy(), strict=True):
            np.testing.assert_allclose(head, turn(q / np.sqrt((q**2).mean() + EPS), row), rtol=1e-5, atol=1e-5)
        if slot >= 0:
            kv = args["kv"][t].double().numpy()
            want = turn(kv / np.sqrt((kv**2).mean() + EPS) * weight, row)
            np.testing.assert_allclose(cache[slot].numpy(), want, rtol=1e-5, atol=1e-5)
            written.add(slot)
    rest = sorted(set(range(3 * PAGE)) - written)
    assert cache[rest].isnan().all()


def test_bf16_query_rounds_every_intermediate():
    """Scalar emulation of the official bf16 tensors, bitwise; fp32 inside would differ."""
    args = inputs(4, dtype=torch.bfloat16, head_dim=64, rope_dim=2)
    got = call(args)
    bf16 = lambda x: torch.tensor(x, dtype=torch.float64).float().bfloat16().item()  # noqa: E731
    differs = 0
    for t in range(3):
        for head in range(3):
            q = [x.item() for x in args["q"][t, head]]
            mean = bf16(sum(bf16(x * x) for x in q) / 64)
            scale = bf16(1 / np.sqrt(bf16(mean + EPS)))
            assert got[t, head, :62].tolist() == [bf16(x * scale) for x in q[:62]]
            exact = 1 / np.sqrt(sum(x * x for x in q) / 64 + EPS)
            differs += sum(bf16(x * scale) != bf16(x * exact) for x in q)
    assert differs > 0


def test_bf16_key_rounds_after_norm_and_rotation():
    args = inputs(7, dtype=torch.bfloat16)
    call(args)
    wide = ops.rms_norm(args["kv"], args["kv_norm_weight"], eps=EPS)
    for t, slot in enumerate(args["window_slots"].tolist()):
        if slot >= 0:
            row = args["rope_table"][args["positions"][t]].double().numpy()
            want = torch.tensor(turn(wide[t].double().numpy(), row)).float().bfloat16()
            torch.testing.assert_close(args["window_cache"].view(-1, 96)[slot], want, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize(("head_dim", "rope_dim"), [(96, 16), (512, 64), (40, 8)])
def test_quantized_keys(head_dim, rope_dim):
    """Blocks of 64 of the unquantised keys (the last one shorter), rotated dimensions untouched, queries unchanged."""
    plain, rounded = (inputs(9, head_dim=head_dim, rope_dim=rope_dim, dtype=torch.bfloat16) for _ in range(2))
    assert torch.equal(call(plain), call(rounded, quantize=True))
    slots = plain["window_slots"][plain["window_slots"] >= 0]
    before = plain["window_cache"].view(-1, head_dim)[slots]
    after = rounded["window_cache"].view(-1, head_dim)[slots]
    nope = head_dim - rope_dim
    assert torch.equal(before[:, nope:], after[:, nope:])
    for start in range(0, nope, 64):
        block, got = before[:, start : min(start + 64, nope)].double(), after[:, start : min(start + 64, nope)].double()
        scale = torch.exp2(torch.ceil(torch.log2(block.abs().amax(1, keepdim=True).clamp_min(1e-4) / 448)))
        assert torch.equal(got, (block / scale).float().to(torch.float8_e4m3fn).double() * scale)
        assert not torch.equal(block, got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_cache(dtype):
    args = inputs(9, head_dim=512, rope_dim=64, dtype=dtype, cache_dtype=torch.uint8)
    dense = inputs(9, head_dim=512, rope_dim=64, dtype=dtype)
    call(args), call(dense)
    slots = args["window_slots"][args["window_slots"] >= 0]
    want = _formats.simulate_kv(dense["window_cache"].view(-1, 512)[slots].float(), 64).bfloat16()
    assert torch.equal(_paged.read(args["window_cache"], slots, 512), want)
    written = inputs(9, head_dim=512, rope_dim=64, dtype=dtype, cache_dtype=torch.uint8)["window_cache"]
    assert int((written != args["window_cache"]).sum()) <= len(slots) * 584  # no byte of another row


def test_quantized_values_survive_an_fp8_cache():
    args = inputs(9, head_dim=512, rope_dim=64, dtype=torch.bfloat16, cache_dtype=torch.uint8)
    dense = inputs(9, head_dim=512, rope_dim=64, dtype=torch.bfloat16)
    call(args, quantize=True), call(dense, quantize=True)
    slots = args["window_slots"][args["window_slots"] >= 0]
    assert torch.equal(_paged.read(args["window_cache"], slots, 512), dense["window_cache"].view(-1, 512)[slots])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_independent(dtype):
    """Bitwise: one row alone equals the same row among 65."""
    args = inputs(65, dtype=dtype)
    together = call(args)
    for t in range(0, 65, 7):
        per_row = ("q", "kv", "positions", "window_slots")
        alone = {k: v[t : t + 1] if k in per_row else v for k, v in args.items()}
        alone["window_cache"] = torch.full_like(args["window_cache"], float("nan"))
        assert torch.equal(call(alone), together[t : t + 1])
        if (slot := int(args["window_slots"][t])) >= 0:
            rows = [c.view(-1, 96)[slot] for c in (alone["window_cache"], args["window_cache"])]
            assert torch.equal(*rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_at_model_width(dtype):
    contract.check_opcheck(ops.spec("qkv_rope_cache"), nano, 3, dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.randn(3, 5)}, r"q must be a float32 or bfloat16 \[tokens, heads, head_dim\], got 2-D"),
        ({"kv": torch.randn(3, 5)}, r"kv must be \[tokens, 128\] torch.float32, got \[3, 5\] torch.float32"),
        ({"kv": torch.randn(3, 128).bfloat16()}, r"kv must be \[tokens, 128\] torch.float32, .* torch.bfloat16"),
        ({"kv_norm_weight": torch.randn(4)}, r"kv_norm_weight must have shape \[128\], got \[4\]"),
        ({"positions": torch.arange(1)}, r"positions must have the 3 rows of q, got 1"),
        ({"window_slots": torch.arange(3).int()}, r"window_slots must be 1-D int64, got 1-D torch.int32"),
        ({"rope_table": torch.randn(9, 130)}, r"rope_dim must be even and in \[2, 128\], got 130"),
        ({"window_cache": torch.randn(2, 128, 4)}, r"cache must be \[pages, rows, 128\], got \[2, 128, 4\]"),
    ],
)
def test_errors(change, message):
    spec = ops.spec("qkv_rope_cache")
    args, kwargs = spec.example(tiny, num_tokens=3, device=torch.device("cpu"), dtype=torch.float32, seed=0)
    names = [a.name for a in spec.overload._schema.arguments]
    with pytest.raises(ValueError, match="qkv_rope_cache .*" + message):
        spec.overload(**(dict(zip(names, args, strict=False)) | kwargs | change))
