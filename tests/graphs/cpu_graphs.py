"""Graphs of CPU tensors: a graph records a call and runs it again into the memory that its outputs had.

The pool is a real arena: memory of an output comes back when the last tensor on it is gone, and the next capture gets
it, so a test that replays in a wrong order or drops a buffer too early computes wrong numbers. Outputs of a capture are
poison until the first replay, as on a device, where capture runs nothing. What this cannot show: whether a device
accepts the capture, streams, and real memory.
"""

import ctypes
import weakref
from contextlib import contextmanager
from functools import partial

import torch

from dsv4.graphs.capture import CapturedStep
from dsv4.graphs.device_graphs import extent_bytes

from . import toy_step as toy

POISON = 0x7F
ALIGN = 64


class Arena:
    def __init__(self, nbytes: int) -> None:
        self.memory = torch.full((nbytes,), POISON, dtype=torch.uint8)
        self.limit, self.live, self.peak = nbytes, {}, 0

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        """Poisoned memory for a tensor of the layout of ``like``."""
        nbytes = -(-extent_bytes(like) // ALIGN) * ALIGN
        offset = 0
        for start, size in sorted(self.live.items()):
            if start - offset >= nbytes:
                break
            offset = start + size
        if offset + nbytes > self.limit:
            raise torch.OutOfMemoryError(f"arena of {self.limit} bytes, {nbytes} more asked for")
        self.live[offset], self.peak = nbytes, max(self.peak, offset + nbytes)
        self.memory[offset : offset + nbytes] = POISON
        block = (ctypes.c_uint8 * nbytes).from_address(self.memory.data_ptr() + offset)
        weakref.finalize(block, self.live.pop, offset)
        return _tensor_on(block, like)

    def holds(self, tensor: torch.Tensor) -> bool:
        return 0 <= tensor.data_ptr() - self.memory.data_ptr() < self.memory.nbytes


def _tensor_on(block, like: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(block, dtype=like.dtype).as_strided(like.shape, like.stride())


class CpuGraphs:
    def __init__(self, nbytes: int = 1 << 20) -> None:
        self.device = torch.device("cpu")
        self.arena = Arena(nbytes)
        self.events: list[str] = []
        self.graphs: weakref.WeakSet = weakref.WeakSet()
        self.is_capturing = self.on_side_stream = False

    def graph(self) -> "CpuGraph":
        graph = CpuGraph(self)
        self.graphs.add(graph)
        return graph

    @contextmanager
    def side_stream(self):
        self.on_side_stream = True
        try:
            yield
        finally:
            self.on_side_stream = False

    def capturing(self) -> bool:
        return self.is_capturing

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.numel():
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        return _tensor_on((ctypes.c_uint8 * extent_bytes(tensor)).from_address(tensor.data_ptr()), tensor)

    def pool_bytes(self) -> int:
        return self.arena.peak

    def free_bytes(self) -> int:
        return self.arena.limit - self.arena.peak

    def settle(self) -> None:
        self.events.append("settle")

    def release(self) -> None:
        assert all(graph.fn is None for graph in self.graphs), "a pool must be released after its graphs"
        self.arena.peak = 0
        self.events.append("release")


class CpuGraph:
    def __init__(self, owner: CpuGraphs) -> None:
        self.owner, self.fn, self.outputs = owner, None, ()

    def capture(self, fn: partial):
        assert self.owner.on_side_stream and self.fn is None
        self.owner.events.append("capture")
        self.owner.is_capturing = True
        try:
            results = fn()
            arena, storages = self.owner.arena, {_storage(a) for a in fn.args if isinstance(a, torch.Tensor)}

            def place(value):
                return value if _storage(value) in storages or not value.numel() else arena.empty(value)

            outputs = _map(place, results)
        finally:
            self.owner.is_capturing = False

        def later(arg):  # a graph does not own what it reads
            return self.owner.borrow(arg) if isinstance(arg, torch.Tensor) and arena.holds(arg) else arg

        self.fn = partial(fn.func, *map(later, fn.args))
        self.outputs = _map(self.owner.borrow, outputs)
        return outputs

    def replay(self) -> None:
        results = self.fn()
        for kept, new in zip(_tuple(self.outputs), _tuple(results), strict=True):
            if kept.data_ptr() != new.data_ptr():
                kept.copy_(new)

    def reset(self) -> None:
        self.fn, self.outputs = None, ()
        self.owner.events.append("reset")


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tuple(value) -> tuple:
    return (value,) if isinstance(value, torch.Tensor) else tuple(value)


def _map(fn, value):
    return fn(value) if isinstance(value, torch.Tensor) else tuple(map(fn, value))


def ready(boundary=toy.BOUNDARY, model: dict | None = None, **options) -> tuple[CapturedStep, toy.Model]:
    """A captured step of a model as new, and the model."""
    eager, compiled = toy.shared(boundary, **(model or {}))
    step = toy.captured(compiled, CpuGraphs(), **options)
    step.capture(toy.no_prewarm)
    return step, eager
