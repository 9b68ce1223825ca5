"""One hash per kernel, in whatever order a process meets its kernels: Triton's disk cache is found by it.

Triton hashes a kernel with the constants that its callees read, but takes those from a callee *before* it hashes the
callee. So a callee that another kernel has had hashed adds its constants, and one that nobody has called adds none: a
kernel's hash, and with it its place on disk, depends on what was launched before. Seen with Triton 3.6: of two
processes that prewarm the same kernels with threads, the second compiled five of 132 again. Here callees come first,
which is the one order that every process can keep.
"""

import threading
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

_one_at_a_time = threading.RLock()
_settled: set[int] = set()  # by identity: kernels live as long as their modules, and comparing two would hash both


def settle(kernel: Any) -> None:
    """Have Triton hash everything that ``kernel`` calls, innermost first, and then ``kernel``."""
    if not _is_hashed(kernel):
        return
    with _one_at_a_time:  # a thread that comes while another is here must not go on before the hashes are there
        if id(kernel) in _settled:
            return
        _settled.add(id(kernel))
        for callee in _named(kernel.fn):
            settle(callee)
        kernel.cache_key  # noqa: B018  (a property that computes the hash and keeps it)


def _is_hashed(value: object) -> bool:
    """Whether Triton hashes ``value``: a function of its language, and not one that it interprets."""
    return isinstance(getattr(type(value), "cache_key", None), property) and hasattr(value, "fn")


def _named(function: Any) -> Iterator[object]:
    """What ``function`` names: globals, and attributes of modules among them. More than it calls does no harm."""
    names = tuple(_names(function.__code__))
    found, modules = [function.__globals__.get(name) for name in names], set()
    for value in found:
        if not isinstance(value, ModuleType):
            yield value
        elif value.__name__ not in modules:
            modules.add(value.__name__)
            found += [getattr(value, name, None) for name in names]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
