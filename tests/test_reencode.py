"""FP4 experts kept as FP8: exact wherever e4m3 allows it, refused one step beyond, and the same model afterwards."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from dsv4.checkpoint import Checkpoint, CheckpointError
from dsv4.config import ModelConfig
from dsv4.engine import Engine
from dsv4.engine_config import EngineConfig
from dsv4.reencode import fp4_to_fp8
from dsv4.runner import Sequence
from dsv4.weights import load_weights, meta_weights

from .command_line import GOLDEN, refused, write_json
from .ops.moe_numpy import FP4_VALUES, e4m3_values
from .tiny_checkpoint import NANO, find, load_raw, poke, write_tiny

OFFICIAL = ("official", torch.bfloat16)


def fp4_values(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """fp64 values of a packed matrix, decoded without the library."""
    codes = np.stack((packed & 15, packed >> 4), axis=-1).reshape(*packed.shape[:-1], -1)
    return FP4_VALUES[codes] * np.repeat(2.0 ** (scale.astype(float) - 127), 32, axis=-1)


def fp8_values(codes: torch.Tensor, scale: torch.Tensor) -> np.ndarray:
    spread = np.repeat(np.repeat(scale.double().numpy(), 128, axis=-2), 128, axis=-1)
    value = e4m3_values()[codes.view(torch.uint8).numpy()]
    return value * spread[..., : value.shape[-2], : value.shape[-1]]


def same(got: np.ndarray, want: np.ndarray) -> bool:
    return np.array_equal(got, want) and np.array_equal(np.signbit(got), np.signbit(want))


def fits(values: np.ndarray) -> bool:
    """Whether every block can be e4m3 with one scale. An FP4 value is 1 or 3 times a power of two; its leading bit may
    lie at most 17 above the last bit of any other: e4m3 reaches from 1.x * 2^8 down to 2^-9."""
    for top in range(0, values.shape[0], 128):
        for left in range(0, values.shape[1], 128):
            size = np.abs(values[top : top + 128, left : left + 128])
            mantissa, exponent = np.frexp(size[size > 0])
            last = exponent - np.where(mantissa == 0.75, 2, 1)
            if len(exponent) and exponent.max() - 1 - last.min() > 17:
                return False
    return True


@st.composite
def matrices(draw) -> tuple[np.ndarray, np.ndarray]:
    """Random codes, of a random alphabet per matrix; scales within a window around the limit, extremes included."""
    rows, groups = draw(st.sampled_from([(1, 1), (3, 5), (130, 2), (129, 9)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    alphabet = np.array(draw(st.lists(st.integers(0, 15), min_size=1, max_size=16, unique=True)), np.uint8)
    codes = rng.choice(alphabet, size=(rows, 32 * groups))
    lowest = draw(st.sampled_from([0, 1, 60, 118, 246 - 18]))
    scale = lowest + rng.choice([0, draw(st.integers(11, 18))], size=(rows, groups), p=[0.7, 0.3])
    return (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8), scale.astype(np.uint8)


@settings(max_examples=150, deadline=None)
@given(matrices())
def test_exact_up_to_the_limit_and_refused_beyond(matrix):
    packed, scale = matrix
    values = fp4_values(packed, scale)
    call = ("experts.3.w1.weight", torch.tensor(packed), torch.tensor(scale))
    if not fits(values):
        with pytest.raises(CheckpointError, match=r"tensor experts\.3\.w1\.weight must fit e4m3 .* got in block \["):
            fp4_to_fp8(*call)
        return
    codes, block_scale = fp4_to_fp8(*call)
    assert codes.dtype == torch.float8_e4m3fn and block_scale.dtype == torch.float32
    assert (block_scale >= 2.0**-126).all()
    assert same(fp8_values(codes, block_scale), values)


@pytest.mark.parametrize(
    ("low", "high", "spread"), [(1, 7, 14), (2, 7, 15), (3, 7, 14), (4, 7, 16), (1, 6, 14), (1, 2, 16)]
)
def test_limit_of_the_spread(low, high, spread):
    """Groups of one code each: ``spread`` between their scales is exact, one more is not."""
    for distance, block in ((spread, None), (spread + 1, "[1, 2]")):
        packed = np.full((131, 160), low | low << 4, np.uint8)
        scale = np.full((131, 10), 100, np.uint8)
        packed[130, 144:] = high | high << 4
        scale[130, 9] = 100 + distance
        call = ("w", torch.tensor(packed), torch.tensor(scale))
        if block is None:
            assert same(fp8_values(*fp4_to_fp8(*call)), fp4_values(packed, scale))
            continue
        with pytest.raises(CheckpointError) as error:
            fp4_to_fp8(*call)
        text = str(error.value)
        assert f"in block {block} the values" in text and "at [128, 256] (scale byte 100)" in text
        assert f"at [130, 288] (scale byte {100 + distance})" in text


def load(directory: Path, expert_weights: str):
    checkpoint = Checkpoint.open(directory)
    return load_weights(checkpoint, checkpoint.config, *OFFICIAL, "cpu", progress=False, expert_weights=expert_weights)


def values_of(weights, key: str) -> np.ndarray:
    """fp64 values of an expert matrix in either format; the halves of w13 have their own blocks."""
    weight, scale = weights[f"{key}.weight"], weights[f"{key}.scale"]
    if weight.dtype == torch.uint8:
        return fp4_values(weight.numpy(), scale.numpy())
    parts = 2 if key.endswith("w13") else 1
    pairs = zip(weight.view(torch.uint8).chunk(parts, 1), scale.chunk(parts, 1), strict=True)
    return np.concatenate([fp8_values(w.contiguous(), s) for w, s in pairs], axis=1)


@pytest.mark.parametrize("source", ["tiny", "nano"])
def test_a_checkpoint_keeps_its_values(tmp_path, source):
    directory = write_tiny(tmp_path / "c") if source == "tiny" else NANO
    stored, got = load(directory, "fp4"), load(directory, "fp8")
    changed = {key for key in stored if stored[key].dtype != got[key].dtype}
    experts = [key.removesuffix(".weight") for key in stored if ".experts." in key and key.endswith(".weight")]
    assert changed == {f"{key}.{part}" for key in experts for part in ("weight", "scale")} and experts
    for key in experts:
        assert got[f"{key}.weight"].dtype == torch.float8_e4m3fn
        assert same(values_of(got, key), values_of(stored, key)), key
    for key in stored.keys() - changed:
        assert torch.equal(got[key].view(torch.uint8), stored[key].view(torch.uint8))
    meta = meta_weights(Checkpoint.open(directory).config, *OFFICIAL, "fp8")
    assert {k: (t.shape, t.dtype) for k, t in meta.items()} == {k: (t.shape, t.dtype) for k, t in got.items()}


def test_a_spread_too_wide_is_refused_by_name(tmp_path):
    name = "layers.1.ffn.experts.2.w2"
    directory = write_tiny(tmp_path / "c")
    shards = load_raw(directory)
    scale = np.frombuffer(find(shards, f"{name}.scale")[f"{name}.scale"].data, np.uint8)
    poke(directory, f"{name}.scale", 7, np.uint8(scale[7] + 20))
    load(directory, "fp4")
    with pytest.raises(CheckpointError, match=rf"tensor {name}\.weight must fit e4m3 .*scale byte {scale[7] + 20}\)"):
        load(directory, "fp8")


def test_fp8_checkpoints_stay_as_they_are(tmp_path):
    directory = write_tiny(tmp_path / "c", expert_dtype="fp8")
    stored, got = load(directory, "fp4"), load(directory, "fp8")
    assert all(torch.equal(stored[key].view(torch.uint8), got[key].view(torch.uint8)) for key in stored)


def test_logits_do_not_change():
    """The references decode both formats to the same fp32 matrices, so everything after them is equal, bitwise."""
    prompt, logits = [5, 900, 17, 4, 1033, 250, 8], []
    for expert_weights in ("fp4", "fp8"):
        settings = EngineConfig(numerics="official", compile="off", max_seq_len=256, expert_weights=expert_weights)
        engine = Engine.from_checkpoint(NANO, settings, progress=False)
        w13 = dict(engine.runner.model.named_buffers())["blocks.0.ffn.w13"]
        assert w13.dtype == (torch.uint8 if expert_weights == "fp4" else torch.float8_e4m3fn)
        segment = Sequence().segment(prompt, tuple(range(len(prompt))))
        logits.append(engine.runner.run([segment])[0])
    assert logits[0].isfinite().all() and logits[0].std() > 0.1
    assert torch.equal(*logits)


def test_the_command_line_reaches_the_engine(capfd, monkeypatch, tmp_path):
    tokens = write_json(tmp_path / "tokens.json", list(range(3, 40)))
    prompts = write_json(tmp_path / "prompts.json", [[5], [5, 6, 7]])
    asked: list[EngineConfig] = []

    def from_checkpoint(path, settings: EngineConfig) -> None:
        asked.append(settings)
        raise ValueError("seen")

    monkeypatch.setattr(Engine, "from_checkpoint", from_checkpoint)
    for command, *argv in (
        ("generate", "--prompt", "x"),
        ("score", "--tokens", tokens, "--window", 32),
        ("logits", "--prompts", prompts, "--out", tmp_path / "out"),
        ("compare", "--layers", GOLDEN / "layers_official.safetensors"),
    ):
        flags = ("--numerics", "official", "--expert-weights", "fp8")
        assert refused(capfd, command, NANO, *argv, *flags) == "seen"
    assert [settings.expert_weights for settings in asked] == ["fp8"] * 4
    assert "expert_weights must be one of" in refused(capfd, "generate", NANO, "--prompt", "x", "--expert-weights", "i")


def test_settings():
    with pytest.raises(ValueError, match="expert_weights must be left out with numerics 'exact', .* got 'fp8'"):
        EngineConfig(expert_weights="fp8")
    with pytest.raises(ValueError, match=r"expert_weights must be one of \['fp4', 'fp8'\], got 'int8'"):
        EngineConfig(numerics="official", expert_weights="int8")
    with pytest.raises(ValueError, match="expert_weights 'fp8' must come with numerics 'official', got 'exact'"):
        meta_weights(ModelConfig.from_json(NANO), "exact", torch.float32, "fp8")
