"""What start-up needs of the device that a model runs on: kernels to warm, graphs to capture, memory to measure.

:class:`Hardware` exists so that the order of the stages can be tested without a GPU.
"""

import gc
from collections.abc import Mapping
from types import ModuleType
from typing import Protocol

import torch
import torch.distributed as dist

from .engine_config import EngineConfig, GraphMode
from .graphs.device_graphs import CudaGraphs, DeviceGraphs
from .graphs.prewarm import PrewarmReport
from .model import DeepseekV4
from .ops._jit_libraries import imported_libraries
from .prewarming import warm_kernels


class Hardware(Protocol):
    """One device with kernels. The CPU has none: references serve its ops."""

    graph_mode: GraphMode

    def prewarm(
        self,
        model: DeepseekV4,
        settings: EngineConfig,
        *,
        group: dist.ProcessGroup | None,
        store: dist.Store | None,
        progress: bool,
    ) -> PrewarmReport | None:
        """Warm every kernel of ``model``, or only agree with the other ranks if the settings switch that off."""
        ...

    def graphs(self) -> DeviceGraphs:
        """A new memory pool."""
        ...

    def free_and_total_bytes(self) -> tuple[int, int]: ...

    def reset_peak(self) -> None:
        """Start watching what tensors take."""
        ...

    def transient_bytes(self) -> int:
        """What tensors took at most since then, beyond what they take now."""
        ...

    def release_cached(self) -> None:
        """Collect garbage and give what the allocator caches back to the device."""
        ...

    def jit_libraries(self) -> Mapping[str, ModuleType | str]:
        """Kernel libraries of this process for a JIT monitor; only one that was imported can compile anything."""
        ...


def hardware_of(settings: EngineConfig) -> Hardware | None:
    """The hardware of ``settings.device``; ``None`` for the CPU."""
    device = torch.device(settings.device)
    return CudaHardware(device, settings.graph_mode) if device.type == "cuda" else None


class CudaHardware:
    """A CUDA device."""

    def __init__(self, device: torch.device, graph_mode: GraphMode) -> None:
        self.device, self.graph_mode = device, graph_mode

    def prewarm(
        self,
        model: DeepseekV4,
        settings: EngineConfig,
        *,
        group: dist.ProcessGroup | None,
        store: dist.Store | None,
        progress: bool,
    ) -> PrewarmReport | None:
        return warm_kernels(model.config, settings, group=group, store=store, progress=progress)

    def graphs(self) -> DeviceGraphs:
        return CudaGraphs(self.device)

    def free_and_total_bytes(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self.device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def transient_bytes(self) -> int:
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_allocated(self.device)

    def release_cached(self) -> None:
        torch.cuda.synchronize(self.device)
        gc.collect()
        torch.cuda.empty_cache()

    def jit_libraries(self) -> Mapping[str, ModuleType | str]:
        return imported_libraries()
