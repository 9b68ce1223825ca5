"""Starts the processes of a run and gives each its turn, before which it has imported and started its children."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .place import ROOT, Place, shared_caches
from .sections import SECTIONS, processes

Names = tuple[str, ...]
TOGETHER, AHEAD = 13, 3  # at work, and getting ready meanwhile: as many as there are cores
LIMIT_S = 450  # of a run. The time of those that come last is kept for them, whatever those before took:
TOGETHER_BEGIN_S, TOGETHER_END_S = 345, 375
PREPARE_S = 200  # a process that is not ready by then never will be
_LAST_AHEAD = 4  # processes that wait to begin when the last stage prepares
_DRY_SLOWER = 10
NOT_BEGUN = "not begun: the time of the run was over"


@dataclass
class Running:
    """A process; ``began`` when its turn came."""

    names: Names
    process: subprocess.Popen
    ready_file: Path
    started: float = field(default_factory=time.perf_counter)
    began: float | None = None

    @property
    def timeout(self) -> float:
        return max(SECTIONS[name].timeout for name in self.names)

    def is_ready(self) -> bool:
        return self.ready_file.exists()

    def taken(self) -> float:
        return 0.0 if self.began is None else time.perf_counter() - self.began

    def go(self) -> None:
        assert self.process.stdin is not None
        self.began = time.perf_counter()
        with suppress(BrokenPipeError):  # it ended before its turn, which its exit status says
            self.process.stdin.write(b"go\n")
            self.process.stdin.flush()


class Run:
    """The processes of one run, and how each ended: an error or none, and seconds since its turn came."""

    def __init__(self, place: Place, out: Path) -> None:
        self.place, self.out, self.began = place, out, time.perf_counter()
        self.outcomes: dict[str, tuple[str | None, float]] = {}
        self.alive: list[Running] = []
        (place.cache / "ready").mkdir(parents=True, exist_ok=True)

    def seconds(self) -> float:
        return time.perf_counter() - self.began

    def is_over(self, limit_s: float) -> bool:
        return self.seconds() > limit_s and not self.place.dry

    def start(self, names: Names) -> Running:
        ready = self.place.cache / "ready" / names[0]
        ready.unlink(missing_ok=True)
        environment = shared_caches(self.place) | {"OMP_NUM_THREADS": "1" if self.place.dry else "2"}
        with (self.out / f"{names[0]}.log").open("w") as log:
            process = subprocess.Popen(
                self.command(names, ready), cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self.alive.append(Running(names, process, ready))
        return self.alive[-1]

    def command(self, names: Names, ready: Path) -> list[str]:
        dry = ["--dry"] if self.place.dry else []
        folders = map(str, (self.out, self.place.cache, ready))
        return [sys.executable, "-m", "tools.gpu_check", "section", *dry, *folders, *names]

    def has_ended(self, one: Running, limit_s: float = LIMIT_S) -> bool:
        """Whether the process is over; one whose time is over is ended with all that it started."""
        if one not in self.alive:
            return True
        slow, waited = _DRY_SLOWER if self.place.dry else 1, time.perf_counter() - one.started
        if one.began is None:
            late = waited > slow * PREPARE_S and not one.is_ready()
            why = f"not ready after {waited:.0f} s" if late else None
        else:
            late = one.taken() > slow * one.timeout or self.is_over(limit_s)
            why = f"killed after {one.taken():.0f} s" if late else None
        if one.process.poll() is not None:
            self._note(one, f"ended with {one.process.returncode}" if one.process.returncode else None)
        elif why is not None:
            self.kill(one, why)
        else:
            return False
        return True

    def kill(self, one: Running, why: str) -> None:
        with suppress(ProcessLookupError):  # it may have ended this moment
            os.killpg(one.process.pid, signal.SIGKILL)
        one.process.wait()
        self._note(one, why)

    def _note(self, one: Running, error: str | None) -> None:
        self.alive.remove(one)
        records = {name: _recorded(self.out / f"{name}.json") for name in one.names}
        for name, recorded in records.items():
            whole = recorded.get("finished", False) and name != one.names[-1]  # what ended its process came later
            why = None if whole else error or (None if recorded else "left no record")
            self.outcomes[name] = (why, one.taken())

    def stop(self) -> None:
        """End everything that runs."""
        for one in list(self.alive):
            self.kill(one, "the run was stopped")

    # ---- turns ---------------------------------------------------------------------------------------------------

    def wait_ready(self, several: Iterable[Running]) -> None:
        """Until each is ready, or over."""
        for one in several:
            while not self.has_ended(one) and not one.is_ready():
                time.sleep(0.05)

    def finish(self, one: Running) -> None:
        """Give one its turn and wait for its end."""
        self.wait_ready([one])
        if one in self.alive and self.is_over(LIMIT_S):
            self.kill(one, NOT_BEGUN)
        if one in self.alive:
            one.go()
        while not self.has_ended(one):
            time.sleep(0.05)

    def together(self, ready: Sequence[Running], waiting: Sequence[Names], last: Sequence[Names]) -> list[Running]:
        """Run those that are ``ready`` or ``waiting``; returns what prepared for ``last`` meanwhile."""
        width, ahead = (2, 1) if self.place.dry else (TOGETHER, AHEAD)
        prepared, pending, running, prepared_last = list(ready), list(waiting), [], []
        while prepared or pending or running:
            if self.is_over(TOGETHER_BEGIN_S):
                for one in prepared:
                    self.kill(one, NOT_BEGUN)
                self.outcomes |= {name: (NOT_BEGUN, 0.0) for names in pending for name in names}
                prepared, pending = [], []
            while pending and len(running) + len(prepared) < width + ahead:
                prepared.append(self.start(pending.pop(0)))
            if last and not prepared_last and len(pending) <= _LAST_AHEAD:
                prepared_last = [self.start(names) for names in last]
            for one in [one for one in prepared if one.is_ready() or one.process.poll() is not None]:
                if len(running) < width:
                    prepared.remove(one)
                    running.append(one)
                    one.go()
            time.sleep(0.05)
            prepared = [one for one in prepared if not self.has_ended(one)]
            running = [one for one in running if not self.has_ended(one, TOGETHER_END_S)]
        return prepared_last or [self.start(names) for names in last]


def _recorded(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def run_stages(run: Run, only: Names) -> None:
    """First the prewarm and the timings, one at a time; then what runs together; last what prepared meanwhile.

    What the prewarm compiled with DeepGEMM is copied before anything else runs: see ``Place.own_deep_gemm_cache``.
    """
    first, alone, together, last = (processes((stage,), only) for stage in ("first", "alone", "together", "last"))
    early = [run.start(names) for names in (*first, *alone)]
    run.wait_ready(early)  # so that nothing imports while the prewarm is timed
    ahead: list[Running] = []
    width = 0 if run.place.dry else TOGETHER
    for number, one in enumerate(early, 1):
        if number == len(early) > len(first):  # what the last of them measures is no matter of microseconds
            ahead = [run.start(names) for names in together[:width]]
        run.finish(one)
        if number == len(first):
            run.place.keep_prewarmed()
            print(f"{run.seconds():6.1f} s  first", flush=True)
    print(f"{run.seconds():6.1f} s  alone", flush=True)
    prepared = run.together(ahead, together[len(ahead) :], last)
    print(f"{run.seconds():6.1f} s  together", flush=True)
    run.wait_ready(prepared)
    for one in prepared:
        run.finish(one)
    print(f"{run.seconds():6.1f} s  last", flush=True)
