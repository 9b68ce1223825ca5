"""Runs every kernel specialisation once, outside stream capture, before anything depends on it being compiled.

Stages of one call, on every rank of the group alike:

1. agree: the decision (settings, keys, and whether kernels run at all) is compared through the group's store;
2. warm: the caller's ``compile_ahead``, then each cold key runs once in this process. Lock files let one process of
   this machine compile it while the others take another key and come back, when the library loads it from its own
   disk cache;
3. settle: synchronise, collect garbage, empty the allocator's cache;
4. meet: no rank returns before every rank is warm, and a failure anywhere is an error everywhere.

Neither 1 nor 4 is a collective, so that its time-out cannot cut a compilation short (see ``ranks``). The first
collective of a program belongs after this call.

Once per decision and device: a later call with the same two compares and meets, and runs nothing. With ``enabled``
false, likewise, and nothing counts as warmed.
"""

import gc
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .jit_monitor import JitMonitor, JitReport
from .ranks import LONGEST_WAIT, Ranks
from .warmer import Building, Case, Key, PrewarmError, Show, Thread, Warmer, key_text

logger = logging.getLogger(__name__)

_LISTED = 5  # differing keys that an error names


@dataclass(frozen=True)
class PrewarmReport:
    """What one call did on this rank.

    Attributes:
        decision: hash of settings, keys and ``enabled``; equal on every rank.
        device: the device with its index.
        enabled: whether kernels were to run.
        repeated: whether an earlier call had already warmed this decision on this device.
        keys: every key, in the order of the cases.
        seconds: per key that ran here, without waiting for other processes.
        skipped: keys that were warm already.
        wall_seconds: all of stages 2 and 3.
        lock_seconds: summed over workers, waiting for keys that another process was compiling.
        rank_seconds: ``wall_seconds`` of every rank.
        wait_seconds: waiting for other ranks at the end.
        jit: what the monitor counted meanwhile; ``None`` without a monitor.
    """

    decision: str
    device: str
    enabled: bool
    repeated: bool
    keys: tuple[Key, ...]
    seconds: Mapping[Key, float]
    skipped: tuple[Key, ...]
    wall_seconds: float
    lock_seconds: float
    rank_seconds: tuple[float, ...]
    wait_seconds: float
    jit: JitReport | None

    @property
    def rank_skew_seconds(self) -> float:
        """Between the first and the last rank to be warm, had all begun at once."""
        return max(self.rank_seconds) - min(self.rank_seconds) if self.rank_seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return vars(self) | {
            "keys": [key_text(key) for key in self.keys],
            "seconds": {key_text(key): seconds for key, seconds in self.seconds.items()},
            "skipped": [key_text(key) for key in self.skipped],
            "rank_seconds": list(self.rank_seconds),
            "rank_skew_seconds": self.rank_skew_seconds,
            "jit": None if self.jit is None else self.jit.to_dict(),
        }


_done: dict[tuple[str, torch.device], PrewarmReport] = {}


def prewarm(
    cases: Callable[[], Sequence[Case]],
    *,
    run: Callable[[Any], object],
    is_warm: Callable[[Key], bool],
    mark_warm: Callable[[Key], object],
    lock_dir: Path,
    thread: Thread | None = None,
    compile_ahead: Callable[[Show], object] | None = None,
    settings: Mapping[str, object],
    device: torch.device | str,
    workers: int = 1,
    progress: Show = lambda event: None,
    group: dist.ProcessGroup | None = None,
    store: dist.Store | None = None,
    monitor: Callable[[], JitMonitor] | None = None,
    enabled: bool = True,
    timeout: timedelta = LONGEST_WAIT,
) -> PrewarmReport:
    """Warm every case; see the module's docstring.

    Args:
        cases: lists everything that a later step can need; of equal keys the first runs. If it raises, on this rank
            alone even, every rank learns so.
        run: makes a case's call. With several workers it is called from several threads, without gradients.
        is_warm: whether a key is warm on the current device, which is ``device`` then; such a key is skipped.
        mark_warm: records a key after its call has finished on the device.
        compile_ahead: fills the disk caches of libraries that compile one kernel at a time in one process, and shows
            what it does by the function that it is given.
        lock_dir: of this machine, shared by its processes; created if missing.
        thread: opened around the work of every thread that calls ``run``. Where cases share kernels, what it is given
            has to be opened around the build of a kernel, by its key: no other process builds that one meanwhile.
        settings: everything else that decides what is warmed, JSON-ready: the model's config, the engine's settings.
        device: where the cases run.
        workers: threads that run cases.
        progress: called whenever a key is started, waited for or done; one call at a time.
        group: ranks that must agree and wait for each other; ``None`` is this process alone.
        store: in place of the store of ``group``.
        monitor: makes the one that is opened around ``compile_ahead`` and the calls of ``run``; called after ``cases``,
            which may import kernel libraries.
        enabled: whether to run anything.
        timeout: longest wait for another rank, or for another process that holds a key.

    Raises:
        RuntimeError: the current stream is being captured.
        PrewarmError: the ranks differ, naming how; or a case failed or its lock stayed taken, here or on another rank,
            naming the key.
        ValueError: no case, or an argument that breaks a rule.
        TimeoutError: a rank did not come.
    """
    ranks = Ranks.of(group, store, timeout)
    try:
        _refuse_capture()
        where = _indexed(torch.device(device))
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        unique = _distinct(cases())
        proposal = _proposal(unique, settings, enabled)
    except Exception as error:
        ranks.exchange("decision", {"error": f"{type(error).__name__}: {error}"})
        raise
    decision = _agreed(ranks.exchange("decision", proposal))
    if not unique:
        raise ValueError("prewarm must have at least 1 case, got 0: no op recognised the model, so nothing is warm")
    known = _done.get((decision, where))
    report = known or PrewarmReport(
        decision, str(where), enabled, False, tuple(unique), {}, (), 0.0, 0.0, (), 0.0, None
    )
    failure: Exception | None = None
    if enabled and known is None:
        try:
            warmer = Warmer(run, is_warm=is_warm, mark_warm=mark_warm, lock_dir=Path(lock_dir), device=where,
                            progress=progress, timeout=timeout, thread=thread or _no_kernels)  # fmt: skip
            report = _warm(
                warmer,
                unique,
                workers,
                monitor and monitor(),
                compile_ahead and partial(compile_ahead, progress),
                report,
            )
        except Exception as error:
            failure = error
    report = _meet(ranks, report, failure)
    if known is not None:
        return replace(report, repeated=True)
    if enabled:
        _done[decision, where] = report
        logger.info(
            "prewarm: %d keys, %d run, %d skipped, %.1f s", len(report.keys), len(report.seconds), len(report.skipped),
            report.wall_seconds,
        )  # fmt: skip
    return report


def _refuse_capture() -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "prewarm must run outside stream capture, got a stream that is being captured: "
            "call it after loading the weights, before the first capture begins"
        )


def _no_kernels(_: Building) -> AbstractContextManager[None]:
    """Threads whose cases share no kernels."""
    return nullcontext()


def _indexed(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _distinct(cases: Sequence[Case]) -> dict[Key, Case]:
    unique: dict[Key, Case] = {}
    for case in cases:
        key = case.key
        if not isinstance(key, tuple) or not key or any(type(part) not in (str, int) for part in key):
            raise ValueError(f"key of {case.op} must be a tuple of strings and integers, got {key!r}")
        unique.setdefault(key, case)
    return unique


# --- agreement ------------------------------------------------------------------------------------------------------


def _proposal(cases: Mapping[Key, Case], settings: Mapping[str, object], enabled: bool) -> dict[str, Any]:
    try:
        plain = json.loads(json.dumps(dict(settings), sort_keys=True))
    except (TypeError, ValueError) as error:
        raise ValueError(f"settings must be JSON-ready, got {error}") from error
    return {"enabled": enabled, "settings": plain, "keys": sorted(json.dumps(key) for key in cases)}


def _agreed(proposals: Sequence[Mapping[str, Any]]) -> str:
    """Hash of the decision that all ranks made."""
    for rank, proposal in enumerate(proposals):
        if "error" in proposal:
            raise PrewarmError(f"every rank must be able to prewarm, got on rank {rank}: {proposal['error']}")
    first = proposals[0]
    differences = [
        f"rank {rank}: {text}"
        for rank, other in enumerate(proposals)
        if other != first
        for text in (*_differing_values(first, other), *_differing_keys(first["keys"], other["keys"]))
    ]
    if differences:
        raise PrewarmError(f"every rank must prewarm the same as rank 0, got {'; '.join(differences)}")
    return hashlib.sha256(json.dumps(first, sort_keys=True).encode()).hexdigest()[:16]


def _differing_values(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    one, two = ({**_flat("", {k: v for k, v in p.items() if k != "keys"})} for p in (first, other))
    absent = "absent"
    return [
        f"{name} is {two.get(name, absent)}, not {one.get(name, absent)}"
        for name in sorted(one.keys() | two.keys())
        if one.get(name, absent) != two.get(name, absent)
    ]


def _flat(prefix: str, value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        return {prefix: json.dumps(value)}
    return {n: v for k, each in value.items() for n, v in _flat(f"{prefix}.{k}" if prefix else k, each).items()}


def _differing_keys(first: Sequence[str], other: Sequence[str]) -> list[str]:
    texts = []
    for what, keys in (("lacks", set(first) - set(other)), ("adds", set(other) - set(first))):
        if keys:
            names = [key_text(tuple(json.loads(key))) for key in sorted(keys)]
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            texts.append(f"{what} keys {', '.join(names[:_LISTED])}{more}")
    return texts


# --- warming and meeting --------------------------------------------------------------------------------------------


def _warm(
    warmer: Warmer,
    cases: Mapping[Key, Case],
    workers: int,
    monitor: JitMonitor | None,
    compile_ahead: Callable[[], object] | None,
    report: PrewarmReport,
) -> PrewarmReport:
    started = time.perf_counter()
    with monitor or nullcontext():
        if compile_ahead is not None:
            compile_ahead()
        warmer.run_all(list(cases.values()), workers)
    _settle(torch.device(report.device))
    return replace(
        report,
        seconds={key: warmer.seconds[key] for key in cases if key in warmer.seconds},
        skipped=tuple(key for key in cases if key in warmer.skipped),
        wall_seconds=time.perf_counter() - started,
        lock_seconds=warmer.lock_seconds,
        jit=monitor.report() if monitor is not None else None,
    )


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _meet(ranks: Ranks, report: PrewarmReport, failure: Exception | None) -> PrewarmReport:
    """Wait for every rank; raise if any failed."""
    started = time.perf_counter()
    error = None if failure is None else str(failure)
    if failure is not None and ranks.size > 1:
        logger.error("prewarm failed, waiting for the other ranks before raising: %s", error)
    answers = ranks.exchange("warm", {"seconds": report.wall_seconds, "error": error})
    if failure is not None:
        raise failure
    failed = [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if answer["error"] is not None]
    if failed:
        raise PrewarmError(f"every rank must be warm, got {'; '.join(failed)}")
    waited = time.perf_counter() - started
    return replace(report, rank_seconds=tuple(answer["seconds"] for answer in answers), wait_seconds=waited)
