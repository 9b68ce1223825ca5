"""Runs all sections within the time of one run and joins what they recorded into the report."""

import json
import signal
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .place import Place
from .points import POINTS
from .rules import SampleError
from .running import Run, run_stages
from .sections import SECTIONS, Section

_TABLE_ROWS, _TABLE_CHARACTERS = 60, 6000


class _Stopped(Exception):
    """The run was told to end (SIGTERM): the report says what there is."""


def run_all(place: Place, out: Path, described: str, only: Iterable[str] = ()) -> dict[str, Any]:
    """Run the sections (or ``only`` those whose name begins so), write ``out``'s report and return it."""
    started, only = datetime.now(UTC).isoformat(timespec="seconds"), tuple(only)
    run = Run(place, out)
    chosen = {n: s for n, s in SECTIONS.items() if not only or n.startswith(only)}

    def stopped(*_: object) -> None:
        raise _Stopped

    signal.signal(signal.SIGTERM, stopped)
    try:
        run_stages(run, only)
    except _Stopped:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        run.stop()
    report = join(out, chosen, run.outcomes, seconds=run.seconds(), started=started, described=described)
    (out / "h200_check.json").write_text(as_text(report))
    print(table(report, run.outcomes))
    return report


def join(
    out: Path,
    chosen: dict[str, Section],
    outcomes: dict[str, tuple[str | None, float]],
    *,
    seconds: float,
    started: str,
    described: str,
) -> dict[str, Any]:
    """The report: samples of all sections by point, values and passes by the points' own rules."""
    samples: dict[str, Any] = {"whole_run_s": {"seconds": round(seconds, 1)}}
    errors: dict[str, list[str]] = {}
    taken: dict[str, float] = {}
    kernels: set[str] = set()
    warm_keys: set[tuple] = set()
    commands: dict[str, list[str]] = {}
    machine = dict.fromkeys(("gpu", "torch", "triton", "python"))
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
        machine |= recorded.get("machine", {})
        kernels.update(recorded.get("kernels", []))
        warm_keys.update(map(tuple, recorded.get("warm_keys", [])))
    made = {
        name: entry(name, samples.get(name, {}), errors.get(name, []), taken.get(name, 0.0), commands.get(name, []))
        for name in POINTS
    }
    return {
        **machine,
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
