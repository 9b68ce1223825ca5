"""State of this process that ops and start-up share: process groups by name, and the keys of warm specialisations.

No Python object crosses an op boundary, so a communication op names its group by a string. The empty string is this
rank alone: it always exists, has one rank and cannot be registered. Any other name must be registered first; an
unknown name is an error, never a group of one, because a mistyped name would drop the other ranks' work silently.

The warm-key set holds the :class:`~dsv4.ops.PrewarmCase` keys whose kernels are compiled and loaded in this process. A
launch under a cold key compiles, which takes seconds; while a stream is being captured that is an error, because the
driver would allow it and stall silently.

Every function may be called from any thread.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

SELF = ""
Key = tuple[str | int, ...]


class Group(Protocol):
    """What a group must offer; ``torch.distributed.ProcessGroup`` does."""

    def size(self) -> int: ...


_lock = threading.Lock()
_groups: dict[str, Group] = {}
_warm: set[Key] = set()
_references = False


class ColdKernelError(RuntimeError):
    """A kernel specialisation was needed during stream capture that was not compiled before."""


def register_group(name: str, group: Group) -> None:
    """Let ops reach ``group`` under ``name``; a name stands for one group until it is unregistered."""
    if name == SELF:
        raise ValueError("group name must not be empty, got '': the empty name is this rank alone")
    with _lock:
        if name in _groups:
            raise ValueError(f"group name must be unused, got {name!r}, which is registered")
        _groups[name] = group


def unregister_group(name: str) -> None:
    """Forget ``name``; the group itself is left alone."""
    with _lock:
        if name not in _groups:
            raise _unknown(name)
        del _groups[name]


def group_size(name: str) -> int:
    """Number of ranks of the group; 1 for the empty name."""
    if name == SELF:
        return 1
    with _lock:
        if name not in _groups:
            raise _unknown(name)
        return _groups[name].size()


def require_one_rank(op: str, name: str) -> None:
    """Raise ``NotImplementedError`` if ``name`` has several ranks; for ops that only have a body for one."""
    size = group_size(name)
    if size != 1:
        raise NotImplementedError(f"dsv4::{op} needs a group of one rank, got {name!r} of {size} ranks")


def _unknown(name: str) -> ValueError:
    return ValueError(f"group must be '' or one of {sorted(_groups)}, got {name!r}")


def mark_warm(key: Key) -> None:
    """Record that the specialisation ``key`` is compiled and loaded."""
    with _lock:
        _warm.add(key)


def is_warm(key: Key) -> bool:
    """Whether :func:`mark_warm` was called with ``key``."""
    with _lock:
        return key in _warm


def warm_keys() -> frozenset[Key]:
    """The warm keys at this moment."""
    with _lock:
        return frozenset(_warm)


def require_warm(key: Key) -> None:
    """Raise :class:`ColdKernelError` if ``key`` is cold while the current CUDA stream is being captured."""
    if key in _warm:  # membership of a set is atomic; the hot path takes no lock
        return
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise ColdKernelError(
            f"kernel specialisation must be warm before stream capture, got cold key {key}: "
            "run the prewarm outside capture first"
        )


@contextmanager
def use_references(enabled: bool = True) -> Iterator[None]:
    """Run the references in place of the CUDA kernels inside the block, to tell a kernel's fault from the model's."""
    global _references
    before, _references = _references, enabled
    try:
        yield
    finally:
        _references = before


def references_in_use() -> bool:
    return _references
