"""Weights in kernel layout: a flat dict of tensors, streamed from a checkpoint into preallocated memory.

Keys follow the checkpoint (``layers.3.attn.wq_a.weight``); what differs:

| kernel tensor | made of | ``official`` | ``exact`` |
| --- | --- | --- | --- |
| every FP8 matrix | its ``.weight``, ``.scale`` | e4m3 ``[N, K]``, fp32 ``[ceil(N/128), ceil(K/128)]`` | dense, empty |
| ``attn.wo_a.weight`` (no scale) | ``wo_a`` dequantised | bf16 ``[groups, rank, K]`` | dense |
| ``ffn.shared_experts.w13`` | rows of w1, then w3 | as an FP8 matrix, scale rows ``2 * ceil(I/128)`` | dense, empty |
| FP4 ``ffn.experts.w13``, ``.w2`` | stacked w1, w3 | uint8 ``[E, N, K/2]``, E8M0 ``[E, N, K/32]`` | dense, empty |
| FP8 ``ffn.experts.w13``, ``.w2`` | stacked w1, w3 | as the shared expert, with leading E | dense, empty |
| FP4 ones with ``expert_weights="fp8"`` | re-encoded (``reencode.py``) | as FP8 ones | – |
| ``compressor.wkv_gate`` | rows of wkv, then wgate | bf16 | ``dtype`` |
| other BF16 matrices: embed, head, router, indexer weights | | bf16 | ``dtype`` |
| ``ffn.gate.tid2eid`` | checked int64 | int32 | int32 |
| everything else | | fp32 | fp32 |

"dense" is the dequantised matrix in ``dtype`` (fp32 or bf16; an e4m3 or e2m1 value times a power of two fits both);
"empty" is a scale of shape ``[0]``. E8M0 scales are kept as uint8 bytes.
"""

import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from .checkpoint import (
    Checkpoint,
    CheckpointError,
    Read,
    TensorSpec,
    blocks,
    expected_tensors,
)
from .config import ModelConfig
from .execution import Execution, ExpertWeights, NumericsMode
from .ops._formats import (
    FP4_BLOCK,
    decode_e8m0,
    dequantize_fp4,
    dequantize_fp8_weight,
    power_of_two_at_least,
)
from .reencode import fp4_to_fp8

logger = logging.getLogger(__name__)

Weights = dict[str, torch.Tensor]
Kind = Literal["plain", "ids", "fp8", "fp4"]
_EXPERT = re.compile(r"(.*\.ffn\.(?:shared_)?experts)(?:\.(\d+))?\.w([123])")
MAX_SCALE_BYTE = 127 + 119  # 448 * 2^119 is the largest e4m3 value that stays finite in fp32


@dataclass(frozen=True)
class _Slot:
    """One kernel tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def allocate(self, device: torch.device | str) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class _Fill:
    """Where one checkpoint tensor or matrix goes: rows number ``part`` of the kernel tensor or matrix ``target``."""

    kind: Kind
    target: str
    part: int = 0


class _Layout:
    """Kernel tensors of one config, and which checkpoint tensors fill them.

    Attributes:
        expected: checkpoint tensors by name.
        slots: kernel tensors by key.
        fills: by checkpoint name; a matrix and its scale travel together under the name of the matrix.
    """

    def __init__(
        self, config: ModelConfig, numerics: NumericsMode, dtype: torch.dtype, expert_weights: ExpertWeights
    ) -> None:
        execution = Execution(numerics=numerics, dtype=dtype)
        if expert_weights == "fp8" and not execution.quantized:
            raise ValueError(f"expert_weights 'fp8' must come with numerics 'official', got {numerics!r}")
        self.fp4_resident = expert_weights == "fp4"
        self.config, self.quantized, self.dtype = config, execution.quantized, execution.dtype
        self.expected = expected_tensors(config)
        self.slots: dict[str, _Slot] = {}
        self.fills: dict[str, _Fill] = {}
        for name, spec in self.expected.items():
            base = name.removesuffix(".weight")
            if f"{base}.scale" in self.expected:
                self._matrix(name, base, spec)
            elif not name.endswith(".scale"):
                self._tensor(name, base, spec)

    def _tensor(self, name: str, base: str, spec: TensorSpec) -> None:
        if base.endswith((".compressor.wkv", ".compressor.wgate")):
            target, rows = f"{base.rpartition('.')[0]}.wkv_gate", 2 * spec.shape[0]
            self.slots[target] = _Slot((rows, *spec.shape[1:]), self.dtype)
            self.fills[name] = _Fill("plain", target, int(base.endswith("wgate")))
            return
        hashed = name.endswith(".tid2eid")
        act = spec.dtype == "BF16" and len(spec.shape) == 2  # products read them as stored and add up in fp32
        self.slots[name] = _Slot(spec.shape, torch.int32 if hashed else self.dtype if act else torch.float32)
        self.fills[name] = _Fill("ids" if hashed else "plain", name)

    def _matrix(self, name: str, base: str, spec: TensorSpec) -> None:
        target, part, parts, lead = base, 0, 1, ()
        if match := _EXPERT.fullmatch(base):
            prefix, expert, number = match.groups()
            parts = 1 if number == "2" else 2
            target = f"{prefix}.{'w2' if parts == 1 else 'w13'}"
            part = parts * int(expert or 0) + (number == "3")
            lead = () if expert is None else (self.config.n_routed_experts,)
        fp4 = spec.dtype == "I8"
        self.fills[name] = _Fill("fp4" if fp4 else "fp8", target, part)
        if f"{target}.weight" not in self.slots:
            rows, cols = spec.shape[0], spec.shape[1] * (2 if fp4 else 1)
            self._matrix_slots(target, lead, parts, rows, cols, fp4)

    def _matrix_slots(self, target: str, lead: tuple[int, ...], parts: int, rows: int, cols: int, fp4: bool) -> None:
        """Slots of ``parts`` matrices ``[rows, cols]`` one below the other, ``lead`` times."""
        if target.endswith(".wo_a"):
            groups = self.config.o_groups
            self.slots[f"{target}.weight"] = _Slot((groups, rows // groups, cols), self.dtype)
            return
        if not self.quantized:
            weight, scale = _Slot((*lead, parts * rows, cols), self.dtype), _Slot((0,), torch.float32)
        elif fp4 and self.fp4_resident:
            weight = _Slot((*lead, parts * rows, cols // 2), torch.uint8)
            scale = _Slot((*lead, parts * rows, cols // FP4_BLOCK), torch.uint8)
        else:
            weight = _Slot((*lead, parts * rows, cols), torch.float8_e4m3fn)
            scale = _Slot((*lead, parts * blocks(rows), blocks(cols)), torch.float32)
        self.slots |= {f"{target}.weight": weight, f"{target}.scale": scale}


def meta_weights(
    config: ModelConfig, numerics: NumericsMode, dtype: torch.dtype, expert_weights: ExpertWeights = "fp4"
) -> Weights:
    """The dict that :func:`load_weights` returns, on the meta device: names, shapes and dtypes without data."""
    layout = _Layout(config, numerics, dtype, expert_weights)
    return {key: slot.allocate("meta") for key, slot in layout.slots.items()}


def load_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    numerics: NumericsMode,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: bool = True,
    expert_weights: ExpertWeights = "fp4",
) -> Weights:
    """Read a checkpoint shard by shard into kernel layout.

    Args:
        checkpoint: opened, hence checked, checkpoint.
        config: its config, or one that asks for a part of it (without the MTP block, or fewer layers).
        numerics: ``exact`` dequantises every matrix; ``official`` keeps the stored formats.
        dtype: activation dtype; bf16 for ``official``.
        device: where the tensors go. Beside them, one checkpoint matrix at a time is held.
        progress: show a progress bar on stderr.
        expert_weights: ``fp8`` re-encodes FP4 experts without loss, or refuses them; ``fp4`` keeps the stored format.

    Returns:
        Kernel tensors by key. On an error nothing is returned and the memory is released.

    Raises:
        CheckpointError: a NaN or otherwise invalid scale, a non-finite value, an expert id outside the model,
            FP4 experts that FP8 cannot hold when ``expert_weights`` asks for it.
        ValueError: a numerics, dtype and ``expert_weights`` combination that does not exist.
    """
    layout = _Layout(config, numerics, dtype, expert_weights)
    checkpoint.require(layout.expected)
    started = time.perf_counter()
    weights = {key: slot.allocate(device) for key, slot in layout.slots.items()}
    entries = checkpoint.entries
    names = sorted(layout.fills, key=lambda name: (entries[name].shard, entries[name].offset))
    num_bytes = sum(entries[name].num_bytes for name in names)
    with checkpoint.reader() as read, byte_progress(progress, "loading weights", num_bytes) as advance:
        for name in names:
            _fill(weights, layout, name, read)
            advance(entries[name].num_bytes)
    gib = sum(t.numel() * t.element_size() for t in weights.values()) / 2**30
    logger.info("weights: %d tensors, %.2f GiB, %.1f s", len(weights), gib, time.perf_counter() - started)
    return weights


@contextmanager
def byte_progress(shown: bool, title: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr; the yielded function adds bytes to it."""
    rates = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(TextColumn(title), BarColumn(), *rates, console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task(title, total=num_bytes)
        yield lambda done: bar.advance(task, done)


def _fill(weights: Weights, layout: _Layout, name: str, read: Read) -> None:
    """Read the checkpoint tensor or matrix ``name``, check it and put it in its place."""
    fill = layout.fills[name]
    if fill.kind == "plain":
        _put(weights[fill.target], fill.part, _finite(name, read(name)))
    elif fill.kind == "ids":
        _put(weights[fill.target], fill.part, _expert_ids(name, read(name), layout.config.n_routed_experts))
    else:
        _fill_matrix(weights, fill, name, read)


def _fill_matrix(weights: Weights, fill: _Fill, name: str, read: Read) -> None:
    target = weights[f"{fill.target}.weight"]
    scale_name = f"{name.removesuffix('.weight')}.scale"
    scale = _checked_scale(scale_name, read(scale_name)).to(target.device)
    codes = read(name).to(target.device)
    if fill.kind == "fp8" and int((codes.view(torch.uint8) & 0x7F).max()) == 0x7F:
        raise CheckpointError(f"tensor {name} must be finite, got an e4m3 NaN")
    if target.dtype in (torch.float32, torch.bfloat16):
        dense = dequantize_fp4(codes, scale) if fill.kind == "fp4" else dequantize_fp8_weight(codes, _decoded(scale))
        _put(target, fill.part, dense)
        return
    if fill.kind == "fp4" and target.dtype == torch.float8_e4m3fn:
        codes, scale = fp4_to_fp8(name, codes, scale)
    _put(target, fill.part, codes)
    _put(weights[f"{fill.target}.scale"], fill.part, scale if target.dtype == torch.uint8 else _decoded(scale))


def _put(target: torch.Tensor, part: int, value: torch.Tensor) -> None:
    """Copy ``value [n, ...]`` over rows ``part * n ...`` of ``target``, whose leading dimensions are flattened."""
    rows = target.view(-1, *value.shape[1:])
    rows[part * value.shape[0] : (part + 1) * value.shape[0]].copy_(value)


def _decoded(scale: torch.Tensor) -> torch.Tensor:
    """fp32 values of scales that may be stored as E8M0 bytes."""
    return decode_e8m0(scale) if scale.dtype == torch.uint8 else scale


def _checked_scale(name: str, scale: torch.Tensor) -> torch.Tensor:
    if scale.dtype == torch.uint8:
        largest = int(scale.max())
        if largest == 255:
            raise CheckpointError(f"scale {name} must not be NaN, got E8M0 byte 255")
        if largest > MAX_SCALE_BYTE:
            raise CheckpointError(f"scale {name} must have E8M0 bytes up to {MAX_SCALE_BYTE} (2^119), got {largest}")
        return scale
    valid = (scale >= 2.0**-126) & (scale <= 2.0**119)  # false for NaN
    valid &= power_of_two_at_least(torch.where(valid, scale, 1.0)) == scale
    if not bool(valid.all()):
        raise CheckpointError(f"scale {name} must hold powers of two in [2^-126, 2^119], got {float(scale[~valid][0])}")
    return scale


def _finite(name: str, value: torch.Tensor) -> torch.Tensor:
    finite = torch.isfinite(value)
    if not bool(finite.all()):
        raise CheckpointError(f"tensor {name} must be finite, got {float(value[~finite][0])}")
    return value


def _expert_ids(name: str, ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    outside = (ids < 0) | (ids >= num_experts)
    if bool(outside.any()):
        raise CheckpointError(f"expert ids of {name} must be in [0, {num_experts}), got {int(ids[outside][0])}")
    return ids
