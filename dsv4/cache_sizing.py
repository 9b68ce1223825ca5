"""How many cache blocks an engine gets: from what the device has free once kernels, pieces and graphs are known.

Everything is counted in bytes. The device's memory is divided in this order: what is in use already (weights, kernels,
other processes), what capture will take, the transient buffers of a step that runs without a graph, the share that
``gpu_memory_utilization`` leaves alone, and the caches.
"""

import os
from dataclasses import dataclass
from typing import Literal

import torch

from .caches import allocate_caches
from .config import ModelConfig
from .engine_config import EngineConfig
from .ops.shapes import BLOCK_TOKENS
from .step_loop import cache_pages

GIB = 2**30
SEGMENT_BYTES = 2 << 20
"""The allocator rounds a large tensor up to this."""


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """What was measured before the caches are allocated.

    Attributes:
        free: of the device, with nothing cached by the allocator.
        total: of the device.
        graphs: expected need of the capture.
        transient: most that a step held at once, besides its inputs and what outlives it.
    """

    free: int
    total: int
    graphs: int
    transient: int


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """The size of the caches, and where it comes from.

    Attributes:
        num_blocks: 256-token blocks.
        cache_bytes: of all caches.
        source: ``given`` by the settings, ``measured`` from free memory, or the ``default`` of a device whose memory is
            not measured: enough for every running request.
        memory: what was measured, if anything was.
    """

    num_blocks: int
    cache_bytes: int
    source: Literal["given", "measured", "default"]
    memory: DeviceMemory | None


def plan_cache(config: ModelConfig, settings: EngineConfig, memory: DeviceMemory | None) -> CachePlan:
    """Decide ``num_blocks``.

    Args:
        config: the model's config.
        settings: ``num_blocks`` wins if given, but must fit into free memory; else as many blocks as fit within
            ``gpu_memory_utilization``, without prefix reuse no more than running requests can hold.
        memory: of the device; ``None`` where it is not measured: caches then must fit into the machine's memory.

    Raises:
        ValueError: the caches do not fit; names what they need and what is free.
    """
    if memory is None:
        blocks, source = cache_pages(settings, config.sliding_window)[0], "given" if settings.num_blocks else "default"
        need = check_host_memory(config, settings)
        return CachePlan(num_blocks=blocks, cache_bytes=need, source=source, memory=None)
    room = memory.free - memory.graphs - memory.transient
    if settings.num_blocks is not None:
        need = cache_bytes(config, settings, settings.num_blocks)
        if need > room:
            raise ValueError(
                f"num_blocks must fit into free memory, {_shown(memory)}, got {settings.num_blocks} blocks of "
                f"{need / GIB:.2f} GiB in all"
            )
        return CachePlan(num_blocks=settings.num_blocks, cache_bytes=need, source="given", memory=memory)
    room -= round(memory.total * (1 - settings.gpu_memory_utilization))
    one, two = (cache_bytes(config, settings, blocks) for blocks in (1, 2))
    per_block = two - one
    blocks = (room - _rounding(config) - (one - per_block)) // per_block
    if blocks < settings.max_blocks:
        raise ValueError(
            f"free memory must hold the cache of one sequence of max_seq_len {settings.max_seq_len}, "
            f"{settings.max_blocks} blocks of {per_block / 2**20:.2f} MiB, within gpu_memory_utilization "
            f"{settings.gpu_memory_utilization} of {memory.total / GIB:.2f} GiB, got {_shown(memory)}"
        )
    if not settings.prefix_reuse:
        blocks = min(blocks, settings.max_requests * settings.max_blocks)
    need = cache_bytes(config, settings, blocks)
    return CachePlan(num_blocks=blocks, cache_bytes=need, source="measured", memory=memory)


def check_host_memory(config: ModelConfig, settings: EngineConfig, *, lower: str | None = None) -> int:
    """Bytes of the caches of an engine on the CPU.

    Raises:
        ValueError: the machine has less memory (the system would grant it, and end the process when it is written);
            names what to ``lower``, by default the settings that decided on the size.
    """
    blocks = cache_pages(settings, config.sliding_window)[0]
    need, host = cache_bytes(config, settings, blocks), _host_bytes()
    if need > host:
        sizes = f"max_seq_len ({settings.max_seq_len}) or max_requests ({settings.max_requests})"
        lower = lower or ("num_blocks" if settings.num_blocks else sizes)
        raise ValueError(
            f"caches must fit into host memory of {host / GIB:.2f} GiB, got {need / GIB:.2f} GiB for {blocks} blocks "
            f"of {BLOCK_TOKENS} tokens: lower {lower}"
        )
    return need


def cache_bytes(config: ModelConfig, settings: EngineConfig, num_blocks: int) -> int:
    """Bytes of the caches of an engine with ``num_blocks`` blocks."""
    blocks, pages = cache_pages(settings.with_blocks(num_blocks), config.sliding_window)
    caches = allocate_caches(
        config, settings.execution, num_blocks=blocks, num_window_pages=pages, num_slots=settings.max_requests,
        storage=settings.storage, max_draft=settings.draft_tokens, device=torch.device("meta"),
    )  # fmt: skip
    return caches.bytes()


def _host_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _rounding(config: ModelConfig) -> int:
    """Most that the allocator can lose to rounding: once per tensor, and one segment for all small ones."""
    num_layers = len(config.layer_ratios) + config.num_nextn_predict_layers
    return (5 * num_layers + 10) * SEGMENT_BYTES


def _shown(memory: DeviceMemory) -> str:
    return (
        f"{memory.free / GIB:.2f} GiB free less {memory.graphs / GIB:.2f} GiB for graphs and "
        f"{memory.transient / GIB:.2f} GiB for buffers of a step"
    )
