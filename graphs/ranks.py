"""What the ranks of a group tell each other before anything is warm, through the group's key-value store.

No collective is involved: a rank that compiles for minutes makes the others wait here, under a time limit of its own
and with a log line, not inside a collective whose time-out is meant for a step. Every rank makes the same calls in the
same order.
"""

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

logger = logging.getLogger(__name__)

_PREFIX = "dsv4/ranks"
_LOG_SECONDS = 10.0
LONGEST_WAIT = timedelta(minutes=30)
"""For another rank, by default."""


def default_group() -> dist.ProcessGroup | None:
    """All ranks of ``torch.distributed`` where it is in use; ``None`` is this process alone."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return dist.group.WORLD if several else None


@dataclass
class Meeting:
    """What a rank says at the end of a block of :meth:`Ranks.together`, JSON-ready, and then what all have said."""

    value: Any = None
    values: list[Any] = field(default_factory=list)


class Ranks:
    """This rank among ``size`` ranks that share ``store``.

    Args:
        rank, size: of this process in its group.
        store: shared by the group alone; ``None`` with one rank.
        timeout: longest wait for the other ranks.
    """

    def __init__(self, rank: int, size: int, store: dist.Store | None, timeout: timedelta) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"group must contain this process, got rank {rank} of {size}")
        if size > 1 and store is None:
            raise ValueError(f"store must be given for a group of several ranks, got none for {size} ranks")
        self.rank, self.size = rank, size
        self._store, self._timeout = store, timeout
        # A name may be used again in a later round. Each rank counts its own rounds, in the store, which outlives self.
        self._round = 0 if store is None else store.add(f"{_PREFIX}/rounds/{rank}", 1)

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, store: dist.Store | None, timeout: timedelta) -> "Ranks":
        """The ranks of ``group``, with its own store unless another is given; ``None`` is this process alone."""
        if group is None:
            return cls(0, 1, None, timeout)
        size = dist.get_world_size(group)
        if store is None and size > 1:
            if not hasattr(group, "get_group_store"):
                raise ValueError("store must be given with a torch whose process groups do not show theirs, got none")
            store = group.get_group_store()
        return cls(dist.get_rank(group), size, store, timeout)

    def exchange(self, name: str, value: Any) -> list[Any]:
        """JSON values of all ranks, in order of rank; returns once every rank has given its own.

        Raises:
            TimeoutError: naming the ranks that did not come.
        """
        text = json.dumps(value)
        if self._store is None or self.size == 1:
            return [json.loads(text)]
        base = f"{_PREFIX}/{self._round}/{name}"
        self._store.set(f"{base}/{self.rank}", text)
        keys = [f"{base}/{rank}" for rank in range(self.size)]
        self._wait(keys, name)
        values = [json.loads(self._store.get(key)) for key in keys]
        self._store.set(f"{base}/read/{self.rank}", "1")
        if self.rank == 0:  # it often hosts the store: it must not leave, perhaps by an error, before others have read
            self._wait([f"{base}/read/{rank}" for rank in range(self.size)], name)
        return values

    @contextmanager
    def together(self, name: str, waiting: AbstractContextManager[object] | None = None) -> Iterator[Meeting]:
        """Meet the other ranks at the end of the block; if it failed anywhere, that is an error everywhere.

        Args:
            name: of the meeting, once a round.
            waiting: opened while this rank waits.

        Raises:
            RuntimeError: the block failed on another rank, naming rank and error.
            TimeoutError: naming the ranks that did not come; an error of the block itself comes first.
        """
        meeting, failure = Meeting(), None
        try:
            yield meeting
        except Exception as error:
            failure = error
        told = None if failure is None else f"{type(failure).__name__}: {failure}"
        if failure is not None and self.size > 1:
            logger.error("rank %d failed at '%s', and tells the others before it raises: %s", self.rank, name, told)
        try:
            with waiting or nullcontext():
                answers = self.exchange(name, {"value": meeting.value if failure is None else None, "error": told})
        except TimeoutError as late:
            if failure is None:
                raise
            raise failure from late
        if failure is not None:
            raise failure
        failed = [f"rank {n}: {answer['error']}" for n, answer in enumerate(answers) if answer["error"] is not None]
        if failed:
            raise RuntimeError(f"every rank must start up, got {'; '.join(failed)}")
        meeting.values = [answer["value"] for answer in answers]

    def _wait(self, keys: Sequence[str], name: str) -> None:
        assert self._store is not None
        started, pause, logged = time.monotonic(), 0.002, 0.0
        while not self._store.check(list(keys)):
            waited = time.monotonic() - started
            if waited > self._timeout.total_seconds():
                raise TimeoutError(
                    f"every rank must reach '{name}' within {self._timeout.total_seconds():.0f} s, "
                    f"got none from ranks {self._absent(keys)}"
                )
            if waited - logged > _LOG_SECONDS:
                logged = waited
                logger.info("rank %d waits %.0f s for ranks %s at '%s'", self.rank, waited, self._absent(keys), name)
            time.sleep(pause)
            pause = min(pause * 1.5, 0.1)

    def _absent(self, keys: Sequence[str]) -> list[int]:
        assert self._store is not None
        return [rank for rank, key in enumerate(keys) if not self._store.check([key])]
