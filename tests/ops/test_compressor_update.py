from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from dsv4 import ops
from dsv4.ops import _formats
from dsv4.ops.shapes import nano, tiny

from . import contract
from .compressor_cases import EPS, Compressor, Session, bits, make_compressor, official_entries, random_rows

ROOT = Path(__file__).parents[2]
RATIOS = [4, 128]


def run(compressor: Compressor, rows: torch.Tensor, chunk: int, **options) -> Session:
    session = Session(compressor, **options)
    session.feed(0, rows, chunk)
    return session


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 127, 128, 300])
@pytest.mark.parametrize("chunk", [1, 7, 300])
@pytest.mark.parametrize("ratio", RATIOS)
def test_matches_official_decode(ratio, chunk, num_tokens):
    c = make_compressor(ratio, dim=24)
    rows = random_rows(c, num_tokens, seed=num_tokens)
    expected = official_entries(c, rows)
    session = run(c, rows, chunk)
    # fp32 against float64: relative error below (tree depth 7 + exp, norm and rotation) * 2^-24 on values below 10.
    np.testing.assert_allclose(session.entries(0, len(expected)).numpy(), expected, rtol=1e-5, atol=1e-5)
    assert session.cache.isnan().logical_not().sum() == expected.size
    state = session.stored(0, num_tokens - 1, min(num_tokens, c.pooled))
    kept = rows[-len(state) :].clone()
    kept[:, c.ape.shape[1] :] += c.ape[torch.arange(num_tokens - len(state), num_tokens) % ratio]
    assert torch.equal(state, kept)
    assert session.state.isnan().logical_not().sum() == kept.numel()


@pytest.mark.parametrize(("dim", "quantize"), [(512, "fp8"), (136, "fp8"), (128, "fp4")])
def test_quantized_matches_official_decode(dim, quantize):
    c = make_compressor(4, dim, rope_dim=64)
    rows = random_rows(c, 60, seed=dim)
    expected = official_entries(c, rows, quantize)
    got = run(c, rows, 60, quantize=quantize, cache_dtype=torch.bfloat16).entries(0, 15).double().numpy()
    # Where fp32 falls on the other side of a rounding boundary than float64 the neighbour is stored: rare, and at most
    # an eighth of the value away in FP8, a third of the row's largest value (2 of 6) in FP4.
    differs = got != expected
    assert differs.mean() < 0.002, f"{differs.mean():.3%} of the values differ"
    step = np.abs(expected) / 8 if quantize == "fp8" else np.abs(expected).max(-1, keepdims=True) / 3
    assert (np.abs(got - expected) <= step).all()


@pytest.mark.parametrize("chunk", [1, 3, 64, 127, 128, 200])
@pytest.mark.parametrize("dim", [40, 512])
@pytest.mark.parametrize("ratio", RATIOS)
def test_bitwise_independent_of_chunking(ratio, dim, chunk):
    c = make_compressor(ratio, dim)
    rows = random_rows(c, 300, seed=1)
    whole, parts = run(c, rows, 300), run(c, rows, chunk)
    assert torch.equal(bits(whole.entries(0, 300 // ratio)), bits(parts.entries(0, 300 // ratio)))
    assert torch.equal(bits(whole.state), bits(parts.state))


@pytest.mark.parametrize("ratio", RATIOS)
def test_bitwise_independent_of_batch(ratio):
    c = make_compressor(ratio, dim=40)
    lengths = [300, 5, 131]
    prompts = [random_rows(c, n, seed=n) for n in lengths]
    batch = Session(c, num_requests=3)
    batch.step((2, 0, prompts[2][:126]), (0, 0, prompts[0][:127]), pad=1)
    batch.step((0, 127, prompts[0][127:129]), (1, 0, prompts[1][:3]), (2, 126, prompts[2][126:]), pad=3)
    batch.step((1, 3, prompts[1][3:]), (0, 129, prompts[0][129:]))
    for request, rows in enumerate(prompts):
        alone, count = run(c, rows, len(rows)), len(rows) // ratio
        assert torch.equal(bits(batch.entries(request, count)), bits(alone.entries(0, count)))
        keep = min(len(rows), c.pooled)
        assert torch.equal(batch.stored(request, len(rows) - 1, keep), alone.stored(0, len(rows) - 1, keep))


@pytest.mark.parametrize("ratio", RATIOS)
def test_pads_touch_nothing(ratio):
    c = make_compressor(ratio, dim=16)
    rows = random_rows(c, 256, seed=3)
    plain, padded = run(c, rows, 256), Session(c)
    padded.step((0, 0, rows), pad=130)
    assert torch.equal(bits(plain.cache), bits(padded.cache)) and torch.equal(bits(plain.state), bits(padded.state))


@pytest.mark.parametrize("ratio", RATIOS)
def test_stale_state_is_never_read(ratio):
    c = make_compressor(ratio, dim=16)
    old, new = random_rows(c, 300, seed=4), random_rows(c, 3 + 2 * ratio, seed=5)
    reused = run(c, old, 300)
    reused.cache.fill_(float("nan"))
    fresh = Session(c)
    for session in (reused, fresh):
        session.step((0, 0, new[:3]))
        session.feed(0, new[3:], 1, first=3)
    assert torch.equal(bits(reused.cache), bits(fresh.cache))
    assert fresh.entries(0, len(new) // ratio).isfinite().all()


@pytest.mark.parametrize(("ratio", "phase"), [(4, p) for p in range(4)] + [(128, p) for p in range(128)])
def test_rewind_leaves_no_trace(ratio, phase):
    """Rejected rows are overwritten, with the smallest ring that allows it."""
    rejected = 1 + phase % 6
    c = make_compressor(ratio, dim=10, rope_dim=4)
    start, end = c.pooled + phase, c.pooled + 2 * ratio + 2
    right, wrong = random_rows(c, end, seed=phase), random_rows(c, rejected, seed=1000 + phase)
    plain = run(c, right, end, ring=c.pooled + rejected - 1)
    rewound = Session(c, ring=c.pooled + rejected - 1)
    rewound.step((0, 0, right[:start]))
    rewound.step((0, start, wrong))
    rewound.step((0, start, right[start : start + 1]))
    rewound.step((0, start + 1, right[start + 1 :]))
    assert torch.equal(bits(plain.entries(0, end // ratio)), bits(rewound.entries(0, end // ratio)))
    assert torch.equal(plain.stored(0, end - 1, c.pooled), rewound.stored(0, end - 1, c.pooled))


@pytest.mark.parametrize(("dim", "quantize"), [(512, "none"), (512, "fp8"), (128, "none"), (128, "fp4")])
def test_fp8_cache(dim, quantize):
    c = make_compressor(4, dim, rope_dim=64)
    rows = random_rows(c, 40, seed=6)
    dense = run(c, rows, 40, quantize=quantize, cache_dtype=torch.float32).entries(0, 10)
    stored = run(c, rows, 7, quantize=quantize, cache_dtype=torch.uint8)
    want = _formats.simulate_kv(dense, 64) if dim == 512 else _formats.simulate_fp8(dense, 128)
    assert torch.equal(stored.entries(0, 10), want.bfloat16())
    if quantize == "fp8":  # already on the FP8 grid: storing loses nothing
        assert torch.equal(stored.entries(0, 10).float(), dense)
    untouched = torch.ones(len(stored.cache), dtype=torch.bool)
    untouched[stored.block_tables[0, 0]] = False
    assert (stored.cache[untouched] == 255).all()


@pytest.mark.parametrize(("quantize", "exact"), [("none", False), ("fp8", True), ("fp4", True)])
def test_bf16_cache_rounds_once(quantize, exact):
    c = make_compressor(4, 128, rope_dim=64)
    rows = random_rows(c, 12, seed=7)
    wide = run(c, rows, 12, quantize=quantize).entries(0, 3)
    narrow = run(c, rows, 12, quantize=quantize, cache_dtype=torch.bfloat16).entries(0, 3)
    assert torch.equal(narrow, wide.bfloat16())
    assert torch.equal(narrow.float(), wide) == exact


@pytest.mark.parametrize("layer", [2, 3])
def test_recorded_entries(layer):
    """The nano checkpoint: entries of the official code from its own compressor inputs."""
    golden = load_file(ROOT / "tests/golden/layers_official.safetensors")
    x = golden[f"p140.layer{layer}.attn_in"].float()
    want = golden[f"p140.layer{layer}.attn.compressed_kv"]
    names = ("wkv.weight", "wgate.weight", "ape", "norm.weight")
    wkv, wgate, ape, norm_weight = nano_tensors(*(f"layers.{layer}.attn.compressor.{n}" for n in names))
    c = Compressor(ape.shape[0], layer == 2, ape, norm_weight, yarn_table(140))
    rows = torch.cat((x @ wkv.float().T, x @ wgate.float().T), dim=-1)
    got = run(c, rows, 140, quantize="fp8", cache_dtype=torch.bfloat16).entries(0, 140 // c.ratio)
    # The pooling sums in another order than the official softmax, so a value rarely rounds to the neighbour.
    assert (got != want).float().mean() < 1e-3
    torch.testing.assert_close(got, want, rtol=1 / 8, atol=1e-3)


def nano_tensors(*names: str) -> list[torch.Tensor]:
    found = {}
    for path in (ROOT / "assets/nano").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in set(names) & set(file.keys())}
    return [found[name] for name in names]


def yarn_table(num_positions: int) -> torch.Tensor:
    """theta 160000, factor 16; frequencies 0…15 kept, 25…31 divided by 16, linear in between."""
    i = torch.arange(32)
    ramp = ((i - 15) / 10).clamp(0, 1)
    frequency = 160000.0 ** (-i / 32) * (1 - ramp + ramp / 16)
    angles = torch.outer(torch.arange(num_positions).float(), frequency)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_at_model_width(dtype):
    contract.check_opcheck(ops.spec("compressor_update"), nano, 3, dtype)


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_score": torch.randn(3, 7)}, r"kv_score must be \[tokens, 512\], got \[3, 7\]"),
        ({"kv_score": torch.randn(2, 512)}, r"positions must have the 2 rows of kv_score, got 3"),
        ({"ape": torch.randn(3, 256)}, r"ape must be \[4, width\], .* got \[3, 256\]"),
        ({"state": torch.randn(5, 7, 512)}, r"ring must have at least 8 rows, got 7"),
        ({"norm_weight": torch.randn(3)}, r"norm_weight must have shape \[128\], got \[3\]"),
        ({"quantize": "fp6"}, r"quantize must be one of \['none', 'fp8', 'fp4'\], got 'fp6'"),
        ({"cache": torch.randn(4, 64, 5)}, r"cache must be \[pages, rows, 128\], got \[4, 64, 5\]"),
        ({"cache": torch.zeros(4, 100, dtype=torch.uint8)}, r"FP8 cache must be \[pages, page bytes of whole rows\]"),
        ({"rope_table": torch.randn(9, 7)}, r"rope_dim must be even and in \[2, 128\], got 7"),
        ({"ratio": 0}, r"ratio must be positive, got 0"),
    ],
)
def test_errors(change, message):
    spec = ops.spec("compressor_update")
    args, kwargs = spec.example(tiny, num_tokens=3, device=CPU, dtype=torch.float32, seed=0)
    names = [a.name for a in spec.overload._schema.arguments]
    call = dict(zip(names, args, strict=False)) | kwargs | change
    with pytest.raises(ValueError, match="compressor_update .*" + message):
        spec.overload(**call)


def test_unsupported_cache_dtype():
    c = make_compressor(4, 16)
    with pytest.raises(NotImplementedError, match="cache must be float32, bfloat16 or uint8"):
        run(c, random_rows(c, 4, seed=0), 4, cache_dtype=torch.float16)


def test_zero_tokens_and_requests():
    c = make_compressor(4, 16)
    session = Session(c)
    before = bits(session.state).clone(), bits(session.cache).clone()
    none = torch.empty(0, dtype=torch.int32)
    ops.compressor_update(
        torch.empty(0, 64), c.ape, c.norm_weight, c.rope_table, none.long(), none,
        torch.zeros(1, dtype=torch.int32), none, torch.empty(0, 2, dtype=torch.int32), none,
        session.state, session.cache, ratio=4, overlap=True, eps=EPS, quantize="none",
    )  # fmt: skip
    assert torch.equal(before[0], bits(session.state)) and torch.equal(before[1], bits(session.cache))
