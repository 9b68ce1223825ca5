"""Paged caches of one model: window rows, compressed entries, indexer entries, compressor state.

Layouts are defined in docs/ops.md. All layers share one set of block ids and one set of window page ids; physical
block ``b`` of a ratio-``m`` layer holds ``256 / m`` entries.
"""

from dataclasses import dataclass

import torch

from .config import ModelConfig
from .execution import CacheStorage, Execution
from .ops import _paged
from .ops.shapes import BLOCK_TOKENS, WINDOW_PAGE_TOKENS

TAIL_ROWS = 4  # rows of the previous ratio-4 window that the next window pools again
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class LayerCache:
    """Cache tensors of one layer; the ones its kind lacks have zero pages.

    Attributes:
        window: rows of ``head_dim`` in pages of 128 tokens.
        entries: compressed entries of ``head_dim``, ``256 / ratio`` per block.
        index_entries: indexer entries of ``index_head_dim``, 64 per block (ratio 4 only).
        state: ``[slots, ring, 2 * width]`` fp32 compressor rows (key-value, then score + ape).
        index_state: the same for the indexer's compressor.
    """

    window: torch.Tensor
    entries: torch.Tensor
    index_entries: torch.Tensor
    state: torch.Tensor
    index_state: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.window, self.entries, self.index_entries, self.state, self.index_state


@dataclass
class ModelCaches:
    """Caches of the backbone layers, of the MTP block, and the expert-load counters.

    Attributes:
        layers: one per backbone layer.
        mtp: one per MTP block (a window-only layer); empty list when the model has none.
        load_enabled: ``[1]`` int32; 0 switches expert-load counting off.
        load_counts: per backbone layer ``[experts]`` int64.
        mtp_load_counts: the same per MTP block.
    """

    layers: list[LayerCache]
    mtp: list[LayerCache]
    load_enabled: torch.Tensor
    load_counts: list[torch.Tensor]
    mtp_load_counts: list[torch.Tensor]

    def tensors(self) -> list[torch.Tensor]:
        return [t for layer in (*self.layers, *self.mtp) for t in layer.tensors()]

    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors())


torch.utils._pytree.register_dataclass(LayerCache)
torch.utils._pytree.register_dataclass(ModelCaches)


def ring_rows(ratio: int, max_draft: int) -> int:
    """Rows of the position-addressed compressor state: the pooled rows and every row a rejected draft can overwrite."""
    pooled = 2 * ratio if ratio == 4 else ratio
    return pooled + -(-(max_draft + 1) // 8) * 8


def allocate_caches(
    config: ModelConfig,
    execution: Execution,
    *,
    num_blocks: int,
    num_window_pages: int,
    num_slots: int,
    storage: CacheStorage,
    max_draft: int = 0,
    device: torch.device | str = "cpu",
) -> ModelCaches:
    """Allocate the caches of every layer.

    Args:
        num_blocks: physical 256-token blocks.
        num_window_pages: physical 128-token window pages.
        num_slots: compressor-state slots, one per running request.
        storage: ``fp32``, ``bf16`` or the ``fp8`` layouts; refused when the numerics mode excludes its rounding.
        max_draft: most draft rows of a verification step.

    Raises:
        ValueError: a size that is not positive, or a storage that does not fit the numerics or the head size.
    """
    execution.check_storage(storage)
    for name, value in (("num_blocks", num_blocks), ("num_window_pages", num_window_pages), ("num_slots", num_slots)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if max_draft < 0:
        raise ValueError(f"max_draft must be at least 0, got {max_draft}")

    def pages(count: int, rows: int, dim: int) -> torch.Tensor:
        if storage == "fp8":
            return torch.zeros(count, _paged.fp8_page_bytes(rows, dim), dtype=torch.uint8, device=device)
        return torch.zeros(count, rows, dim, dtype=_DTYPES[storage], device=device)

    def state(ratio: int, dim: int) -> torch.Tensor:
        width = dim * (2 if ratio == 4 else 1)
        return torch.zeros(num_slots, ring_rows(ratio, max_draft), 2 * width, dtype=torch.float32, device=device)

    def layer(ratio: int) -> LayerCache:
        none = torch.empty(0, 1, config.head_dim, dtype=_DTYPES.get(storage, torch.bfloat16), device=device)
        no_state = torch.empty(0, 1, 1, device=device)
        indexed = ratio == 4
        return LayerCache(
            window=pages(num_window_pages, WINDOW_PAGE_TOKENS, config.head_dim),
            entries=pages(num_blocks, BLOCK_TOKENS // ratio, config.head_dim) if ratio else none,
            index_entries=pages(num_blocks, BLOCK_TOKENS // ratio, config.index_head_dim) if indexed else none.clone(),
            state=state(ratio, config.head_dim) if ratio else no_state,
            index_state=state(ratio, config.index_head_dim) if indexed else no_state.clone(),
        )

    def counts() -> torch.Tensor:
        return torch.zeros(config.n_routed_experts, dtype=torch.int64, device=device)

    num_mtp = config.num_nextn_predict_layers
    return ModelCaches(
        layers=[layer(ratio) for ratio in config.layer_ratios],
        mtp=[layer(0) for _ in range(num_mtp)],
        load_enabled=torch.zeros(1, dtype=torch.int32, device=device),
        load_counts=[counts() for _ in config.layer_ratios],
        mtp_load_counts=[counts() for _ in range(num_mtp)],
    )


def copy_window_page(caches: ModelCaches, source: int, target: int) -> None:
    """Copy one physical window page in every layer (a private copy of a shared prefix's last page)."""
    for layer in (*caches.layers, *caches.mtp):
        layer.window[target] = layer.window[source]


def tail_rows(caches: ModelCaches, slot: int, position: int) -> list[torch.Tensor]:
    """Copies of the ratio-4 compressor rows of the 4 positions before ``position``, per state tensor."""
    return [state[slot, _tail(state, position)].clone() for state in _overlapping_states(caches)]


def restore_tail_rows(caches: ModelCaches, slot: int, position: int, rows: list[torch.Tensor]) -> None:
    """Put rows saved by :func:`tail_rows` at the same ``position`` into ``slot``."""
    for state, saved in zip(_overlapping_states(caches), rows, strict=True):
        state[slot, _tail(state, position)] = saved


def _tail(state: torch.Tensor, position: int) -> torch.Tensor:
    return torch.arange(position - TAIL_ROWS, position, device=state.device) % state.shape[1]


def _overlapping_states(caches: ModelCaches) -> list[torch.Tensor]:
    """State tensors whose windows overlap: a layer has an indexer exactly when its ratio is 4."""
    return [s for c in caches.layers if c.index_state.shape[0] for s in (c.state, c.index_state)]
