"""Runs the cases of one process: a queue, worker threads, and one lock file per key.

A worker that finds a key's lock taken puts the key at the end of the queue and takes another one; when it meets it
again it waits. So processes that start together on one cold cache share the compilations, each key compiles once, and
every process has loaded every key in the end. Lock files stay, empty.

A case may launch kernels that other cases launch too. Each kernel has a lock of its own, which a worker waits for: a
case that has begun is not put back. It is held while the kernel is built and launched, and no other is taken meanwhile.
"""

import hashlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Protocol

import filelock
import torch

Key = tuple[str | int, ...]


class Case(Protocol):
    """One kernel specialisation; ``key`` names it, ``op`` says whose it is."""

    @property
    def op(self) -> str: ...

    @property
    def key(self) -> Key: ...


class PrewarmError(RuntimeError):
    """The prewarm did not make every rank warm."""


@dataclass(frozen=True)
class PrewarmProgress:
    """One change of one key: ``waiting`` for another process, ``started``, ``done`` or ``skipped``.

    ``num_done`` of ``num_keys`` are done or skipped by now; ``seconds`` is the key's own time once it is done.
    ``compiled``: ahead of its call, as one of ``num_keys`` that were missing.
    """

    key: str
    state: Literal["compiled", "waiting", "started", "done", "skipped"]
    num_done: int
    num_keys: int
    seconds: float


Show = Callable[[PrewarmProgress], object]
Building = Callable[[Key], AbstractContextManager[None]]
"""Opened around what builds the kernel of a key."""
Thread = Callable[[Building], AbstractContextManager[object]]
"""Opened around the work of one thread."""


def key_text(key: Key) -> str:
    """``rms_norm/4096/bfloat16``: for reading, not unique."""
    return "/".join(map(str, key))


class Warmer:
    """See the module's docstring and :func:`dsv4.graphs.prewarm.prewarm`.

    Attributes:
        seconds: by key that ran.
        skipped: keys that were warm.
        lock_seconds: spent waiting for locks, summed over threads.
    """

    def __init__(
        self,
        run: Callable[[Any], object],
        *,
        is_warm: Callable[[Key], bool],
        mark_warm: Callable[[Key], object],
        lock_dir: Path,
        device: torch.device,
        progress: Show,
        timeout: timedelta,
        thread: Thread,
    ) -> None:
        lock_dir.mkdir(parents=True, exist_ok=True)
        self._run, self._is_warm, self._mark_warm = run, is_warm, mark_warm
        self._lock_dir, self._device, self._timeout = lock_dir, device, timeout
        self._progress, self._thread = progress, thread
        self._mutex = threading.Lock()
        self._queue: deque[tuple[Case, bool]] = deque()
        self._num_keys = 0
        self._failure: PrewarmError | None = None
        self.seconds: dict[Key, float] = {}
        self.skipped: set[Key] = set()
        self.lock_seconds = 0.0

    def run_all(self, cases: Sequence[Case], workers: int) -> None:
        """Run every case that is cold; after a failure no further case is begun.

        Raises:
            PrewarmError: from the first failure, naming the key.
        """
        self._num_keys = len(cases)
        self._queue.extend((case, False) for case in cases)
        if workers == 1:
            self._work()
        else:
            with ThreadPoolExecutor(workers, thread_name_prefix="prewarm") as pool:
                for future in [pool.submit(self._work) for _ in range(workers)]:
                    future.result()
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(self._thread(self._building))
            if self._device.type == "cuda":
                stack.enter_context(torch.cuda.device(self._device))
            while self._failure is None:
                try:
                    case, deferred = self._queue.popleft()
                except IndexError:
                    return  # whoever still holds a case puts it back for itself
                try:
                    if not self._take(case, wait=deferred):
                        self._queue.append((case, True))
                except Exception as error:
                    self._fail(case.key, error)

    def _fail(self, key: Key, error: Exception) -> None:
        with self._mutex:
            if self._failure is None:
                text = f"prewarm of {key_text(key)} must succeed, got {type(error).__name__}: {error}"
                self._failure = PrewarmError(text)
                self._failure.__cause__ = error

    def _take(self, case: Case, *, wait: bool) -> bool:
        """Run ``case`` unless it is warm; ``False`` if its lock is taken and ``wait`` is not set."""
        key = case.key
        if self._is_warm(key):
            self._tell(key, "skipped")
            return True
        if wait:
            self._tell(key, "waiting")
        lock = self._lock("case", key)
        if not self._acquire(lock, wait=wait):
            return False
        try:
            self._tell(key, "started")
            self._run_one(case)
        finally:
            lock.release()
        return True

    @contextmanager
    def _building(self, key: Key) -> Iterator[None]:
        """Build the kernel of ``key`` inside: other processes wait, and load it from the library's disk cache then."""
        lock = self._lock("kernel", key)
        self._acquire(lock, wait=True)
        try:
            yield
        finally:
            lock.release()

    def _lock(self, kind: str, key: Key) -> filelock.FileLock:
        name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
        return filelock.FileLock(self._lock_dir / f"{kind}-{name}.lock")

    def _acquire(self, lock: filelock.FileLock, *, wait: bool) -> bool:
        started = time.perf_counter()
        try:
            lock.acquire(timeout=self._timeout.total_seconds() if wait else 0)
        except filelock.Timeout:
            if not wait:
                return False
            raise TimeoutError(f"lock {lock.lock_file} must be free within {self._timeout}, got a holder") from None
        with self._mutex:
            self.lock_seconds += time.perf_counter() - started
        return True

    def _run_one(self, case: Case) -> None:
        started = time.perf_counter()
        self._run(case)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # a fault of this key belongs to this key
        self._mark_warm(case.key)
        self._tell(case.key, "done", time.perf_counter() - started)

    def _tell(self, key: Key, state: Literal["waiting", "started", "done", "skipped"], seconds: float = 0.0) -> None:
        with self._mutex:
            if state == "done":
                self.seconds[key] = seconds
            if state == "skipped":
                self.skipped.add(key)
            num_done = len(self.seconds) + len(self.skipped)
            self._progress(PrewarmProgress(key_text(key), state, num_done, self._num_keys, seconds))
