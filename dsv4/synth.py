"""Synthetic checkpoints: random weights of any config in the official layout, streamed tensor by tensor.

Matrices are normal with standard deviation 0.02, quantised by the rules of the official checkpoints (FP8 per 128 x 128
block, FP4 per 32 inputs); norms are near 1, expert tables valid, so activations stay finite. A tensor depends only on
the seed, its name and its shape. An FP4 matrix is drawn from one table of 65,536 quantised blocks of 32, because
quantising a trillion normals afresh would take days.
"""

import json
import math
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .checkpoint import (
    DTYPES,
    INDEX_FILE,
    Table,
    TensorSpec,
    expected_tensors,
    num_parameters,
)
from .config import ModelConfig
from .ops._formats import (
    FP4_BLOCK,
    FP8_AMAX_FLOOR,
    FP8_MAX,
    WEIGHT_BLOCK,
    encode_e8m0,
    pack_fp4,
    power_of_two_at_least,
    quantize_fp4,
)
from .options import is_seed
from .weights import byte_progress

STD = 0.02
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_FP4_TABLE_BLOCKS = 1 << 16
_CENTRES = {"norm.weight": 1.0, "_scale": 0.5}  # mean by name ending, 0 for the rest
_SPREADS = {"_base": 0.5, "attn_sink": 0.5, "gate.bias": 0.01}  # standard deviation by name ending


@dataclass(frozen=True)
class SynthReport:
    """What was written."""

    tensors: int
    shards: int
    bytes: int
    parameters: int
    copied: tuple[str, ...]
    """Files of the tokenizer."""


def write_synthetic(
    config: ModelConfig,
    out_dir: str | Path,
    *,
    seed: int = 0,
    shard_bytes: int = 4 << 30,
    progress: bool = True,
    tokenizer_dir: str | Path | None = None,
    **overrides: Any,
) -> SynthReport:
    """Write a random checkpoint of ``config`` with ``overrides`` applied (:meth:`ModelConfig.resized`).

    Args:
        config: the model.
        out_dir: new or empty directory. ``config.json`` and the index are written last, so that an interrupted run
            cannot pass for a checkpoint.
        seed: in [0, 2**63); the same seed gives the same bytes.
        shard_bytes: tensor data per file; a larger tensor gets a file of its own.
        progress: show a progress bar on stderr.
        tokenizer_dir: directory whose :data:`TOKENIZER_FILES` are copied, those that are there; they decide no weight.
        **overrides: config fields, e.g. ``num_hidden_layers=4, n_routed_experts=8``.

    Raises:
        ValueError: an invalid override or seed, a directory that holds files, ``shard_bytes`` below 1.
    """
    config = config.resized(**overrides)
    if not is_seed(seed):
        raise ValueError(f"seed must be an integer in [0, 2**63), got {seed!r}")
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes must be positive, got {shard_bytes}")
    out_dir = Path(out_dir)
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise ValueError(f"output directory must be absent or empty, got {out_dir}")
    out_dir.mkdir(parents=True, exist_ok=True)
    table = expected_tensors(config)
    shards = _split(table, shard_bytes)
    values = _values(config, table, seed)
    weight_map: dict[str, str] = {}
    total = sum(_num_bytes(spec) for spec in table.values())
    with byte_progress(progress, "writing weights", total) as advance:
        for number, names in enumerate(shards, 1):
            file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            with (out_dir / file_name).open("wb") as file:
                file.write(_header(table, names))
                for name in names:
                    file.write(_as_bytes(next(values), table[name]))
                    advance(_num_bytes(table[name]))
            weight_map |= dict.fromkeys(names, file_name)
    copied = tuple(name for name in TOKENIZER_FILES if tokenizer_dir and (Path(tokenizer_dir) / name).is_file())
    for name in copied:
        shutil.copyfile(Path(tokenizer_dir) / name, out_dir / name)
    (out_dir / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n")
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out_dir / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n")
    return SynthReport(
        tensors=len(table), shards=len(shards), bytes=total, parameters=num_parameters(config), copied=copied
    )


def _num_bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * DTYPES[spec.dtype].itemsize


def _split(table: Table, shard_bytes: int) -> list[list[str]]:
    """Names by shard, in table order."""
    shards: list[list[str]] = []
    used = shard_bytes
    for name, spec in table.items():
        size = _num_bytes(spec)
        if not shards or used + size > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def _header(table: Table, names: list[str]) -> bytes:
    """safetensors header: length, then JSON padded to a multiple of 8 bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        begin, end = end, end + _num_bytes(table[name])
        header[name] = {"dtype": table[name].dtype, "shape": table[name].shape, "data_offsets": (begin, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _as_bytes(value: torch.Tensor, spec: TensorSpec) -> memoryview:
    assert value.shape == spec.shape and value.dtype == DTYPES[spec.dtype], (value.shape, value.dtype, spec)
    return memoryview(value.contiguous().view(-1).view(torch.uint8).numpy())


def _values(config: ModelConfig, table: Table, seed: int) -> Iterator[torch.Tensor]:
    """Data of every tensor in table order, where each scale follows its matrix."""
    fp4_table = _fp4_table(_generator(seed, "FP4 blocks")) if config.expert_dtype == "fp4" else None
    scale: torch.Tensor | None = None
    for name, spec in table.items():
        generator = _generator(seed, name)
        if scale is not None:
            value, scale = scale, None
        elif spec.dtype == "I8":
            value, scale = _draw_fp4(fp4_table, spec.shape, generator)
        elif spec.dtype == "F8_E4M3":
            value, scale = _quantize_weight(torch.randn(spec.shape, generator=generator) * STD)
        elif spec.dtype == "I64":
            value = _expert_table(spec.shape, config.n_routed_experts, generator)
        else:
            value = _plain(name, spec.shape, generator).to(DTYPES[spec.dtype])
        yield value


def _generator(seed: int, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))


def _by_ending(values: dict[str, float], name: str, default: float) -> float:
    return next((value for ending, value in values.items() if name.endswith(ending)), default)


def _plain(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator) * _by_ending(_SPREADS, name, STD)
    return noise + _by_ending(_CENTRES, name, 0.0)


def _expert_table(shape: tuple[int, ...], num_experts: int, generator: torch.Generator) -> torch.Tensor:
    """Distinct random experts for every token id."""
    rows, topk = shape
    return torch.rand(rows, num_experts, generator=generator).topk(topk, dim=-1).indices


def _quantize_weight(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes ``[N, K]`` and E8M0 bytes ``[ceil(N/128), ceil(K/128)]``."""
    rows, cols = value.shape
    padded = torch.nn.functional.pad(value, (0, -cols % WEIGHT_BLOCK, 0, -rows % WEIGHT_BLOCK))
    tiles = padded.unflatten(1, (-1, WEIGHT_BLOCK)).unflatten(0, (-1, WEIGHT_BLOCK))  # [N/128, 128, K/128, 128]
    scale = power_of_two_at_least(tiles.abs().amax((1, 3)).clamp_min(FP8_AMAX_FLOOR) / FP8_MAX)
    codes = (tiles / scale[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX).flatten(2, 3).flatten(0, 1)
    return codes[:rows, :cols].to(torch.float8_e4m3fn), encode_e8m0(scale)


def _fp4_table(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed blocks ``[65536, 16]`` and their E8M0 bytes ``[65536]``."""
    codes, scale = quantize_fp4(torch.randn(_FP4_TABLE_BLOCKS, FP4_BLOCK, generator=generator) * STD)
    return pack_fp4(codes), encode_e8m0(scale).squeeze(-1)


def _draw_fp4(
    table: tuple[torch.Tensor, torch.Tensor], shape: tuple[int, ...], generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, packed_cols = shape
    num_blocks = packed_cols * 2 // FP4_BLOCK
    picks = torch.randint(_FP4_TABLE_BLOCKS, (rows, num_blocks), generator=generator)
    return table[0][picks].flatten(1), table[1][picks]
