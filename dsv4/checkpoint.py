"""The official checkpoint layout: its table of tensors, and a reader that checks all of it before any data is used.

:func:`expected_tensors` gives name, shape and dtype of every tensor of a config. :meth:`Checkpoint.open` reads the
index and the safetensors headers only, and compares them with that table; nothing is loaded unless all of it agrees.
Weights are ``[out, in]``; an FP8 matrix ``X.weight`` has ``X.scale`` per 128 x 128 block, a packed FP4 matrix one
scale per row and 32 inputs. Data types are named as in safetensors files.
Source: published checkpoints of DeepSeek-V4-Flash and -Pro; file format: huggingface/safetensors.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch

from .config import ModelConfig
from .ops._formats import FP4_BLOCK, WEIGHT_BLOCK

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors format
_SHOWN = 5

# E8M0 scales and packed FP4 pairs are read as bytes: a numeric conversion would destroy them.
DTYPES: dict[str, torch.dtype] = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.uint8,
    "I8": torch.uint8, "I64": torch.int64,
}  # fmt: skip


class CheckpointError(ValueError):
    """The checkpoint does not hold what its config asks for, or its files are damaged."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and safetensors dtype of one tensor; ``or_dtype`` is a second dtype that the checkpoint may use."""

    shape: tuple[int, ...]
    dtype: str
    or_dtype: str = ""

    def accepts(self, dtype: str) -> bool:
        return dtype in (self.dtype, self.or_dtype)


Table = dict[str, TensorSpec]


def blocks(size: int) -> int:
    """Blocks of 128 that cover ``size``."""
    return -(-size // WEIGHT_BLOCK)


class _Builder:
    """Adds the tensors of one config to a table."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.table: Table = {}
        # Base checkpoints with FP8 experts keep their power-of-two scales in float32 tensors of the same name.
        self.or_scale = "F32" if config.expert_dtype == "fp8" else ""

    def add(self, name: str, dtype: str, *shape: int) -> None:
        self.table[name] = TensorSpec(shape, dtype)

    def fp8(self, name: str, rows: int, cols: int) -> None:
        self.add(f"{name}.weight", "F8_E4M3", rows, cols)
        self.table[f"{name}.scale"] = TensorSpec((blocks(rows), blocks(cols)), "F8_E8M0", self.or_scale)

    def expert(self, name: str, rows: int, cols: int) -> None:
        if self.config.expert_dtype == "fp8":
            return self.fp8(name, rows, cols)
        self.add(f"{name}.weight", "I8", rows, cols // 2)
        self.add(f"{name}.scale", "F8_E8M0", rows, cols // FP4_BLOCK)

    def hyper(self, name: str, rows: int, num_scales: int) -> None:
        self.add(f"{name}_fn", "F32", rows, self.config.hc_mult * self.config.hidden_size)
        self.add(f"{name}_base", "F32", rows)
        self.add(f"{name}_scale", "F32", num_scales)

    def compressor(self, prefix: str, ratio: int, dim: int) -> None:
        width = 2 * dim if ratio == 4 else dim
        for name in ("wkv", "wgate"):
            self.add(f"{prefix}{name}.weight", "BF16", width, self.config.hidden_size)
        self.add(f"{prefix}ape", "F32", ratio, width)
        self.add(f"{prefix}norm.weight", "BF16", dim)

    def attention(self, prefix: str, ratio: int) -> None:
        c = self.config
        heads = c.num_attention_heads * c.head_dim
        self.add(f"{prefix}attn_sink", "F32", c.num_attention_heads)
        self.fp8(f"{prefix}wq_a", c.q_lora_rank, c.hidden_size)
        self.add(f"{prefix}q_norm.weight", "BF16", c.q_lora_rank)
        self.fp8(f"{prefix}wq_b", heads, c.q_lora_rank)
        self.fp8(f"{prefix}wkv", c.head_dim, c.hidden_size)
        self.add(f"{prefix}kv_norm.weight", "BF16", c.head_dim)
        self.fp8(f"{prefix}wo_a", c.o_groups * c.o_lora_rank, heads // c.o_groups)
        self.fp8(f"{prefix}wo_b", c.hidden_size, c.o_groups * c.o_lora_rank)
        if ratio:
            self.compressor(f"{prefix}compressor.", ratio, c.head_dim)
        if ratio == 4:
            self.fp8(f"{prefix}indexer.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
            self.add(f"{prefix}indexer.weights_proj.weight", "BF16", c.index_n_heads, c.hidden_size)
            self.compressor(f"{prefix}indexer.compressor.", ratio, c.index_head_dim)

    def experts(self, prefix: str, hashed: bool) -> None:
        c = self.config
        hidden, inner = c.hidden_size, c.moe_intermediate_size
        self.add(f"{prefix}gate.weight", "BF16", c.n_routed_experts, hidden)
        if hashed:
            self.add(f"{prefix}gate.tid2eid", "I64", c.vocab_size, c.num_experts_per_tok)
        else:
            self.add(f"{prefix}gate.bias", "F32", c.n_routed_experts)
        for name, rows, cols in (("w1", inner, hidden), ("w2", hidden, inner), ("w3", inner, hidden)):
            for expert in range(c.n_routed_experts):
                self.expert(f"{prefix}experts.{expert}.{name}", rows, cols)
            self.fp8(f"{prefix}shared_experts.{name}", rows, cols)

    def block(self, prefix: str, ratio: int, hashed: bool) -> None:
        c = self.config
        for site in ("attn", "ffn"):
            self.add(f"{prefix}{site}_norm.weight", "BF16", c.hidden_size)
            self.hyper(f"{prefix}hc_{site}", (2 + c.hc_mult) * c.hc_mult, 3)
        self.attention(f"{prefix}attn.", ratio)
        self.experts(f"{prefix}ffn.", hashed)

    def mtp(self, prefix: str) -> None:
        hidden = self.config.hidden_size
        self.block(prefix, self.config.mtp_ratio, False)
        for name in ("e_proj", "h_proj"):
            self.fp8(f"{prefix}{name}", hidden, hidden)
        for name in ("enorm", "hnorm", "norm"):
            self.add(f"{prefix}{name}.weight", "BF16", hidden)
        self.hyper(f"{prefix}hc_head", self.config.hc_mult, 1)


def expected_tensors(config: ModelConfig) -> Table:
    """Every tensor of the official layout of ``config``, by name."""
    build = _Builder(config)
    for name in ("embed", "head"):
        build.add(f"{name}.weight", "BF16", config.vocab_size, config.hidden_size)
    build.add("norm.weight", "BF16", config.hidden_size)
    build.hyper("hc_head", config.hc_mult, 1)
    for index, ratio in enumerate(config.layer_ratios):
        build.block(f"layers.{index}.", ratio, config.is_hash_layer(index))
    for index in range(config.num_nextn_predict_layers):
        build.mtp(f"mtp.{index}.")
    return build.table


def num_parameters(config: ModelConfig) -> int:
    """Logical parameters: two per byte of packed FP4; block scales and hash tables do not count."""
    counted = (
        math.prod(spec.shape) * (2 if spec.dtype == "I8" else 1)
        for name, spec in expected_tensors(config).items()
        if not name.endswith((".scale", ".tid2eid"))
    )
    return sum(counted)


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: ``num_bytes`` at ``offset`` (from the start of the file) of ``shard``."""

    shard: str
    offset: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: str


class Read(Protocol):
    """Reads one tensor by name into fresh CPU memory; FP4 pairs and E8M0 scales come as uint8."""

    def __call__(self, name: str) -> torch.Tensor: ...


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint whose names, shapes, dtypes and file extents agree with its config.

    Attributes:
        directory: folder of the files.
        config: from the folder's ``config.json``.
        entries: every tensor by name.
    """

    directory: Path
    config: ModelConfig
    entries: Mapping[str, Entry]

    @classmethod
    def open(cls, directory: str | Path) -> "Checkpoint":
        """Read index and headers and check them; no tensor data is read.

        Raises:
            CheckpointError: a missing, truncated or damaged shard; a file outside the directory; a missing or
                unexpected tensor; a wrong shape or dtype.
            ValueError: an invalid ``config.json``.
        """
        directory = Path(directory)
        config = ModelConfig.from_json(directory / "config.json")
        checkpoint = cls(directory, config, _read_entries(directory))
        expected = expected_tensors(config)
        checkpoint.require(expected)
        unexpected = sorted(checkpoint.entries.keys() - expected.keys())
        if unexpected:
            raise CheckpointError(f"{directory} must hold no tensors besides the config's, got {_some(unexpected)}")
        return checkpoint

    def require(self, expected: Mapping[str, TensorSpec]) -> None:
        """Check that every tensor of ``expected`` is there with its shape and dtype."""
        missing = [name for name in expected if name not in self.entries]
        mtp = [name for name in expected if name.startswith("mtp.")]
        if mtp and missing and set(mtp) <= set(missing):
            raise CheckpointError(
                f"{self.directory} must hold the MTP block (num_nextn_predict_layers is 1), got no tensor named mtp.0.*"
            )
        if missing:
            raise CheckpointError(f"{self.directory} must hold the config's tensors, got none for {_some(missing)}")
        for name, spec in expected.items():
            entry = self.entries[name]
            if entry.shape != spec.shape:
                raise CheckpointError(f"tensor {name} must have shape {list(spec.shape)}, got {list(entry.shape)}")
            if not spec.accepts(entry.dtype):
                allowed = " or ".join(filter(None, (spec.dtype, spec.or_dtype)))
                raise CheckpointError(f"tensor {name} must have dtype {allowed}, got {entry.dtype}")

    @contextmanager
    def reader(self) -> Iterator[Read]:
        """A function that reads tensors by name, with the shards held open."""
        files: dict[str, BinaryIO] = {}
        with ExitStack() as stack:

            def read(name: str) -> torch.Tensor:
                entry = self.entries[name]
                if entry.shard not in files:
                    files[entry.shard] = stack.enter_context((self.directory / entry.shard).open("rb"))
                return _read_tensor(files[entry.shard], name, entry)

            yield read


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def _read_tensor(file: BinaryIO, name: str, entry: Entry) -> torch.Tensor:
    data = torch.empty(entry.num_bytes, dtype=torch.uint8)
    file.seek(entry.offset)
    got = file.readinto(data.numpy())
    if got != entry.num_bytes:
        raise CheckpointError(f"tensor {name} in {entry.shard} must have {entry.num_bytes} bytes, got {got}")
    return data.view(DTYPES[entry.dtype]).view(entry.shape)


def _read_json(text: bytes, subject: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{subject} must be valid JSON, got: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{subject} must be a JSON object, got {type(value).__name__}")
    return value


def _read_entries(directory: Path) -> dict[str, Entry]:
    """All tensors of the checkpoint; index and headers must name the same ones."""
    index = directory / INDEX_FILE
    if not index.is_file():
        if not (directory / SINGLE_FILE).is_file():
            raise CheckpointError(f"{directory} must hold {INDEX_FILE} or {SINGLE_FILE}, got neither")
        return dict(_read_header(directory, SINGLE_FILE))
    weight_map = _read_json(index.read_bytes(), str(index)).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index} must have an object 'weight_map', got {weight_map!r}")
    for name, shard in weight_map.items():
        # Lexical, not resolved: download caches make the shards symbolic links to another folder.
        if not isinstance(shard, str) or shard in ("", ".", "..") or any(mark in shard for mark in "/\\\0"):
            raise CheckpointError(f"{index} must name files of its own directory, got {shard!r} for tensor {name}")
    entries: dict[str, Entry] = {}
    for shard in sorted(set(weight_map.values())):
        for name, entry in _read_header(directory, shard):
            if weight_map.get(name) != shard:
                listed = weight_map.get(name, "none")
                raise CheckpointError(f"index shard of tensor {name} must be {shard}, which holds it, got {listed}")
            entries[name] = entry
    absent = sorted(weight_map.keys() - entries.keys())
    if absent:
        raise CheckpointError(f"{INDEX_FILE} must list tensors that its shards hold, got {_some(absent)}")
    return entries


def _read_header(directory: Path, shard: str) -> Iterable[tuple[str, Entry]]:
    """Tensors of one safetensors file; its data must be exactly as long as the header says."""
    path = directory / shard
    if not path.is_file():
        raise CheckpointError(f"{directory} must hold the shard {shard}, got no such file")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(f"{shard} must hold its whole header ({length} bytes), got a file of {size} bytes")
        header = _read_json(file.read(length), f"header of {shard}")
    header.pop("__metadata__", None)
    found = [(name, _entry(shard, name, value, 8 + length)) for name, value in header.items()]
    end = 8 + length
    for name, entry in sorted(found, key=lambda item: item[1].offset):
        if entry.offset != end:
            raise CheckpointError(f"tensor {name} in {shard} must start at byte {end}, got {entry.offset}")
        end += entry.num_bytes
    if size != end:
        state = "truncated" if size < end else "too long"
        raise CheckpointError(f"{shard} must have {end} bytes, got {size} ({state})")
    return found


def _entry(shard: str, name: str, value: Any, data_start: int) -> Entry:
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        whole = isinstance(dtype, str) and all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        whole = False
    if not whole:
        raise CheckpointError(f"tensor {name} in {shard} must have dtype, shape and data_offsets, got {value!r}")
    if dtype not in DTYPES:
        raise CheckpointError(f"tensor {name} in {shard} must have a dtype of {sorted(DTYPES)}, got {dtype!r}")
    num_bytes = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != num_bytes:
        raise CheckpointError(f"tensor {name} in {shard} must have {num_bytes} bytes, got offsets {begin}...{end}")
    return Entry(shard, data_start + begin, num_bytes, shape, dtype)
