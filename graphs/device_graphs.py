"""What capture needs of a device: graphs in one memory pool, a side stream, and addresses without ownership.

:class:`CudaGraphs` is the real thing. The protocols exist so that everything around it can be tested without a GPU.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Literal, Protocol

import torch

ErrorMode = Literal["global", "thread_local", "relaxed"]


class Graph(Protocol):
    """One captured call."""

    def capture(self, fn: Callable[[], Any]) -> Any:
        """Record what ``fn`` launches and return what it returns; nothing has run yet. At most once per graph."""
        ...

    def replay(self) -> None: ...

    def reset(self) -> None:
        """Free the graph, also after a failed capture."""
        ...


class DeviceGraphs(Protocol):
    """Graphs of one device that share one memory pool.

    Memory that a captured call allocates belongs to the pool. Once every tensor on it is dropped, later captures get it
    again, and it stays mapped until :meth:`release`. So the owner of the graphs replays them in the order of capture.
    """

    device: torch.device

    def graph(self) -> Graph: ...

    def side_stream(self) -> AbstractContextManager[None]:
        """Run the block on the stream of capture, after earlier work and before later work of the current stream."""
        ...

    def capturing(self) -> bool: ...

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the same memory that does not keep it from being reused."""
        ...

    def pool_bytes(self) -> int: ...

    def free_bytes(self) -> int:
        """Of the device, as the driver counts them."""
        ...

    def settle(self) -> None:
        """Wait for the device and give unused cached memory back."""
        ...

    def release(self) -> None:
        """Free the pool; its graphs were reset before."""
        ...


class CudaGraphs:
    """``torch.cuda.CUDAGraph`` objects in one pool.

    Args:
        device: a CUDA device; default: the current one.
        error_mode: which CUDA calls end a capture: unsafe ones of any thread (``global``), or of this thread, for a
            process in which other threads use the device.
    """

    def __init__(self, device: torch.device | str | None = None, error_mode: ErrorMode = "global") -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("CUDA graphs need a CUDA device, got a machine or a torch without one")
        device = torch.device("cuda" if device is None else device)
        if device.type != "cuda":
            raise ValueError(f"device of CUDA graphs must be a CUDA device, got {device}")
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device, self._error_mode = torch.device("cuda", index), error_mode
        self._stream = torch.cuda.Stream(self.device)
        self._pool = torch.cuda.graph_pool_handle()

    def graph(self) -> Graph:
        return _CudaGraph(self._pool, self._error_mode)

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        before = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(before)
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
                yield
        finally:
            before.wait_stream(self._stream)

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.numel():
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        memory = torch.as_tensor(_Memory(tensor.data_ptr(), extent_bytes(tensor)), device=tensor.device)
        return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def pool_bytes(self) -> int:
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s.get("segment_pool_id", ())) == tuple(self._pool))

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0]

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def release(self) -> None:
        self.settle()
        self._pool = torch.cuda.graph_pool_handle()  # a pool whose last graph is gone cannot be used again


class _CudaGraph:
    def __init__(self, pool: Any, error_mode: ErrorMode) -> None:
        self._graph, self._pool, self._error_mode = torch.cuda.CUDAGraph(), pool, error_mode

    def capture(self, fn: Callable[[], Any]) -> Any:
        self._graph.capture_begin(pool=self._pool, capture_error_mode=self._error_mode)
        try:
            result = fn()
        except BaseException:
            with suppress(RuntimeError):  # the capture may already be invalid; fn's error says why
                self._graph.capture_end()
            raise
        self._graph.capture_end()
        return result

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        self._graph.reset()


class _Memory:
    """Bytes at an address, for ``torch.as_tensor``."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "strides": None, "version": 3,
        }  # fmt: skip


def extent_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to the end of its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
