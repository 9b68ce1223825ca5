"""Processes that a section starts. Nothing heavy is imported, so that they import beside the section, not after it."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .place import BACKENDS, ROOT, Place, cache_environment

FUNCTIONS = {
    "prewarm": "warm.prewarm_child", "mhc": "warm.mhc_child", "off": "warm.off_child", "serve": "first_request.serve",
}  # fmt: skip
"""What a process can be told to measure: a function of this package that takes a place and texts."""
REQUEST_PATHS = ("eager", "full", "piecewise", "full.drafting")
REQUEST_REPEATS = 3


@dataclass(frozen=True)
class Child:
    """A process, and what it is for."""

    purpose: tuple[str, ...]
    process: subprocess.Popen

    def wait_ready(self) -> None:
        """Until it waits for :meth:`go`."""
        self.next_line("ready")

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def next_line(self, prefix: str) -> str:
        """The rest of the next line of its output that begins with ``prefix``."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(prefix):
                return line[len(prefix) :]
        raise RuntimeError(f"{self.purpose} must print {prefix!r}, got its end, {self.process.wait()}")

    def result(self) -> Any:
        """What it measured; it ends then."""
        found = json.loads(self.next_line("result "))
        self.process.wait()
        return found


def wait_for_turn() -> None:
    """Called by a child: whoever started it may go on, and it waits to be told. It ends if nobody is left to do so."""
    print("ready", flush=True)
    if not sys.stdin.readline():
        sys.exit("the process that started this one is gone")


def start(place: Place, function: str, *arguments: str, environment: dict[str, str] | None = None) -> Child:
    """``python -m tools.gpu_check child``: one of its functions in a fresh process."""
    dry = ["--dry"] if place.dry else []
    command = [sys.executable, "-m", "tools.gpu_check", "child", *dry, str(place.cache), function, *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return Child((function, *arguments), subprocess.Popen(command, cwd=ROOT, env=environment, **pipes))


def prewarms(place: Place) -> list[Child]:
    """A cold prewarm of each backend and a warm one: they import and reach the GPU together, and measure in turn."""
    return [
        start(place, "prewarm", backend, kind, environment=cache_environment(place.kernels(backend)))
        for backend in BACKENDS
        for kind in ("cold", "warm")
    ]


def servers(place: Place, paths: Sequence[str] = REQUEST_PATHS) -> list[Child]:
    """Engines that will serve ten requests each: fresh processes, some for every path."""
    return [start(place, "serve", path) for path in paths for _ in range(1 if place.dry else REQUEST_REPEATS)]
