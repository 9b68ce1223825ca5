"""Synthetic checkpoints: complete, valid, reproducible, and refused where they would overwrite something."""

import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from dsv4.checkpoint import Checkpoint, expected_tensors
from dsv4.config import ModelConfig
from dsv4.ops._formats import dequantize_fp8_weight
from dsv4.synth import _quantize_weight, write_synthetic
from dsv4.weights import load_weights

from .tiny_checkpoint import INDEX, NANO, contents, load_raw, tiny_config


def digest(directory: Path) -> str:
    return hashlib.sha256(repr(contents(directory)).encode()).hexdigest()


def test_loads_with_sane_weights(tmp_path):
    config = ModelConfig.from_json(NANO)
    report = write_synthetic(config, tmp_path / "out", seed=5, shard_bytes=6 << 20, progress=False)
    checkpoint = Checkpoint.open(tmp_path / "out")
    assert checkpoint.config == config
    assert (report.tensors, report.parameters) == (1057, config.num_parameters)
    assert report.shards == len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert report.bytes == sum(entry.num_bytes for entry in checkpoint.entries.values())
    weights = load_weights(checkpoint, config, "exact", torch.float32, "cpu", progress=False)
    for name in ("layers.2.attn.wq_b", "layers.3.ffn.experts.w13", "mtp.0.ffn.experts.w2", "head"):
        key = f"{name}.weight"
        assert float(weights[key].std()) == pytest.approx(0.02, rel=0.05), key
        assert abs(float(weights[key].mean())) < 1e-3, key
    assert weights["norm.weight"].mean() == pytest.approx(1.0, abs=0.01)
    experts = weights["layers.3.ffn.experts.w13.weight"]
    assert len({bytes(e.numpy().tobytes()) for e in experts}) == 16
    table = weights["layers.0.ffn.gate.tid2eid"]
    assert all(len(set(row)) == 6 for row in table.tolist()) and table.unique().tolist() == list(range(16))
    load_weights(checkpoint, config, "official", torch.bfloat16, "cpu", progress=False)


@pytest.mark.parametrize("shard_bytes", [1, 50_000, 1 << 30])
def test_shards(tmp_path, shard_bytes):
    config = tiny_config()
    report = write_synthetic(config, tmp_path / "out", shard_bytes=shard_bytes, progress=False)
    shards = load_raw(tmp_path / "out")
    names = [name for tensors in shards.values() for name in tensors]
    assert names == list(expected_tensors(config)) and report.shards == len(shards)
    for tensors in shards.values():
        assert len(tensors) == 1 or sum(len(raw.data) for raw in tensors.values()) <= shard_bytes
    assert {"1": len(names), "50000": len(shards), str(1 << 30): 1}[str(shard_bytes)] == len(shards)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == report.bytes
    Checkpoint.open(tmp_path / "out")


def test_reproducible(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_synthetic(tiny_config(), tmp_path / name, seed=seed, progress=False)
    assert digest(tmp_path / "a") == digest(tmp_path / "b") != digest(tmp_path / "c")
    write_synthetic(tiny_config(), tmp_path / "last", seed=2**63 - 1, progress=False)
    assert digest(tmp_path / "last") != digest(tmp_path / "a")
    write_synthetic(tiny_config(), tmp_path / "d", seed=1, shard_bytes=40_000, progress=False)
    one, many = load_raw(tmp_path / "a"), load_raw(tmp_path / "d")
    assert {k: v for t in one.values() for k, v in t.items()} == {k: v for t in many.values() for k, v in t.items()}


def test_layers_differ(tmp_path):
    write_synthetic(tiny_config(), tmp_path / "out", progress=False)
    raw = {name: value for tensors in load_raw(tmp_path / "out").values() for name, value in tensors.items()}
    assert raw["layers.0.attn.wkv.weight"].data != raw["layers.1.attn.wkv.weight"].data
    assert raw["layers.2.attn.compressor.wkv.weight"].data != raw["layers.2.attn.compressor.wgate.weight"].data


def test_overrides(tmp_path):
    write_synthetic(
        ModelConfig.from_json(NANO), tmp_path / "out", progress=False,
        num_hidden_layers=4, n_routed_experts=8, expert_dtype="fp8",
    )  # fmt: skip
    opened = Checkpoint.open(tmp_path / "out")
    assert opened.config.compress_ratios == (0, 0, 4, 128, 0)
    assert (opened.config.n_routed_experts, opened.config.expert_dtype) == (8, "fp8")
    assert opened.entries["layers.3.ffn.experts.7.w2.weight"].dtype == "F8_E4M3"
    weights = load_weights(opened, opened.config, "official", torch.bfloat16, "cpu", progress=False)
    assert weights["layers.0.ffn.gate.tid2eid"].max() == 7


@pytest.mark.parametrize("rows, cols", [(1, 1), (128, 128), (130, 300), (257, 96)])
def test_fp8_quantisation(rows, cols):
    """Scales are the smallest powers of two that hold their block; codes are the nearest e4m3 values."""
    value = torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows)) * 0.3
    codes, scale_bytes = _quantize_weight(value)
    assert codes.shape == value.shape and scale_bytes.shape == (math.ceil(rows / 128), math.ceil(cols / 128))
    scale = torch.exp2(scale_bytes.float() - 127)
    for i, j in np.ndindex(*scale.shape):
        block = value[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
        assert scale[i, j] / 2 < block.abs().max() / 448 <= scale[i, j]
        got = codes[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)].float()
        assert torch.equal(got, (block / scale[i, j]).to(torch.float8_e4m3fn).float())
    error = (dequantize_fp8_weight(codes, scale) - value).abs()
    assert (error <= value.abs() / 16 + scale.max() * 2**-10).all()  # half a step: 2^-4 relative, 2^-10 for subnormals


def test_refuses_a_directory_with_files(tmp_path):
    (tmp_path / "notes.txt").write_text("keep")
    with pytest.raises(ValueError, match="output directory must be absent or empty, got"):
        write_synthetic(tiny_config(), tmp_path, progress=False)
    with pytest.raises(ValueError, match="output directory must be absent or empty, got .*notes.txt"):
        write_synthetic(tiny_config(), tmp_path / "notes.txt", progress=False)
    assert contents(tmp_path) == {"notes.txt": b"keep"}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_hidden_layers": 8}, r"num_hidden_layers must be an integer in 1\.\.\.4 \(the model's layers\), got 8"),
        ({"n_routed_experts": 2}, r"num_experts_per_tok must be at most n_routed_experts \(2\), got 3"),
        ({"n_experts": 2}, "override must be a field of ModelConfig, got 'n_experts'"),
        ({"shard_bytes": 0}, "shard_bytes must be positive, got 0"),
        ({"seed": -1}, r"seed must be an integer in \[0, 2\*\*63\), got -1"),
        ({"seed": 2**63}, r"seed must be an integer in \[0, 2\*\*63\), got 9223372036854775808"),
        ({"seed": True}, r"seed must be an integer in \[0, 2\*\*63\), got True"),
        ({"seed": 1.0}, r"seed must be an integer in \[0, 2\*\*63\), got 1.0"),
    ],
)
def test_bad_arguments_write_nothing(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        write_synthetic(tiny_config(), tmp_path / "out", progress=False, **changes)
    assert not (tmp_path / "out").exists()


def test_the_tokenizer_is_copied(tmp_path):
    report = write_synthetic(tiny_config(), tmp_path / "out", progress=False, tokenizer_dir=NANO)
    assert report.copied == ("tokenizer.json", "tokenizer_config.json")
    for name in report.copied:
        assert (tmp_path / "out" / name).read_bytes() == (NANO / name).read_bytes()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "tokenizer.json").write_text("{}")
    report = write_synthetic(tiny_config(), tmp_path / "one", progress=False, tokenizer_dir=tmp_path / "half")
    assert report.copied == ("tokenizer.json",)
    assert write_synthetic(tiny_config(), tmp_path / "none", progress=False).copied == ()


def test_interrupted_run_is_no_checkpoint(tmp_path, monkeypatch):
    """Whatever stops the writing, what is left has neither index nor config."""

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("dsv4.synth._draw_fp4", fail)
    with pytest.raises(OSError, match="disk full"):
        write_synthetic(tiny_config(), tmp_path / "out", progress=False)
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".safetensors"}
    with pytest.raises(FileNotFoundError):
        Checkpoint.open(tmp_path / "out")
