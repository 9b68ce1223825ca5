"""State of this process that ops and start-up share: groups by name, keys of warm specialisations, first-use callbacks.

No Python object crosses an op boundary, so a communication op names its group by a string. The empty string is this
rank alone: it always exists, has one rank and cannot be registered. Any other name must be registered first; an
unknown name is an error, never a group of one, because a mistyped name would drop the other ranks' work silently.

The warm-key set holds, for each device, the :class:`~dsv4.ops.PrewarmCase` keys whose kernels this process has compiled
and loaded there: libraries compile and load for the current device. A launch under a cold key compiles, which takes
seconds; while a stream is being captured that is an error, because the driver would allow it and stall silently.

A first-use callback warms a model that nobody prewarmed: the first call of any op on CUDA runs every armed callback,
once. It is the second trigger, for entry points that bypass loading, and serves one rank only: ranks that warm
whenever they happen to call an op first are what a prewarm has to prevent.

Every function may be called from any thread. What a prewarm may do (:func:`in_prewarm`) holds for its own threads.
"""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

SELF = ""
Key = tuple[str | int, ...]
Building = Callable[[Key], AbstractContextManager[None]]


class Group(Protocol):
    """What a group must offer; ``torch.distributed.ProcessGroup`` does."""

    def size(self) -> int: ...


_lock = threading.Lock()
_groups: dict[str, Group] = {}
_warm: set[tuple[int, Key]] = set()
_launching: dict[Key, threading.Lock] = {}
_references = False
_first_use_lock = threading.RLock()
_thread = threading.local()
_sealed = False
first_uses: dict[Hashable, Callable[[], object]] = {}
"""Armed callbacks, which ops look at before every CUDA call; see :func:`arm_first_use` and :func:`disarm_first_use`."""


class ColdKernelError(RuntimeError):
    """A cold specialisation was needed where none may compile: in a stream capture, or in a process that is sealed."""


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


def current_device() -> int:
    """Index of the CUDA device on which a launch would run; −1 in a process that has not used one."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else -1


def mark_warm(key: Key) -> None:
    """Record that the specialisation ``key`` is compiled and loaded for the current device."""
    with _lock:
        _warm.add((current_device(), key))


def is_warm(key: Key) -> bool:
    """Whether :func:`mark_warm` was called with ``key`` on the current device."""
    return (current_device(), key) in _warm  # membership of a set is atomic; the hot path takes no lock


@contextmanager
def first_launch(key: Key) -> Iterator[None]:
    """Launch under a cold ``key``, one thread at a time, so that it is compiled once; then the key is warm.

    In a prewarm that said how (:func:`in_prewarm`), one process of the machine at a time.
    """
    with _lock:
        lock = _launching.setdefault(key, threading.Lock())
    with lock, nullcontext() if is_warm(key) else getattr(_thread, "building", nullcontext)(key):
        yield
        mark_warm(key)


def warm_keys() -> frozenset[Key]:
    """The warm keys of the current device at this moment."""
    here = current_device()
    with _lock:
        return frozenset(key for device, key in _warm if device == here)


def require_warm(key: Key) -> None:
    """Raise :class:`ColdKernelError` if ``key`` is cold while the current CUDA stream is being captured."""
    if is_warm(key):
        return
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise ColdKernelError(
            f"kernel specialisation must be warm before stream capture, got cold key {key}: "
            "run the prewarm outside capture first"
        )


def seal() -> None:
    """From now on, a library whose compilations cannot be observed is only called under warm keys or in a prewarm.

    There is no way back: what one engine of the process guarantees, a later one must not break. It warms its own keys.
    """
    global _sealed
    _sealed = True


def require_known(key: Key) -> None:
    """:func:`require_warm` for a library without hooks, whose cold kernels nothing else would notice.

    Raises:
        ColdKernelError: ``key`` is cold, and a stream is being captured, or the process is sealed and this thread is
            not in a prewarm (:func:`in_prewarm`).
    """
    require_warm(key)
    if _sealed and not is_warm(key) and not _warming():
        raise ColdKernelError(
            f"kernel specialisation must be warm once the process is ready, got cold key {key}: "
            "prewarm with the sizes that are used"
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


# ---- first use -------------------------------------------------------------------------------------------------------


def arm_first_use(name: Hashable, callback: Callable[[], object]) -> None:
    """Let the first CUDA call of an op run ``callback``; of several under one name the first stays."""
    with _first_use_lock:
        first_uses.setdefault(name, callback)


def disarm_first_use(name: Hashable) -> None:
    """Forget the callback of ``name``; nothing happens if there is none."""
    with _first_use_lock:
        first_uses.pop(name, None)


@contextmanager
def in_prewarm(building: Building | None = None) -> Iterator[None]:
    """Ops that this thread calls inside the block are a prewarm: they run no callback, and may compile in a sealed
    process.

    Args:
        building: opened around the first launch under a key, lest other processes compile it as well; default: that of
            a surrounding block, if any.
    """
    before = vars(_thread).copy()
    _thread.warming = True
    if building is not None:
        _thread.building = building
    try:
        yield
    finally:
        vars(_thread).clear()
        vars(_thread).update(before)


def _warming() -> bool:
    return getattr(_thread, "warming", False)


def run_first_uses(op: str) -> None:
    """Run the armed callbacks before a CUDA call of ``op``, with other threads' first calls waiting.

    Nothing happens in a prewarm, under a tracer, and while a stream is being captured, where :func:`require_warm`
    guards. A callback that raises stays armed.

    Raises:
        RuntimeError: there are several ranks.
    """
    if _warming() or torch.compiler.is_compiling():
        return
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return
    with _first_use_lock, in_prewarm():
        if first_uses and (size := _num_ranks()) > 1:
            raise RuntimeError(
                f"kernels must be warm on every rank before the first op, got a first call of dsv4::{op} in a process "
                f"of {size} ranks: call dsv4.prewarm(model) on every rank"
            )
        while first_uses:
            name = next(iter(first_uses))
            first_uses[name]()
            first_uses.pop(name, None)


def _num_ranks() -> int:
    """Ranks that this process works with: of the default process group, or of the largest registered group."""
    distributed = torch.distributed
    world = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
    with _lock:
        return max([world, *(group.size() for group in _groups.values())])
