"""A checkpoint of about 1 MB with every kind of layer, and a way to damage copies of it."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dsv4.config import ModelConfig
from dsv4.synth import write_synthetic

NANO = Path(__file__).resolve().parent.parent / "assets" / "nano"
INDEX = "model.safetensors.index.json"


def tiny_config(**changes: object) -> ModelConfig:
    """Ratios 0, 0, 4, 128 and the MTP block; widths that are no multiples of the FP8 block."""
    return ModelConfig.from_json(NANO).resized(**{
        "num_hidden_layers": 4, "hidden_size": 96, "num_attention_heads": 2, "head_dim": 160, "q_lora_rank": 48,
        "o_groups": 2, "o_lora_rank": 24, "moe_intermediate_size": 160, "vocab_size": 61, "index_n_heads": 2,
        "n_routed_experts": 7, "num_experts_per_tok": 3,
    } | changes)  # fmt: skip


def write_tiny(directory: Path, **changes: object) -> Path:
    write_synthetic(tiny_config(**changes), directory, seed=3, shard_bytes=300_000, progress=False)
    return directory


@dataclass
class Raw:
    """One stored tensor."""

    dtype: str
    shape: list[int]
    data: bytes


Shards = dict[str, dict[str, Raw]]


def load_raw(directory: Path) -> Shards:
    """All tensors by shard, parsed without the code under test."""
    shards: Shards = {}
    for path in sorted(directory.glob("*.safetensors")):
        blob = path.read_bytes()
        start = 8 + int.from_bytes(blob[:8], "little")
        header = json.loads(blob[8:start])
        shards[path.name] = {
            name: Raw(e["dtype"], e["shape"], blob[start + e["data_offsets"][0] : start + e["data_offsets"][1]])
            for name, e in header.items()
            if name != "__metadata__"
        }
    return shards


def save_shard(path: Path, tensors: dict[str, Raw]) -> None:
    header, end = {}, 0
    for name, raw in tensors.items():
        header[name] = {"dtype": raw.dtype, "shape": raw.shape, "data_offsets": [end, end + len(raw.data)]}
        end += len(raw.data)
    write_file(path, header, b"".join(raw.data for raw in tensors.values()))


def write_file(path: Path, header: object, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def save_raw(directory: Path, shards: Shards) -> None:
    """Replace all shards and the index."""
    for path in directory.glob("*.safetensors"):
        path.unlink()
    for shard, tensors in shards.items():
        save_shard(directory / shard, tensors)
    weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def copy(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def find(shards: Shards, name: str) -> dict[str, Raw]:
    """The shard that holds ``name``."""
    return next(tensors for tensors in shards.values() if name in tensors)


def poke(directory: Path, name: str, element: int, value: np.generic) -> None:
    """Overwrite one element of a stored tensor."""
    shards = load_raw(directory)
    raw = find(shards, name)[name]
    data = np.frombuffer(raw.data, dtype=value.dtype).copy()
    data[element] = value
    raw.data = data.tobytes()
    save_raw(directory, shards)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}
