"""Triton's launchers when several threads load them, as prewarm does.

Triton builds a C extension for every launch signature and names all of them alike. Python keeps one module object per
name for extensions of this kind: whoever loads a file for the second time gets that shared object, filled anew. Between
the load and Triton's look at ``launch``, another thread's load can therefore replace the launcher of one kernel by that
of another, which raises if the two take different numbers of arguments and reads the wrong ones if they do not. Seen
with Triton 3.6 in 2 of 35 processes that prewarmed with 16 threads each.
"""

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

_one_at_a_time = threading.RLock()  # two threads may both have put the guard in place, one around the other


def alone(load: Callable[[str, str], ModuleType]) -> Callable[[str, str], ModuleType]:
    """``load(name, path)``, made so that each result is a module of its own, which no later load changes."""

    @functools.wraps(load)
    def loaded(name: str, path: str) -> ModuleType:
        own = ModuleType(name)
        with _one_at_a_time:
            own.__dict__.update(load(name, path).__dict__)
        return own

    return loaded


@functools.cache
def _guarded() -> bool:
    """Have Triton load launchers that way; whether this release can be told to."""
    from triton.runtime import build

    load = getattr(build, "_load_module_from_path", None)
    if load is None:
        return False
    build._load_module_from_path = alone(load)
    return True


def loading() -> AbstractContextManager[object]:
    """Around a launch that may load a launcher: other threads may do the same where that is safe, else they wait."""
    return nullcontext() if _guarded() else _one_at_a_time
