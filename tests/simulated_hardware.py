"""A device for start-up tests: graphs of CPU tensors, memory that is a number, and a record of what was asked of it.

What it cannot show is in ``tests/graphs/cpu_graphs.py``; nor does it compile anything.
"""

from collections.abc import Callable
from typing import Any

from dsv4.compile import CompiledModel, compile_model
from dsv4.engine import Engine
from dsv4.engine_config import EngineConfig
from dsv4.graphs.jit_libraries import WATCHES
from dsv4.model import DeepseekV4

from .graphs.cpu_graphs import CpuGraphs
from .tiny_model import random_tokens


class _Graphs(CpuGraphs):
    def __init__(self, owner: "SimulatedHardware", nbytes: int) -> None:
        super().__init__(nbytes)
        self.owner, self.events = owner, owner.events

    def free_bytes(self) -> int:
        """The pool, and a driver that keeps 1,000 bytes of every graph."""
        return super().free_bytes() - 1000 * sum(graph.fn is not None for graph in self.graphs)


class SimulatedHardware:
    """See the module's docstring.

    Args:
        graph_mode: as in ``EngineConfig``, whose own must be ``off`` on the CPU.
        free, total: bytes of the device.
        transient: bytes that a step is said to hold at most.
        pools: bytes of each memory pool, in order of creation; the last one serves all later ones.
    """

    def __init__(self, graph_mode="auto", *, free=1 << 30, total=1 << 31, transient=1 << 20, pools=(1 << 26,)) -> None:
        self.graph_mode, self.free, self.total, self.transient = graph_mode, free, total, transient
        self.pools, self.events, self.made = list(pools), [], []

    def prewarm(self, model, settings, **options) -> None:
        self.events.append("prewarm")

    def graphs(self) -> CpuGraphs:
        nbytes = self.pools.pop(0) if len(self.pools) > 1 else self.pools[0]
        self.made.append(_Graphs(self, nbytes))
        return self.made[-1]

    def free_and_total_bytes(self) -> tuple[int, int]:
        self.events.append("measure")
        return self.free, self.total

    def reset_peak(self) -> None:
        self.events.append("watch the peak")

    def transient_bytes(self) -> int:
        self.events.append("read the peak")
        return self.transient

    def release_cached(self) -> None:
        self.events.append("release cached")

    def jit_libraries(self) -> dict[str, str]:
        return dict.fromkeys(WATCHES, "simulated")


def settings_of(**changes) -> EngineConfig:
    return EngineConfig(**{
        "deterministic": True, "compile": "off", "max_seq_len": 512, "max_requests": 3, "token_budget": 6,
        "chunk_tokens": 6, "num_blocks": 6, "draft_tokens": 1,
    } | changes)  # fmt: skip


def make(model: DeepseekV4, hardware: SimulatedHardware | None = None, **changes) -> Engine:
    """An engine on simulated hardware."""
    settings = settings_of(**changes)
    return Engine.from_model(model, settings, progress=False, hardware=hardware or SimulatedHardware())


def eager_pieces(fn: Callable[..., Any], **options: Any) -> CompiledModel:
    """In the place of ``compile_model``: pieces as they were traced, since this machine's compiler takes a minute."""
    return compile_model(fn, options["boundary_ops"], options["mode"], backend="eager")


def prompts(count: int, length: int = 21) -> list[list[int]]:
    return [random_tokens(length + n, 61, seed=n) for n in range(count)]
