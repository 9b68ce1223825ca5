"""Launching Triton kernels: warm-key guard, and a recorder that tests use to compile every launch ahead of time.

This module does not import triton; kernel modules (``ops/*_kernel.py``) do, and are imported when first launched.
Kernels declare their token counts and other run-time integers in ``do_not_specialize``, so that a launch's key is its
constants and dtypes alone, and which tensors begin off a boundary of 16 bytes: Triton compiles another binary for them.
The allocator and every layout of this library keep to that boundary, so no prewarm has such keys.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from . import _runtime, _triton_hashes, _triton_launchers


@dataclass(frozen=True)
class Launch:
    """One recorded launch: ``kernel[grid](*args, **meta)`` under ``key``."""

    key: _runtime.Key
    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    meta: dict[str, Any]


_recorded: list[Launch] | None = None


def launch(key: _runtime.Key, kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Run ``kernel[grid](*args, **meta)``; an empty grid does nothing.

    Args:
        key: names the specialisation: everything that makes Triton compile another binary.
        kernel: a ``triton.jit`` function.
        grid: programs per axis.
        args: run-time arguments.
        meta: constexpr arguments, ``num_warps`` and ``num_stages``.

    Raises:
        ColdKernelError: the key is cold while the stream is being captured.
    """
    if _recorded is not None:
        _recorded.append(Launch(key, kernel, grid, args, meta))
        return
    if 0 in grid:
        return
    if off := _off_boundary(args):
        key = (*key, "off 16 bytes", off)
    if _runtime.is_warm(key):
        kernel[grid](*args, **meta)
        return
    _runtime.require_warm(key)
    # Triton would compile once in every thread that comes before the first is done
    with _runtime.first_launch(key), _triton_launchers.loading():
        _triton_hashes.settle(kernel)
        kernel[grid](*args, **meta)


def _off_boundary(args: tuple[Any, ...]) -> int:
    """A bit for every tensor among the arguments that does not begin on a boundary of 16 bytes."""
    off = 0
    for place, arg in enumerate(args):
        if isinstance(arg, torch.Tensor) and arg.data_ptr() & 15:
            off |= 1 << place
    return off


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Record launches instead of running them."""
    global _recorded
    before, _recorded = _recorded, []
    try:
        yield _recorded
    finally:
        _recorded = before


def names(*dtypes: torch.dtype) -> tuple[str, ...]:
    """Dtypes as a launch key holds them."""
    return tuple(str(dtype).removeprefix("torch.") for dtype in dtypes)


def dtype_key(*tensors: torch.Tensor) -> tuple[str, ...]:
    """Dtypes of ``tensors`` as a launch key holds them."""
    return names(*(tensor.dtype for tensor in tensors))
