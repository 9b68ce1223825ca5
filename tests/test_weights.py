"""Kernel layout of the nano checkpoint against an independent decoding, and values that must be refused."""

import gc
import re
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from dsv4 import weights as module
from dsv4.checkpoint import Checkpoint, CheckpointError
from dsv4.config import flash_config
from dsv4.weights import Weights, load_weights, meta_weights

from .tiny_checkpoint import NANO, Raw, copy, find, load_raw, poke, save_raw, write_tiny

MODES = [("exact", torch.float32), ("exact", torch.bfloat16), ("official", torch.bfloat16)]
FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


def load(directory: Path, numerics: str = "official", dtype: torch.dtype = torch.bfloat16) -> Weights:
    checkpoint = Checkpoint.open(directory)
    return load_weights(checkpoint, checkpoint.config, numerics, dtype, "cpu", progress=False)


@pytest.fixture(scope="module")
def stored() -> dict[str, torch.Tensor]:
    """The nano checkpoint as the safetensors library reads it."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(NANO.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}
    return tensors


def dense(stored: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Dequantised matrix, decoded in numpy."""
    weight, scale = stored[f"{name}.weight"], stored[f"{name}.scale"].float().numpy()
    if weight.dtype == torch.int8:
        packed = weight.numpy().view(np.uint8)
        values = np.empty((packed.shape[0], 2 * packed.shape[1]), dtype=np.float32)
        values[:, 0::2], values[:, 1::2] = FP4_VALUES[packed & 15], FP4_VALUES[packed >> 4]
        return torch.from_numpy(values * np.repeat(scale, 32, axis=1))
    spread = np.kron(scale, np.ones((128, 128), dtype=np.float32))[: weight.shape[0], : weight.shape[1]]
    return torch.from_numpy(weight.float().numpy() * spread)


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return False
    return bool(torch.equal(got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)))


def expected_matrix(stored: dict, key: str, numerics: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and scale of kernel matrix ``key``, from its definition."""
    prefix, _, last = key.rpartition(".")
    if prefix.endswith(".experts"):
        names = [[f"{prefix}.{e}.{w}" for w in (("w1", "w3") if last == "w13" else ("w2",))] for e in range(16)]
    elif last == "w13":
        names = [[f"{prefix}.w1", f"{prefix}.w3"]]
    else:
        names = [[key]]
    join = torch.stack if len(names) > 1 else lambda parts: parts[0]
    if numerics == "exact":
        value = join([torch.cat([dense(stored, name) for name in row]) for row in names])
        return value.to(dtype), torch.empty(0)
    byte = {torch.int8: torch.uint8}
    weights = [[stored[f"{name}.weight"] for name in row] for row in names]
    raw = byte.get(weights[0][0].dtype, torch.float8_e4m3fn)
    weight = join([torch.cat([w.view(torch.uint8) for w in row]) for row in weights]).view(raw)
    scales = [torch.cat([stored[f"{name}.scale"].view(torch.uint8) for name in row]) for row in names]
    scale = join(scales)
    return weight, scale if raw == torch.uint8 else torch.exp2(scale.float() - 127)


@pytest.mark.parametrize("numerics, dtype", MODES, ids=["exact-fp32", "exact-bf16", "official"])
def test_every_kernel_tensor(stored, numerics, dtype):
    weights = load(NANO, numerics, dtype)
    for key, got in weights.items():
        if key.endswith("wkv_gate"):
            prefix = key.removesuffix("wkv_gate")
            expected = torch.cat([stored[f"{prefix}wkv.weight"], stored[f"{prefix}wgate.weight"]]).to(dtype)
        elif key.endswith("wo_a.weight"):
            expected = dense(stored, key.removesuffix(".weight")).view(2, 128, 1024).to(dtype)
        elif f"{key.removesuffix('.weight')}.scale" in weights or key.endswith(".scale"):
            base, _, kind = key.rpartition(".")
            expected = expected_matrix(stored, base, numerics, dtype)[("weight", "scale").index(kind)]
        elif key.endswith("tid2eid"):
            expected = stored[key].to(torch.int32)
        else:
            act = key in ("embed.weight", "head.weight") or key.endswith(("weights_proj.weight", "gate.weight"))
            expected = stored[key].to(dtype if act else torch.float32)
        assert same(got, expected), key
    assert len(weights) == 289
    assert "layers.0.attn.wo_a.scale" not in weights


def test_dequantised_bf16_loses_nothing():
    fp32, bf16 = load(NANO, "exact", torch.float32), load(NANO, "exact", torch.bfloat16)
    assert all(torch.equal(fp32[key].float(), bf16[key].float()) for key in fp32)


@pytest.mark.parametrize("numerics, dtype", MODES, ids=["exact-fp32", "exact-bf16", "official"])
@pytest.mark.parametrize("expert_dtype", ["fp4", "fp8"])
def test_meta_weights_agree(tmp_path, numerics, dtype, expert_dtype):
    directory = write_tiny(tmp_path / "c", expert_dtype=expert_dtype)
    loaded = load(directory, numerics, dtype)
    meta = meta_weights(Checkpoint.open(directory).config, numerics, dtype)
    assert [(k, t.shape, t.dtype) for k, t in loaded.items()] == [(k, t.shape, t.dtype) for k, t in meta.items()]
    assert all(t.is_meta for t in meta.values()) and all(t.is_contiguous() for t in loaded.values())


def test_meta_weights_agree_for_nano():
    for numerics, dtype in MODES:
        loaded = load(NANO, numerics, dtype)
        meta = meta_weights(Checkpoint.open(NANO).config, numerics, dtype)
        assert [(k, t.shape, t.dtype) for k, t in loaded.items()] == [(k, t.shape, t.dtype) for k, t in meta.items()]


def test_flash_layout():
    meta = meta_weights(flash_config(), "official", torch.bfloat16)
    found = {key: (tuple(meta[key].shape), meta[key].dtype) for key in meta}
    assert found["layers.3.ffn.experts.w13.weight"] == ((256, 4096, 2048), torch.uint8)
    assert found["layers.3.ffn.experts.w13.scale"] == ((256, 4096, 128), torch.uint8)
    assert found["layers.3.ffn.experts.w2.weight"] == ((256, 4096, 1024), torch.uint8)
    assert found["layers.3.ffn.shared_experts.w13.scale"] == ((32, 32), torch.float32)
    assert found["layers.2.attn.compressor.wkv_gate"] == ((2048, 4096), torch.bfloat16)
    assert found["layers.3.attn.compressor.wkv_gate"] == ((1024, 4096), torch.bfloat16)
    assert found["layers.0.attn.wo_a.weight"] == ((8, 1024, 4096), torch.bfloat16)
    assert found["mtp.0.e_proj.scale"] == ((32, 32), torch.float32)


def test_fp8_experts(tmp_path):
    """Widths of one and a quarter blocks: the scale rows of w3 start a block of their own."""
    directory = write_tiny(tmp_path / "c", expert_dtype="fp8")
    raw = {name: value for tensors in load_raw(directory).values() for name, value in tensors.items()}
    official, exact = load(directory), load(directory, "exact", torch.float32)
    base = "layers.2.ffn.experts"
    weight, scale = official[f"{base}.w13.weight"], official[f"{base}.w13.scale"]
    assert weight.shape == (7, 320, 96) and scale.shape == (7, 4, 1)
    for part, name in enumerate(("w1", "w3")):
        codes, scales = raw[f"{base}.5.{name}.weight"].data, np.frombuffer(raw[f"{base}.5.{name}.scale"].data, np.uint8)
        rows = weight[5, 160 * part : 160 * (part + 1)].contiguous().view(torch.uint8)
        assert rows.numpy().tobytes() == codes
        assert scale[5, 2 * part : 2 * part + 2, 0].tolist() == [2.0 ** (int(b) - 127) for b in scales]
        factor = torch.tensor([2.0 ** (int(b) - 127) for b in scales]).repeat_interleave(128)[:160, None]
        part_rows = exact[f"{base}.w13.weight"][5, 160 * part : 160 * (part + 1)]
        assert torch.equal(part_rows, rows.view(torch.float8_e4m3fn).float() * factor)


def test_float32_scales_load_like_bytes(tmp_path):
    directory = write_tiny(tmp_path / "c", expert_dtype="fp8")
    expected = load(directory)
    shards = load_raw(directory)
    for tensors in shards.values():
        for name, raw in tensors.items():
            if name.endswith(".scale"):
                values = 2.0 ** (np.frombuffer(raw.data, np.uint8).astype(np.float64) - 127)
                tensors[name] = Raw("F32", raw.shape, values.astype(np.float32).tobytes())
    save_raw(directory, shards)
    got = load(directory)
    assert got.keys() == expected.keys() and all(same(got[key], expected[key]) for key in expected)


def test_part_of_a_checkpoint(tmp_path):
    """A config with fewer layers and no MTP block loads its part of the checkpoint."""
    checkpoint = Checkpoint.open(write_tiny(tmp_path / "c"))
    whole = load_weights(checkpoint, checkpoint.config, "exact", torch.float32, "cpu", progress=False)
    part = checkpoint.config.resized(num_hidden_layers=3, num_nextn_predict_layers=0)
    got = load_weights(checkpoint, part, "exact", torch.float32, "cpu", progress=False)
    assert set(got) == {key for key in whole if not key.startswith(("mtp.", "layers.3."))}
    assert all(torch.equal(got[key], whole[key]) for key in got)
    wider = checkpoint.config.resized(n_routed_experts=8)
    with pytest.raises(CheckpointError, match="must hold the config's tensors, got none for layers.0.ffn.experts.7.w1"):
        load_weights(checkpoint, wider, "exact", torch.float32, "cpu", progress=False)


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("weights") / "intact")


@pytest.fixture
def damaged(intact, tmp_path) -> Path:
    return copy(intact, tmp_path / "damaged")


def refused(directory: Path, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading must fail with ``message`` in both numerics and leave no kernel tensor alive."""
    allocate, alive = module._Slot.allocate, []

    def recorded(slot: object, device: object) -> torch.Tensor:
        tensor = allocate(slot, device)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(module._Slot, "allocate", recorded)
    for numerics in ("exact", "official"):
        loaded = None
        with pytest.raises(CheckpointError, match=re.escape(message)) as error:
            loaded = load(directory, numerics)
        del error
        gc.collect()
        assert loaded is None and alive and all(ref() is None for ref in alive)
        alive.clear()


SCALES = [
    "layers.1.attn.wq_a.scale",
    "layers.3.ffn.experts.6.w2.scale",
    "layers.2.attn.wo_a.scale",
    "mtp.0.e_proj.scale",
]


@pytest.mark.parametrize("name", SCALES)
def test_nan_scale(damaged, monkeypatch, name):
    poke(damaged, name, -1, np.uint8(255))
    refused(damaged, f"scale {name} must not be NaN, got E8M0 byte 255", monkeypatch)


def test_overflowing_scale(damaged, monkeypatch):
    poke(damaged, SCALES[0], 0, np.uint8(247))
    refused(damaged, f"scale {SCALES[0]} must have E8M0 bytes up to 246 (2^119), got 247", monkeypatch)


def test_largest_scale_stays_finite(damaged):
    poke(damaged, SCALES[0], 0, np.uint8(246))
    assert torch.isfinite(load(damaged, "exact", torch.bfloat16)["layers.1.attn.wq_a.weight"]).all()


@pytest.mark.parametrize("value", [3.0, 0.0, -1.0, float("nan"), float("inf"), 2.0**120, 2.0**-127])
def test_float32_scale_must_be_a_power_of_two(tmp_path, monkeypatch, value):
    directory = write_tiny(tmp_path / "c", expert_dtype="fp8")
    shards, name = load_raw(directory), "layers.0.ffn.experts.2.w3.scale"
    raw = find(shards, name)[name]
    values = np.ones(raw.shape, dtype=np.float32)
    values[-1, -1] = value
    find(shards, name)[name] = Raw("F32", raw.shape, values.tobytes())
    save_raw(directory, shards)
    rule = f"scale {name} must hold powers of two in [2^-126, 2^119]"
    refused(directory, f"{rule}, got {float(np.float32(value))}", monkeypatch)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_weight(damaged, monkeypatch, code):
    poke(damaged, "layers.2.attn.wo_b.weight", 17, np.uint8(code))
    refused(damaged, "tensor layers.2.attn.wo_b.weight must be finite, got an e4m3 NaN", monkeypatch)


@pytest.mark.parametrize("name", ["layers.3.ffn.gate.bias", "layers.0.hc_attn_fn", "layers.2.attn.compressor.ape"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_non_finite_float(damaged, monkeypatch, name, value):
    poke(damaged, name, 3, np.float32(value))
    refused(damaged, f"tensor {name} must be finite, got {value}", monkeypatch)


@pytest.mark.parametrize("value", [-1, 7, 2**31, -(2**40)])
def test_expert_id_outside_the_model(damaged, monkeypatch, value):
    name = "layers.2.ffn.gate.tid2eid"
    poke(damaged, name, 100, np.int64(value))
    refused(damaged, f"expert ids of {name} must be in [0, 7), got {value}", monkeypatch)


def test_file_cut_after_opening(damaged):
    checkpoint = Checkpoint.open(damaged)
    path = sorted(damaged.glob("*.safetensors"))[-1]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"in {path.name} must have"):
        load_weights(checkpoint, checkpoint.config, "exact", torch.float32, "cpu", progress=False)


def test_bad_modes(intact):
    with pytest.raises(ValueError, match="official numerics must use bfloat16 activations, got torch.float32"):
        load(intact, "official", torch.float32)
    with pytest.raises(ValueError, match="activation dtype must be float32 or bfloat16, got torch.float16"):
        meta_weights(flash_config(), "exact", torch.float16)
    with pytest.raises(ValueError, match="numerics must be 'exact' or 'official', got 'fast'"):
        meta_weights(flash_config(), "fast", torch.float32)


def test_progress_goes_to_stderr(intact, capfd):
    checkpoint = Checkpoint.open(intact)
    load_weights(checkpoint, checkpoint.config, "exact", torch.float32, "cpu", progress=False)
    assert capfd.readouterr() == ("", "")
    load_weights(checkpoint, checkpoint.config, "exact", torch.float32, "cpu")
    out, err = capfd.readouterr()
    assert out == "" and "loading weights" in err
