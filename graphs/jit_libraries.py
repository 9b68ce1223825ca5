"""How the JIT monitor sees into each kernel library; the library itself arrives as a module.

A watch reports every compilation and disk load with a key and its seconds, and asks before either whether it may
happen. It chains what was installed before it, and when other code installed something on top of it, it stays in the
chain and lets everything pass.

* Triton: ``knobs.runtime.jit_cache_hook`` fires in a launch before a specialisation is compiled or loaded,
  ``knobs.compilation.listener`` whenever ``triton.compile`` has done either and tells which, and
  ``knobs.runtime.jit_post_compile_hook`` after both; the last one only counts what the listener did not report.
  ``triton.compile`` without a launch can only be refused afterwards.
* TileLang has no hooks: two methods of ``JITKernel`` are wrapped, one of which has a private name. Kernels that its
  autotuner compiles in groups pass neither.

What a watch needs of a library is looked up before it is installed: :meth:`Watch.missing`.
"""

import functools
import hashlib
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Literal, Protocol

Kind = Literal["compile", "load"]
Seen = Callable[[Kind, str, float], None]
Before = Callable[[str], None]


class Watch(Protocol):
    """Installed while a monitor is open. ``seen`` takes kind, key and seconds; ``before`` takes a key and may raise."""

    def __init__(self, library: ModuleType, seen: Seen, before: Before) -> None: ...

    def missing(self) -> str | None:
        """Why this release of the library cannot be watched, or ``None``."""

    def install(self) -> None: ...

    def remove(self) -> None: ...


class TritonWatch:
    """See the module's docstring."""

    _HOOKS = (("runtime", "jit_cache_hook"), ("compilation", "listener"), ("runtime", "jit_post_compile_hook"))

    def __init__(self, library: ModuleType, seen: Seen, before: Before) -> None:
        self._knobs, self._seen, self._before = getattr(library, "knobs", None), seen, before
        self._started: dict[str, float] = {}  # launches between their first and their last hook
        self._installed: list[tuple[Any, str, Callable[..., Any], Any]] = []
        self._active = False

    def missing(self) -> str | None:
        for group, name in self._HOOKS:
            if not hasattr(getattr(self._knobs, group, None), name):
                return f"triton.knobs.{group}.{name} does not exist"
        return None

    def install(self) -> None:
        self._active = True
        for (group, name), chained in zip(self._HOOKS, (self._on_launch, self._on_compile, self._on_done), strict=True):
            knobs = getattr(self._knobs, group)
            previous = getattr(knobs, name)
            hook = functools.partial(chained, previous)
            self._installed.append((knobs, name, hook, previous))
            setattr(knobs, name, hook)

    def remove(self) -> None:
        self._active = False
        for knobs, name, hook, previous in self._installed:
            if getattr(knobs, name) is hook:
                setattr(knobs, name, previous)
        self._installed.clear()
        self._started.clear()

    def _on_launch(self, previous: Callable[..., Any] | None, **event: Any) -> Any:
        key = _launch_key(event) if self._active else ""
        if self._active:
            self._before(key)
            self._started[key] = time.perf_counter()
        skip = previous(**event) if previous is not None else None
        if skip:  # Triton drops the launch
            self._started.pop(key, None)
        return skip

    def _on_compile(self, previous: Callable[..., Any] | None, **event: Any) -> None:
        if previous is not None:
            previous(**event)
        if self._active:
            key = _source_key(event["src"], event["metadata"])
            started = self._started.pop(key, None)
            seconds = event["times"].total / 1e6 if started is None else time.perf_counter() - started
            self._seen("load" if event["cache_hit"] else "compile", key, seconds)

    def _on_done(self, previous: Callable[..., Any] | None, **event: Any) -> Any:
        result = previous(**event) if previous is not None else None
        key = _launch_key(event) if self._active else ""
        started = self._started.pop(key, None)
        if started is not None:  # the listener was displaced; whether this was a load is unknown
            self._seen("compile", key, time.perf_counter() - started)
        return result


def _launch_key(event: Mapping[str, Any]) -> str:
    function, what = event["fn"], event["compile"]
    attrs = what["configs"][0] if what.get("configs") else {}
    return _triton_key(f"{function.module}.{function.name}", what["signature"], what["constants"], attrs, what)


def _source_key(source: Any, metadata: Mapping[str, Any]) -> str:
    function = getattr(source, "fn", None)
    if function is None:  # compiled from an IR file
        return f"{source.name}.{source.ext}"
    name = f"{function.fn.__module__}.{function.fn.__qualname__}"
    return _triton_key(name, source.signature, source.constants, source.attrs, metadata)


def _triton_key(
    name: str,
    signature: Mapping[str, Any],
    constants: Mapping[tuple[int, ...], Any],
    attrs: Mapping[tuple[int, ...], Any],
    options: Mapping[str, Any],
) -> str:
    parts = []
    for position, (argument, kind) in enumerate(signature.items()):
        fixed = [value for path, value in constants.items() if path[0] == position]
        known = [value for path, values in attrs.items() if path[0] == position for _, value in values]
        text = ",".join(map(str, fixed)) if fixed else str(kind)
        parts.append(":".join([f"{argument}={text}", *map(str, known)]))
    return f"{name}[warps={options['num_warps']}, stages={options['num_stages']}]({', '.join(parts)})"


class TileLangWatch:
    """See the module's docstring."""

    _COMPILE, _LOAD = "_compile_and_create_adapter", "from_database"

    def __init__(self, library: ModuleType, seen: Seen, before: Before) -> None:
        self._kernel, self._seen, self._before = getattr(library, "JITKernel", None), seen, before
        self._installed: list[tuple[str, Any, Any]] = []
        self._active = False

    def missing(self) -> str | None:
        for name in (self._COMPILE, self._LOAD):
            if name not in vars(self._kernel or object):
                return f"tilelang.JITKernel.{name} does not exist"
        if not isinstance(vars(self._kernel)[self._LOAD], classmethod):
            return f"tilelang.JITKernel.{self._LOAD} is not a class method"
        return None

    def install(self) -> None:
        self._active = True
        compile_one, load = vars(self._kernel)[self._COMPILE], vars(self._kernel)[self._LOAD]
        self._wrap(self._COMPILE, compile_one, self._timed("compile", compile_one))
        self._wrap(self._LOAD, load, classmethod(self._timed("load", load.__func__)))

    def remove(self) -> None:
        self._active = False
        for name, wrapper, previous in self._installed:
            if vars(self._kernel)[name] is wrapper:
                setattr(self._kernel, name, previous)
        self._installed.clear()

    def _wrap(self, name: str, previous: Any, wrapper: Any) -> None:
        self._installed.append((name, wrapper, previous))
        setattr(self._kernel, name, wrapper)

    def _timed(self, kind: Kind, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._active:
                return method(owner, *args, **kwargs)
            function = args[0] if args else kwargs.get("func", kwargs.get("tilelang_func"))
            key, started = _tilelang_key(function), time.perf_counter()
            self._before(key)
            result = method(owner, *args, **kwargs)
            self._seen(kind, key, time.perf_counter() - started)
            return result

        return timed


def _tilelang_key(function: Any) -> str:
    """Symbol and a hash of the program text: kernels of one symbol differ in their constants."""
    symbol = (getattr(function, "attrs", None) or {}).get("global_symbol", "kernel")
    return f"{symbol}#{hashlib.sha256(str(function).encode()).hexdigest()[:12]}"


WATCHES: Mapping[str, type[Watch]] = {"triton": TritonWatch, "tilelang": TileLangWatch}
