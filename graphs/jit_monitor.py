"""Counts what is compiled, and what is loaded from disk, by library and key, with seconds.

Either stalls a step, and while a stream is being captured either breaks or stalls the capture. ``count`` records,
``warn`` also logs, ``raise`` refuses: before the compilation where the library has a hook for it, else right after.

Three kinds of source, none of which this module imports:

* libraries with hooks (``jit_libraries.WATCHES``), given as modules; one that is not installed is given as the reason
  and reported as absent, one whose hooks are gone is reported as unwatched and refused in mode ``raise``;
* counters: functions that return cumulative counts by key, such as those of a compile report or of a cache directory.
  They are read when the monitor opens, when it closes, and for a report; a library that is only counted can be
  refused no earlier than at closing.

Only this process is seen. A monitor may be opened from any thread and sees all threads; monitors may be nested.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any, Literal, Self, get_args

from .jit_libraries import WATCHES, Kind, Watch

logger = logging.getLogger(__name__)

Mode = Literal["count", "warn", "raise"]


class JitError(RuntimeError):
    """Something was compiled or loaded from disk where everything had to be warm."""


@dataclass(frozen=True)
class KeyCounts:
    """What happened under one key."""

    compilations: int = 0
    loads: int = 0
    seconds: float = 0.0

    def __add__(self, other: "KeyCounts") -> "KeyCounts":
        return KeyCounts(self.compilations + other.compilations, self.loads + other.loads, self.seconds + other.seconds)

    def __sub__(self, other: "KeyCounts") -> "KeyCounts":
        return KeyCounts(self.compilations - other.compilations, self.loads - other.loads, self.seconds - other.seconds)


Counter = Callable[[], Mapping[str, KeyCounts]]


@dataclass(frozen=True)
class JitReport:
    """Counts of one monitor.

    Attributes:
        libraries: per watched or counted library, its keys.
        absent: libraries that this process does not have, with the reason: they cannot have compiled anything.
        unwatched: libraries that are installed and could not be watched: nothing is known about them.
        refused: keys that mode ``raise`` refused before anything was compiled, by library.
    """

    libraries: Mapping[str, Mapping[str, KeyCounts]]
    absent: Mapping[str, str]
    unwatched: Mapping[str, str]
    refused: Mapping[str, tuple[str, ...]]

    def total(self, library: str) -> KeyCounts:
        """Sum over the keys of ``library``; ``ValueError`` for one that was not watched, which is not a zero."""
        if library not in self.libraries:
            raise ValueError(f"library must be one of {sorted(self.libraries)}, got {library!r}")
        return sum(self.libraries[library].values(), KeyCounts())

    @property
    def compilations(self) -> int:
        return sum(self.total(library).compilations for library in self.libraries)

    @property
    def loads(self) -> int:
        return sum(self.total(library).loads for library in self.libraries)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        counts = {}
        for library, keys in self.libraries.items():
            counts[library] = vars(self.total(library)) | {"keys": {key: vars(each) for key, each in keys.items()}}
        return {
            "libraries": counts,
            "absent": dict(self.absent),
            "unwatched": dict(self.unwatched),
            "refused": {library: list(keys) for library, keys in self.refused.items()},
        }


class JitMonitor:
    """A context manager; counts add up over several uses.

    Args:
        mode: see the module's docstring.
        libraries: every name of ``jit_libraries.WATCHES``, as the imported module or as the reason of its absence.
        counters: further libraries by name; see the module's docstring.

    Raises:
        ValueError: unknown mode, or names that are not those of the watches.
    """

    def __init__(
        self,
        mode: Mode = "count",
        *,
        libraries: Mapping[str, ModuleType | str],
        counters: Mapping[str, Counter] | None = None,
    ) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {get_args(Mode)}, got {mode!r}")
        if set(libraries) != set(WATCHES):
            raise ValueError(f"libraries must be {sorted(WATCHES)}, each as module or reason, got {sorted(libraries)}")
        self._counters = dict(counters or {})
        if self._counters.keys() & WATCHES.keys():
            raise ValueError(
                f"counters must be of other libraries than {sorted(WATCHES)}, got {sorted(self._counters)}"
            )
        self.mode = mode
        self._absent = {name: given for name, given in libraries.items() if isinstance(given, str)}
        self._watches: dict[str, Watch] = {}
        self._unwatched: dict[str, str] = {}
        for name, module in libraries.items():
            if not isinstance(module, str):
                self._add(name, module)
        self._lock = threading.Lock()
        self._open = False
        self._before: dict[str, Mapping[str, KeyCounts]] = {}
        self._refused: dict[str, list[str]] = {}
        self._found: dict[str, dict[str, KeyCounts]] = {name: {} for name in (*self._watches, *self._counters)}

    def _add(self, name: str, module: ModuleType) -> None:
        watch = WATCHES[name](
            module, lambda kind, key, seconds: self._seen(name, kind, key, seconds), lambda key: self._refuse(name, key)
        )
        reason = watch.missing()
        if reason is None:
            self._watches[name] = watch
        else:
            self._unwatched[name] = f"{reason} in {name} {getattr(module, '__version__', 'of unknown version')}"

    def __enter__(self) -> Self:
        if self._open:
            raise RuntimeError("a JIT monitor must be opened once at a time, got a second opening")
        if self._unwatched and self.mode == "raise":
            raise RuntimeError(
                f"libraries must have the hooks of the JIT monitor in mode 'raise', got {self._unwatched}"
            )
        for name, reason in self._unwatched.items():
            logger.warning("compilations of %s are not counted: %s", name, reason)
        self._before = {name: dict(counter()) for name, counter in self._counters.items()}
        self._open = True
        for watch in self._watches.values():
            watch.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for watch in reversed(self._watches.values()):
            watch.remove()
        self._open = False
        counted = self._since_opening()
        for name, keys in counted.items():
            for key, counts in keys.items():
                self._record(name, key, counts)
        if error is None:
            self._judge(counted)

    def report(self) -> JitReport:
        """Counts up to now; the monitor may be open."""
        with self._lock:
            libraries = {name: dict(keys) for name, keys in self._found.items()}
            refused = {name: tuple(keys) for name, keys in self._refused.items()}
        for name, keys in self._since_opening().items() if self._open else ():
            for key, counts in keys.items():
                libraries[name][key] = libraries[name].get(key, KeyCounts()) + counts
        return JitReport(libraries, dict(self._absent), dict(self._unwatched), refused)

    def _since_opening(self) -> dict[str, dict[str, KeyCounts]]:
        """What the counters gained, without the keys that did not change."""
        gains: dict[str, dict[str, KeyCounts]] = {}
        for name, counter in self._counters.items():
            known = self._before[name]
            changes = {key: counts - known.get(key, KeyCounts()) for key, counts in counter().items()}
            gains[name] = {key: gain for key, gain in changes.items() if gain.compilations or gain.loads}
        return gains

    def _judge(self, counted: Mapping[str, Mapping[str, KeyCounts]]) -> None:
        """Warn of, or refuse, what only counters saw."""
        found = {name: keys for name, keys in counted.items() if keys}
        for name, keys in found.items() if self.mode == "warn" else ():
            for key, each in keys.items():
                logger.warning("%s: %d compilations, %d loads of %s", name, each.compilations, each.loads, key)
        if found and self.mode == "raise":
            raise JitError(f"every kernel must be warm, got { ({name: sorted(keys) for name, keys in found.items()}) }")

    def _record(self, library: str, key: str, counts: KeyCounts) -> None:
        with self._lock:
            keys = self._found[library]
            keys[key] = keys.get(key, KeyCounts()) + counts

    def _seen(self, library: str, kind: Kind, key: str, seconds: float) -> None:
        self._record(library, key, KeyCounts(int(kind == "compile"), int(kind == "load"), seconds))
        if self.mode == "warn":
            logger.warning("%s %s %s in %.2f s", library, "compiled" if kind == "compile" else "loaded", key, seconds)
        if self.mode == "raise":
            raise JitError(f"every kernel must be warm, got a {kind} by {library} of {key}")

    def _refuse(self, library: str, key: str) -> None:
        if self.mode != "raise":
            return
        with self._lock:
            self._refused.setdefault(library, []).append(key)
        raise JitError(f"every kernel must be warm, got a cold key of {library}: {key}")


def check_fires(library: str, compile_one: Callable[[], object], libraries: Mapping[str, ModuleType | str]) -> str:
    """Prove on this machine that compilations or loads of ``library`` are seen; returns a key that was.

    Args:
        library: name of a watched library.
        compile_one: compiles or loads something that this process has not used yet.
        libraries: as for :class:`JitMonitor`.

    Raises:
        RuntimeError: nothing was seen: the library changed, or ``compile_one`` was warm.
    """
    with JitMonitor("count", libraries=libraries) as monitor:
        compile_one()
    report = monitor.report()
    if not report.libraries.get(library):
        state = report.absent.get(library) or report.unwatched.get(library) or "no event"
        raise RuntimeError(f"the JIT monitor must see a cold kernel of {library}, got {state}")
    return next(iter(report.libraries[library]))
