"""Runs all sections within the time of one run and joins what they recorded into the report."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .common import ROOT, Place
from .points import POINTS, SampleError
from .sections import SECTIONS, Section, processes
from .warm import shared_caches

TOGETHER = 14  # processes at once: each has a CUDA context, and compiles now and then, on 16 cores
LIMIT_S, GRACE_S = 420, 15  # what has not begun by then, or not ended a little later, is recorded as an error
_TABLE_ROWS, _TABLE_CHARACTERS = 60, 6000


@dataclass
class _Running:
    names: tuple[str, ...]
    process: subprocess.Popen
    began: float

    @property
    def timeout(self) -> float:
        return max(SECTIONS[name].timeout for name in self.names)


class _Stopped(Exception):
    """The run was told to end (SIGTERM): the report says what there is."""


class _Run:
    """The processes of one run, and how each ended."""

    def __init__(self, place: Place, out: Path) -> None:
        self.place, self.out, self.began = place, out, time.perf_counter()
        self.outcomes: dict[str, tuple[str | None, float]] = {}
        self.alive: list[_Running] = []

    def seconds(self) -> float:
        return time.perf_counter() - self.began

    def start(self, names: tuple[str, ...]) -> _Running | None:
        if self.seconds() > LIMIT_S and not self.place.dry:
            self.outcomes.update(dict.fromkeys(names, ("not begun: the time of the run was over", 0.0)))
            return None
        command = [sys.executable, "-m", "tools.gpu_check", "section", *(["--dry"] if self.place.dry else [])]
        environment = shared_caches(self.place) | {"OMP_NUM_THREADS": "1" if self.place.dry else "2"}
        with (self.out / f"{names[0]}.log").open("w") as log:
            process = subprocess.Popen(
                [*command, str(self.out), str(self.place.cache), *names], cwd=ROOT, env=environment, stdout=log,
                stderr=log, start_new_session=True,
            )  # fmt: skip
        self.alive.append(_Running(names, process, time.perf_counter()))
        return self.alive[-1]

    def ended(self, one: _Running) -> bool:
        """Whether the process is over; one whose time is over is ended with all that it started."""
        taken, slow = time.perf_counter() - one.began, 10 if self.place.dry else 1
        over = taken > slow * one.timeout or self.seconds() > slow * (LIMIT_S + GRACE_S)
        if over:
            os.killpg(one.process.pid, signal.SIGKILL)
        if not over and one.process.poll() is None:
            return False
        self.alive.remove(one)
        code = one.process.wait()
        error = f"killed after {taken:.0f} s" if over else f"ended with {code}" if code else None
        for name in one.names:
            left = not (self.out / f"{name}.json").is_file()
            self.outcomes[name] = (error or ("left no record" if left else None), taken)
        return True

    def stop(self) -> None:
        """End everything that runs."""
        for one in self.alive:
            os.killpg(one.process.pid, signal.SIGKILL)
            self.outcomes.update(dict.fromkeys(one.names, ("the run was stopped", time.perf_counter() - one.began)))

    def run(self, waiting: list[tuple[str, ...]], width: int, when_started: Callable[[], None] = lambda: None) -> None:
        running: list[_Running] = []
        while waiting or running:
            while waiting and len(running) < width:
                started = self.start(waiting.pop(0))
                running += [started] if started else []
                if not waiting:
                    when_started()
            time.sleep(0.05)
            running = [one for one in running if not self.ended(one)]


def run_all(place: Place, out: Path, described: str, only: Iterable[str] = ()) -> dict[str, Any]:
    """Run the sections (or ``only`` those whose name begins so), write ``out``'s report and return it."""
    started, only = datetime.now(UTC).isoformat(timespec="seconds"), tuple(only)
    place.cache.mkdir(parents=True, exist_ok=True)
    place.gate.unlink(missing_ok=True)
    run = _Run(place, out)
    chosen = {n: s for n, s in SECTIONS.items() if not only or n.startswith(only)}

    def stopped(*_: object) -> None:
        raise _Stopped

    signal.signal(signal.SIGTERM, stopped)
    try:
        _run_stages(run, place, only)
    except _Stopped:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        run.stop()
    report = join(out, chosen, run.outcomes, seconds=run.seconds(), started=started, described=described, dry=place.dry)
    (out / "h200_check.json").write_text(as_text(report))
    print(table(report, run.outcomes))
    return report


def _run_stages(run: _Run, place: Place, only: tuple[str, ...]) -> None:
    gated: list[_Running] = []

    def prepare() -> None:
        gated.extend(filter(None, map(run.start, processes(("gated",), only))))

    for stage, width in (("first", 1), ("together", 2 if place.dry else TOGETHER), ("alone", 1)):
        if stage == "together":
            run.run(processes((stage,), only), width, prepare)
            if not gated:  # nothing else was to be run together
                prepare()
            place.gate.touch()
            while gated:
                time.sleep(0.05)
                gated[:] = [one for one in gated if not run.ended(one)]
        else:
            run.run(processes((stage,), only), width)
        print(f"{run.seconds():6.1f} s  {stage}", flush=True)


def join(
    out: Path,
    chosen: dict[str, Section],
    outcomes: dict[str, tuple[str | None, float]],
    *,
    seconds: float,
    started: str,
    described: str,
    dry: bool,
) -> dict[str, Any]:
    """The report: samples of all sections by point, values and passes by the points' own rules."""
    samples: dict[str, Any] = {"whole_run_s": {"seconds": round(seconds, 1)}}
    errors: dict[str, list[str]] = {}
    taken: dict[str, float] = {}
    kernels: set[str] = set()
    warm_keys: set[tuple] = set()
    commands: dict[str, list[str]] = {}
    for name, section in chosen.items():
        error = outcomes.get(name, ("did not run", 0.0))[0]
        path = out / f"{name}.json"
        recorded = json.loads(path.read_text()) if path.is_file() and path.stat().st_size else {}
        for point in section.points:
            commands.setdefault(point, []).append(name)
            if error:
                errors.setdefault(point, []).append(f"{name}: {error}")
        for point, found in recorded.get("samples", {}).items():
            try:
                merge(samples.setdefault(point, {}), found)
            except ValueError as error:
                errors.setdefault(point, []).append(f"{name}: {error}")
        for point, text in recorded.get("errors", {}).items():
            errors.setdefault(point, []).append(f"{name}: {text}")
        for point, spent in recorded.get("seconds", {}).items():
            taken[point] = taken.get(point, 0.0) + spent
        kernels.update(recorded.get("kernels", []))
        warm_keys.update(map(tuple, recorded.get("warm_keys", [])))
    made = {
        name: entry(name, samples.get(name, {}), errors.get(name, []), taken.get(name, 0.0), commands.get(name, []))
        for name in POINTS
    }
    return {
        **machine(dry),
        "commit": described.removesuffix("-dirty") or None,
        "clean_tree": bool(described) and not described.endswith("-dirty"),
        "started": started,
        "seconds": round(seconds, 1),
        "sections": {n: {"seconds": round(s, 1)} | ({"error": e} if e else {}) for n, (e, s) in outcomes.items()},
        "kernels": sorted(kernels),
        "warm_keys": sorted(map(list, warm_keys), key=str),
        "details": {name: found for name, found in samples.items() if name not in POINTS},
        "points": made,
    }


def entry(name: str, samples: Any, errors: list[str], seconds: float, sections: list[str]) -> dict[str, Any]:
    """One object of the report."""
    point = POINTS[name]
    try:
        value, passed = point.judge(samples)
        found = errors
    except SampleError as error:
        value, passed, found = None, False, [*errors, str(error)]
    made = {
        "question": point.question, "samples": samples, "value": value, "bar": point.bar, "sense": point.sense,
        "pass": passed and not errors, "seconds": round(seconds, 2),
        "command": f"tools/gpu_check.sh OUT COMMIT {' '.join(sections)}".strip(),
    }  # fmt: skip
    return made | ({"error": "; ".join(found)} if found else {})


def merge(into: dict[str, Any], found: dict[str, Any]) -> None:
    """Join nested samples of several processes; two of them may not give the same leaf."""
    for key, value in found.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value)
        elif key in into:
            raise ValueError(f"a sample must come from one section, got a second {key}")
        else:
            into[key] = value


def as_text(report: dict[str, Any]) -> str:
    """JSON with a line per key and a line per point: samples are many, and a change of a point is one line."""
    points = ",\n".join(f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in report["points"].items())
    rest = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in report.items() if key != "points"]
    return "{\n" + ",\n".join([*rest, f' "points": {{\n{points}\n }}']) + "\n}\n"


def machine(dry: bool) -> dict[str, Any]:
    import torch
    import triton

    return {
        "gpu": "none (dry run)" if dry else torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "python": sys.version.split()[0],
    }  # fmt: skip


def table(report: dict[str, Any], outcomes: dict[str, tuple[str | None, float]]) -> str:
    """One line per point, failures first; short enough to be read where it is printed."""
    points = sorted(report["points"].items(), key=lambda item: item[1]["pass"])
    lines = []
    for name, one in points:
        value = one["value"]
        shown = "-" if value is None else f"{value:.4g}"
        line = f"{'ok  ' if one['pass'] else 'FAIL'} {name:24s} {shown:>10s} {one['sense']} {one['bar']:g}"
        lines.append(line if one["pass"] else f"{line}  {one.get('error', '')[:150]}")
    slow = sorted(outcomes.items(), key=lambda item: -item[1][1])[:6]
    passed = sum(one["pass"] for _, one in points)
    slowest = ", ".join(f"{name} {taken:.0f} s" for name, (_, taken) in slow)
    summary = f"{passed} of {len(points)} pass, {report['seconds']:.0f} s, slowest: {slowest}"
    return "\n".join([summary, *lines[: _TABLE_ROWS - 1]])[:_TABLE_CHARACTERS]
