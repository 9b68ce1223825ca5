"""Damaged checkpoints end to end: the engine raises and the command line ends with code 2, both naming the fault.

The reader's own tests (test_checkpoint.py, test_weights.py, test_config.py) cover every kind of damage; here each class
goes once through the whole path, and whatever can be seen without tensor data is refused before any is read.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dsv4 import checkpoint as reader
from dsv4.engine import Engine
from dsv4.engine_config import EngineConfig

from .command_line import NANO, refused, run_json, write_json
from .tiny_checkpoint import INDEX, copy, find, load_raw, poke, save_raw, write_tiny

SETTINGS = EngineConfig(compile="off", max_seq_len=256, max_requests=1)
NORM = "layers.2.attn.q_norm.weight"
SCALE = "layers.1.ffn.experts.3.w2.scale"


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("checkpoint") / "intact")


@pytest.fixture
def damaged(intact, tmp_path) -> Path:
    return copy(intact, tmp_path / "damaged")


def last_shard(directory: Path) -> Path:
    return sorted(directory.glob("*.safetensors"))[-1]


def edit_json(path: Path, change: Callable[[dict], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_tensor(directory: Path, name: str, change: Callable) -> None:
    shards = load_raw(directory)
    change(find(shards, name)[name])
    save_raw(directory, shards)


def config(**changes: object) -> Callable[[Path], None]:
    return lambda directory: edit_json(directory / "config.json", lambda c: c.update(changes))


def truncate(directory: Path) -> None:
    shard = last_shard(directory)
    shard.write_bytes(shard.read_bytes()[:-1])


def corrupt_header(directory: Path) -> None:
    shard = last_shard(directory)
    data = shard.read_bytes()
    shard.write_bytes(data[:8] + b"\xff" + data[9:])


SEEN_EARLY = {
    "missing shard": (lambda d: last_shard(d).unlink(), "must hold the shard model-"),
    "truncated shard": (truncate, "(truncated)"),
    "corrupt header": (corrupt_header, "must be valid JSON"),
    "wrong shape": (
        lambda d: edit_tensor(d, NORM, lambda raw: setattr(raw, "shape", [2, 24])),
        f"tensor {NORM} must have shape [48], got [2, 24]",
    ),
    "wrong dtype": (
        lambda d: edit_tensor(d, SCALE, lambda raw: setattr(raw, "dtype", "I8")),
        f"tensor {SCALE} must have dtype F8_E8M0, got I8",
    ),
    "absent index entry": (
        lambda d: edit_json(d / INDEX, lambda index: index["weight_map"].pop(NORM)),
        f"index shard of tensor {NORM} must be model-",
    ),
    "no index": (lambda d: (d / INDEX).unlink(), f"must hold {INDEX} or model.safetensors, got neither"),
    "invalid index": (lambda d: (d / INDEX).write_text("{"), "must be valid JSON"),
    "no config": (lambda d: (d / "config.json").unlink(), "No such file or directory"),
    "invalid config": (lambda d: (d / "config.json").write_text("{"), "config.json must be valid JSON"),
    "config of another size": (config(n_routed_experts=8), "must hold the config's tensors, got none for"),
    "config against itself": (
        config(num_experts_per_tok=8), "num_experts_per_tok must be at most n_routed_experts (7), got 8"
    ),
    "config with too few ratios": (config(compress_ratios=[0, 0, 4]), "compress_ratios must"),
    "another architecture": (config(dspark_block_size=5), "V4-Flash-0731"),
    "corrupt tokenizer": (lambda d: (d / "tokenizer.json").write_text("{}"), "tokenizer.json must be a tokenizer file"),
}  # fmt: skip
SEEN_IN_DATA = {
    "NaN scale byte": (lambda d: poke(d, SCALE, 5, np.uint8(255)), f"scale {SCALE} must not be NaN, got E8M0 byte 255"),
    "NaN weight": (lambda d: poke(d, "layers.0.attn.wq_a.weight", 9, np.uint8(0x7F)), "got an e4m3 NaN"),
    "expert id outside": (
        lambda d: poke(d, "layers.0.ffn.gate.tid2eid", 0, np.int64(7)),
        "expert ids of layers.0.ffn.gate.tid2eid must be in [0, 7), got 7",
    ),
}


def logits(directory: Path, tmp_path: Path) -> tuple[object, ...]:
    prompts = write_json(tmp_path / "prompts.json", [[5, 6, 7]])
    return "logits", directory, "--prompts", prompts, "--out", tmp_path / "out.safetensors"


def check_refused(capfd, directory: Path, tmp_path: Path, message: str) -> None:
    with pytest.raises((ValueError, OSError)) as error:
        Engine.from_checkpoint(directory, SETTINGS, progress=False)
    assert message in str(error.value)
    assert message in refused(capfd, *logits(directory, tmp_path))
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("name", SEEN_EARLY)
def test_refused_before_any_data_is_read(capfd, damaged, tmp_path, monkeypatch, name):
    def read(*_: object) -> None:
        raise AssertionError("tensor data was read")

    monkeypatch.setattr(reader, "_read_tensor", read)
    damage, message = SEEN_EARLY[name]
    damage(damaged)
    check_refused(capfd, damaged, tmp_path, message)


@pytest.mark.parametrize("name", SEEN_IN_DATA)
def test_refused_while_loading(capfd, damaged, tmp_path, name):
    damage, message = SEEN_IN_DATA[name]
    damage(damaged)
    check_refused(capfd, damaged, tmp_path, message)


def test_intact_runs(capfd, intact, tmp_path):
    assert run_json(capfd, *logits(intact, tmp_path))["vocab"] == 61


def test_not_a_directory(capfd, tmp_path):
    check_refused(capfd, NANO / "config.json", tmp_path, "Not a directory")
