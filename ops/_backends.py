"""Which kernels serve an op that has several: chosen once per process, so that a dispatch stays a pure function.

Engines of one process share the kernels, and on one device their warm keys too. A choice can therefore be repeated
but not changed; the one exception is a block of :func:`using`, for tests and comparisons, which holds for
all threads.
"""

import importlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, get_args

Kind = Literal["mhc", "gemm"]
MhcBackend = Literal["triton", "tilelang"]
GemmBackend = Literal["triton", "deep_gemm"]
CHOICES: dict[Kind, tuple[str, ...]] = {"mhc": get_args(MhcBackend), "gemm": get_args(GemmBackend)}
REMEDIES = {"tilelang": "pip install 'dsv4[tilelang]'", "deep_gemm": "pip install 'dsv4[deep_gemm]'"}

_lock = threading.Lock()
_chosen: dict[Kind, str] = {}


def backend(kind: Kind) -> str:
    """The library whose kernels serve ``kind``; the first of :data:`CHOICES` until one is chosen."""
    return _chosen.get(kind, CHOICES[kind][0])


def check(names: Mapping[Kind, str]) -> None:
    """Raise what :func:`choose` would raise, and choose nothing.

    Raises:
        ValueError: no such choice, or this process has already chosen another.
        NotImplementedError: a library cannot be imported.
    """
    for kind, name in names.items():
        _check(kind, name)
    with _lock:
        _check_unchanged(names)


def choose(names: Mapping[Kind, str]) -> None:
    """Let every name serve its kind from now on, or none of them.

    Raises:
        ValueError, NotImplementedError: see :func:`check`.
    """
    for kind, name in names.items():
        _check(kind, name)
    with _lock:
        _check_unchanged(names)
        _chosen.update(names)


@contextmanager
def using(kind: Kind, name: str) -> Iterator[None]:
    """Let ``name`` serve ``kind`` inside the block."""
    _check(kind, name)
    with _lock:
        before = _chosen.get(kind)
        _chosen[kind] = name
    try:
        yield
    finally:
        with _lock:
            if before is None:
                del _chosen[kind]
            else:
                _chosen[kind] = before


def _check_unchanged(names: Mapping[Kind, str]) -> None:
    for kind, name in names.items():
        if _chosen.get(kind, name) != name:
            raise ValueError(f"{kind} kernels must stay {_chosen[kind]!r} in this process, got {name!r}")


def _check(kind: Kind, name: str) -> None:
    if name not in CHOICES[kind]:
        raise ValueError(f"{kind} kernels must be one of {list(CHOICES[kind])}, got {name!r}")
    if name == "triton":
        return
    try:
        importlib.import_module(name)
    except (ImportError, OSError) as error:
        remedy = REMEDIES[name]
        raise NotImplementedError(f"{kind} kernels of {name} need the library ({remedy}), got: {error}") from error
