"""What DeepGEMM compiled and loaded, seen from outside: its cache directory, and the print of a child process.

DeepGEMM has no hook. It keeps one directory per kernel (``cache/kernel.<name>.<hash>`` with ``kernel.cu`` and
``kernel.cubin``, renamed into place when complete), and with ``DG_JIT_PRINT_LOAD_TIME=1`` prints a line for every
kernel that it loads into the process, whether it was compiled just now or found on disk. The print goes to the C
library's standard output, so it can only be read from a child.

The source of a kernel is one template instantiation, whose arguments are everything that it is specialised on. So a
key that claims to name a kernel can be compared with what was built (:func:`confirm`): a wrapper that refuses cold keys
is only as good as its keys.
"""

import ctypes
import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import filelock

from .jit_monitor import KeyCounts
from .warmer import Key, PrewarmProgress, Show, key_text

logger = logging.getLogger(__name__)

_MARK = "deep_gemm call"
_LOAD = re.compile(r"^Load time \((?P<entry>.*)\): (?P<ms>[0-9.]+) ms$")
_INSTANTIATION = re.compile(r"&(?P<name>\w+)<(?P<arguments>[^;]*)>\s*\)\s*;")


class KeyModelError(AssertionError):
    """Keys and kernels do not correspond one to one."""


@dataclass(frozen=True)
class Call:
    """One call of a child: the key that the wrapper computed, and the cache entries that were loaded for it."""

    key: Key
    loaded: tuple[str, ...]


@dataclass(frozen=True)
class Observation:
    """What a child did.

    Attributes:
        calls: in order.
        compiled: cache entries that were not there before.
        kernels: every cache entry afterwards, with its instantiation.
        load_ms: milliseconds by loaded entry.
    """

    calls: tuple[Call, ...]
    compiled: frozenset[str]
    kernels: Mapping[str, Key]
    load_ms: Mapping[str, float]


def snapshot(cache_dir: Path, *, strict: bool = False) -> dict[str, Key]:
    """Complete cache entries by directory name, each with :func:`instantiation` of its source.

    Other programs and other releases keep kernels in the same directory: an entry whose source cannot be read is not
    ours, and is left out.

    Args:
        cache_dir: DeepGEMM's.
        strict: every entry must be one that can be read.

    Raises:
        OSError, ValueError: with ``strict``, a source that is missing, or not one that is known.
    """
    found = {}
    for cubin in sorted(Path(cache_dir, "cache").glob("kernel.*/kernel.cubin")):
        entry = cubin.parent
        try:
            found[entry.name] = instantiation((entry / "kernel.cu").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            if strict:
                raise
            logger.debug("%s is left out, another program's: %s", entry, error)
    return found


def instantiation(source: str) -> Key:
    """``deep_gemm``, the name of the kernel template of ``source`` and its arguments, without namespaces.

    Raises:
        ValueError: there is no instantiation, or more than one.
    """
    found = list(_INSTANTIATION.finditer(source))
    if len(found) != 1:
        raise ValueError(f"a DeepGEMM source must instantiate 1 kernel, got {len(found)}")
    words = (word.strip().rpartition("::")[2] for word in found[0]["arguments"].split(","))
    return ("deep_gemm", found[0]["name"], *(int(w) if re.fullmatch(r"-?\d+", w) else w for w in words))


def counter(cache_dir: Path) -> Callable[[], dict[str, KeyCounts]]:
    """A counter for the JIT monitor: compilations by cache entry. Loads from disk leave no trace in this process."""

    def count() -> dict[str, KeyCounts]:
        return {
            "/".join(map(str, key[1:])): KeyCounts(1, 0, _seconds(Path(cache_dir, "cache", entry)))
            for entry, key in snapshot(cache_dir).items()
        }

    return count


def _seconds(entry: Path) -> float:
    """From writing the source to writing the binary."""
    return max(0.0, (entry / "kernel.cubin").stat().st_mtime - (entry / "kernel.cu").stat().st_mtime)


# ---- compiling ahead -------------------------------------------------------------------------------------------------

_POLL_SECONDS = 0.5
_WORTH = 3  # missing kernels from which on starting processes pays


def compile_ahead(
    calls: Mapping[Key, object],
    program: Callable[[list[object]], Sequence[str]],
    cache_dir: Path,
    *,
    lock: Path,
    processes: int,
    timeout: float,
    show: Show = lambda event: None,
) -> int:
    """Let child processes compile the kernels that ``cache_dir`` lacks; returns how many they added.

    One process of the machine at a time does so; the others wait and then find them. A child that fails is logged, and
    so is a wait that was too long, after which nothing is added: whoever needs the kernels compiles them in the call.

    Args:
        calls: by key, what a child must be told to make a call that needs the kernel.
        program: from some of ``calls``, the arguments of a Python process that makes them.
        cache_dir: DeepGEMM's, as the children's environment has it.
        lock: path of a lock file.
        processes: children at once.
        timeout: seconds, for the lock and for the children.
        show: told of every kernel that was added.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        held = filelock.FileLock(lock, timeout=timeout).acquire()
    except filelock.Timeout:
        logger.warning(
            "DeepGEMM kernels must be compiled ahead under %s, which another process kept for %g s: those that are "
            "missing are compiled in their calls", lock, timeout,
        )  # fmt: skip
        return 0
    with held:
        before = snapshot(cache_dir)
        found = set(before.values())
        missing = [call for key, call in calls.items() if key not in found]
        if len(missing) < _WORTH:
            return 0
        parts = [missing[start::processes] for start in range(min(processes, len(missing)))]
        with ThreadPoolExecutor(len(parts)) as pool:
            running = {pool.submit(_run, program(part), timeout) for part in parts}
            shown: set[str] = set()
            ended = 0
            while ended < len(parts):
                ended = len(wait(running, timeout=_POLL_SECONDS).done)  # before looking, so that nothing is missed
                for entry, key in snapshot(cache_dir).items():
                    if entry not in before and entry not in shown:
                        shown.add(entry)
                        seconds = _seconds(Path(cache_dir, "cache", entry))
                        show(PrewarmProgress(key_text(key), "compiled", len(shown), len(missing), seconds))
        for failure in filter(None, (future.result() for future in running)):
            logger.warning("a process that compiles DeepGEMM kernels failed: %s", failure)
        return len(shown)


def _run(program: Sequence[str], timeout: float) -> str | None:
    """The reason of a failure, or ``None``."""
    try:
        child = subprocess.run([sys.executable, *program], capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as error:
        return str(error)[:500]
    return (child.stdout + child.stderr)[-500:] if child.returncode else None


# ---- a child ---------------------------------------------------------------------------------------------------------


def announce(key: Key) -> None:
    """Called by a child's program before each call; a call must have finished before the next one is announced."""
    ctypes.CDLL(None).fflush(None)  # DeepGEMM prints through C, whose buffer is not Python's
    print(_MARK, json.dumps(key), flush=True)


def observe(program: Sequence[str], cache_dir: Path, *, timeout: float, cwd: Path | None = None) -> Observation:
    """Run ``python *program`` with ``cache_dir`` as DeepGEMM's cache and report its calls; see :func:`announce`.

    Raises:
        RuntimeError: the child failed; the message ends with its output.
        subprocess.TimeoutExpired: it took longer than ``timeout`` seconds.
        OSError, ValueError: an entry of the cache cannot be read, so that nothing can be said about it.
    """
    before = snapshot(cache_dir, strict=True)
    settings = {"DG_JIT_CACHE_DIR": str(cache_dir), "DG_JIT_PRINT_LOAD_TIME": "1"}
    command = ["/usr/bin/env", *(f"{name}={value}" for name, value in settings.items()), sys.executable, *program]
    child = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=cwd, check=False)
    if child.returncode:
        tail = (child.stdout + child.stderr)[-2000:]
        raise RuntimeError(f"the child must succeed, got exit status {child.returncode}: {tail}")
    return parse(child.stdout, before=before, after=snapshot(cache_dir, strict=True))


def parse(output: str, *, before: Mapping[str, Key], after: Mapping[str, Key]) -> Observation:
    """The observation from a child's standard output and the snapshots around it.

    Raises:
        ValueError: something was loaded before the first announcement.
    """
    calls: list[tuple[Key, list[str]]] = []
    load_ms = {}
    for line in output.splitlines():
        if line.startswith(_MARK):
            calls.append((tuple(json.loads(line[len(_MARK) :])), []))
        elif load := _LOAD.match(line):
            if not calls:
                raise ValueError(f"a load must belong to an announced call, got {line!r} before the first one")
            entry = Path(load["entry"]).name
            calls[-1][1].append(entry)
            load_ms[entry] = float(load["ms"])
    return Observation(
        calls=tuple(Call(key, tuple(loaded)) for key, loaded in calls),
        compiled=frozenset(after.keys() - before.keys()),
        kernels=dict(after),
        load_ms=load_ms,
    )


def confirm(observation: Observation) -> dict[Key, str]:
    """Cache entry by key, if keys and kernels correspond one to one.

    Raises:
        KeyModelError: a key stands for several kernels, several keys for one, a key differs from what was built, or a
            kernel was compiled that no announced call loaded; the message names the first.
    """
    found: dict[Key, str] = {}
    for call in observation.calls:
        if call.key in found:
            if call.loaded:
                raise KeyModelError(f"key {call.key} must stand for 1 kernel, got {found[call.key]} and {call.loaded}")
            continue
        if len(call.loaded) != 1:
            what = call.loaded or "none: another key stands for the same one"
            raise KeyModelError(f"a first call under key {call.key} must load 1 kernel, got {what}")
        (found[call.key],) = call.loaded
        built = observation.kernels.get(call.loaded[0])
        if built != call.key:
            raise KeyModelError(f"key must name what was built, {built}, got {call.key}")
    surplus = observation.compiled - set(found.values())
    if surplus:
        raise KeyModelError(f"every compilation must belong to a call, got {sorted(surplus)}")
    return found
