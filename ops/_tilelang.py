"""Launching TileLang kernels: warm-key guard, one table of built kernels, and a recorder for tests.

A kernel is a function that returns a :class:`Program` for its constants. Numbers of rows and of parts are symbolic
64-bit dimensions, outputs are arguments, so that one build serves every call and a launch allocates nothing. The
adapter of TileLang that is used (``tvm_ffi``) launches on torch's current stream, which a capture needs.

TileLang is imported when the first kernel is built. Programs are written under one lock, since that takes
milliseconds and uses state of the library; they are compiled, which takes seconds, in the thread that needs them.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from . import _runtime


@dataclass(frozen=True)
class Program:
    """A ``T.prim_func`` whose outputs are all arguments, and the options of its compilation."""

    function: Any
    options: Mapping[str, Any] = field(default_factory=dict)


Build = Callable[[], Program]


@dataclass(frozen=True)
class Launch:
    """One recorded launch under ``key`` of the program that ``build`` returns, with ``args``."""

    key: _runtime.Key
    build: Build
    grid: tuple[int, ...]
    args: tuple[Any, ...]


_kernels: dict[tuple[_runtime.Key, str], Any] = {}
_program_lock = threading.Lock()
_recorded: list[Launch] | None = None


def launch(key: _runtime.Key, build: Build, grid: tuple[int, ...], *args: Any) -> None:
    """Build the kernel of ``key`` unless that was done, and run it on ``args``; an empty grid does nothing.

    Args:
        key: names the specialisation: everything that ``build`` depends on.
        build: returns the program; called at most once per key, architecture and process.
        grid: numbers of rows and the like of which none may be zero; the kernel computes its own grid.
        args: tensors, contiguous and on a boundary of 16 bytes (``_aligned``), and scalars.

    Raises:
        ColdKernelError: the key is cold while the stream is being captured.
    """
    if _recorded is not None:
        _recorded.append(Launch(key, build, grid, args))
        return
    if 0 in grid:
        return
    _runtime.require_warm(key)
    arch = architecture(args[0].device)
    kernel = _kernels.get((key, arch))
    if kernel is not None and _runtime.is_warm(key):
        kernel(*args)
        return
    with _runtime.first_launch(key):
        if (key, arch) not in _kernels:
            _kernels[key, arch] = compile_program(build, arch)
        _kernels[key, arch](*args)  # the first call compiles host code, which TileLang does not guard against threads


def compile_program(build: Build, arch: str) -> Any:
    """The kernel of ``build`` for ``arch``, compiled or loaded from TileLang's disk cache; needs nvcc, but no GPU."""
    import tilelang
    from tilelang import tvm

    with _program_lock:
        program = build()
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    with target:
        return tilelang.compile(
            program.function, target=target, execution_backend="tvm_ffi", pass_configs=dict(program.options)
        )


def architecture(device: torch.device) -> str:
    """Compiler's name of the device's architecture, with the instructions that only it has."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Record launches instead of running them."""
    global _recorded
    before, _recorded = _recorded, []
    try:
        yield _recorded
    finally:
        _recorded = before
