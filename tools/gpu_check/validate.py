"""Recomputes a report from its raw samples: every value and pass, the points that must exist, and the clean tree."""

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

from .points import POINTS
from .rules import SampleError
from .sections import SECTIONS

TOP_KEYS = (
    "gpu", "torch", "triton", "python", "commit", "clean_tree", "started", "seconds", "kernels", "warm_keys", "points",
    "sections", "details",
)  # fmt: skip
POINT_KEYS = ("question", "samples", "value", "bar", "sense", "pass", "seconds", "command")


class UnreadableError(ValueError):
    """A file that cannot be a report, or cannot be a list of misses."""


def read(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in ``path``; the error names ``what`` it should be, in one line."""
    try:
        found = json.loads(path.read_text(), object_pairs_hook=_once)
    except (OSError, ValueError, RecursionError) as error:
        raise UnreadableError(f"{what} must be a file of JSON, got {path}: {error}") from error
    if not isinstance(found, dict):
        raise UnreadableError(f"{what} must be a JSON object, got {path}: {type(found).__name__}")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"a key must stand once, got {next(key for key in keys if keys.count(key) > 1)!r} again")
    return found


def _require_objects(name: str, found: Any, path: Path) -> None:
    """Refuse anything but an object of objects."""
    inner = {f"{name} {key}": value for key, value in found.items()} if isinstance(found, dict) else {}
    for subject, value in ({name: found} | inner).items():
        if not isinstance(value, dict):
            raise UnreadableError(f"{subject} must be a JSON object, got {type(value).__name__} in {path}")


def problems(report: dict[str, Any], missed: dict[str, dict[str, Any]]) -> list[str]:
    """Everything that is wrong with ``report``, each beginning with the point or key that it is about.

    Args:
        report: as written by a run.
        missed: goals that are stated as missed, by point: ``value`` (what was measured; ``None`` if nothing was, or
            only the answer to an earlier question) and ``reason``.
    """
    found = [f"{key}: the report lacks it" for key in TOP_KEYS if key not in report]
    found += [f"{key}: not a known key" for key in report if key not in TOP_KEYS]
    if report.get("clean_tree") is not True:
        found.append(f"clean_tree: must be true, got {report.get('clean_tree')!r}")
    if not re.fullmatch("[0-9a-f]{40}", str(report.get("commit"))):
        found.append(f"commit: must be 40 hex digits, got {report.get('commit')!r}")
    for key in ("kernels", "warm_keys"):
        if not isinstance(report.get(key), list) or not report[key]:
            found.append(f"{key}: must name at least one, got {report.get(key)!r}")
    found += _description_problems(report)
    points = report.get("points", {})
    found += [f"{name}: not a known point" for name in points if name not in POINTS]
    for name in POINTS:
        found += [f"{name}: {text}" for text in _point_problems(name, points.get(name), missed.get(name))]
    for name, stated in missed.items():
        if name not in POINTS:
            found.append(f"{name}: stated as missed, but not a known point")
        elif not stated.get("reason"):
            found.append(f"{name}: stated as missed without a reason")
        elif "value" not in stated:
            found.append(f"{name}: stated as missed without a value, which is null if none was measured")
        elif points.get(name, {}).get("pass") is True:
            found.append(f"{name}: stated as missed, but it passes")
    return found


def _description_problems(report: dict[str, Any]) -> list[str]:
    """Where, when and how long: what no sample says."""
    found = []
    if not str(report.get("gpu", "")).startswith("NVIDIA"):
        found.append(f"gpu: must be the name of an NVIDIA GPU, got {report.get('gpu')!r}")
    try:
        datetime.fromisoformat(report.get("started"))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        found.append(f"started: must be a time, got {report.get('started')!r}")
    whole = report.get("points", {}).get("whole_run_s", {}).get("value")
    if report.get("seconds") != whole:
        found.append(f"seconds: must be the value of whole_run_s, {whole!r}, got {report.get('seconds')!r}")
    for key in ("torch", "triton", "python"):
        if not re.match(r"\d+\.\d+", str(report.get(key))):
            found.append(f"{key}: must be a version, got {report.get(key)!r}")
    for key in ("sections", "details"):
        if not isinstance(report.get(key), dict):
            found.append(f"{key}: must be an object, got {report.get(key)!r}")
        elif key == "sections" and (lacking := sorted(SECTIONS.keys() - report[key].keys())):
            found.append(f"sections: must hold every section, lacks {', '.join(lacking)}")
        elif key == "sections":
            found += _section_problems(report)
    return found


def _section_problems(report: dict[str, Any]) -> list[str]:
    """What ended before its end cannot have measured all that its points ask for."""
    found = []
    for name, section in report["sections"].items():
        points = SECTIONS[name].points if name in SECTIONS else ()
        passing = [point for point in points if report.get("points", {}).get(point, {}).get("pass")]
        if isinstance(section, dict) and section.get("end") and passing:
            found.append(f"sections: {name} must have ended well for {passing[0]} to pass, got {section['end']!r}")
    return found


def _point_problems(name: str, entry: dict[str, Any] | None, stated: dict[str, Any] | None) -> list[str]:
    unmeasured = stated is not None and stated.get("value") is None
    if entry is None:
        return [] if unmeasured else ["the report lacks the point"]
    lacking = [f"lacks {key}" for key in POINT_KEYS if key not in entry]
    if lacking:
        return lacking
    point, found = POINTS[name], []
    if not isinstance(entry["seconds"], int | float) or not entry["seconds"] >= 0:
        found.append(f"seconds must be a number from 0, got {entry['seconds']!r}")
    if not str(entry["command"]).startswith("tools/gpu_check.sh "):
        found.append(f"command must be one of tools/gpu_check.sh, got {entry['command']!r}")
    if unmeasured and entry["question"] != point.question:
        return []
    for key in ("question", "bar", "sense"):
        if entry[key] != getattr(point, key):
            found.append(f"{key} must be {getattr(point, key)!r}, got {entry[key]!r}")
    try:
        value, passed = point.judge(entry["samples"])
    except SampleError as error:
        value, passed = None, False
        if stated is None:
            found.append(f"{error}" + (f"; the run recorded: {entry['error']}" if entry.get("error") else ""))
    if entry.get("error"):
        passed = False
    if entry["value"] != value:
        found.append(f"value must be {value!r} by the rule {point.rule}, got {entry['value']!r}")
    if entry["pass"] is not passed:
        found.append(f"pass must be {passed}, got {entry['pass']!r}")
    if not passed and stated is None:
        found.append(f"failed: {value!r} is not {point.sense} {point.bar!r}" + _because(entry))
    if unmeasured and value is not None:
        found.append(f"stated as not measured, but the report holds {value!r}")
    elif stated is not None and not passed and stated.get("value") != value:
        found.append(f"the value stated as missed must be the measured {value!r}, got {stated.get('value')!r}")
    return found


def _because(entry: dict[str, Any]) -> str:
    return f" ({entry['error']})" if entry.get("error") else ""


def validate(path: Path, missed_path: Path) -> int:
    """Print what is wrong, then the stated misses; 0 if nothing is wrong. A file that is no report is one line."""
    try:
        report = read(path, "a report")
        missed = read(missed_path, "a list of misses") if missed_path.is_file() else {}
        _require_objects("points", report.get("points", {}), path)
        _require_objects("misses", missed, missed_path)
    except UnreadableError as error:
        print(f"WRONG   {error}")
        return 1
    found = problems(report, missed)
    for text in found:
        print(f"WRONG   {text}")
    for name, stated in missed.items():
        measured = "NO VALUE" if stated.get("value") is None else "MISSED  "
        print(f"{measured} {name}: {stated.get('value')}, {stated.get('reason')}")
    wrong = {text.partition(":")[0] for text in found}
    passed = sum(report.get("points", {}).get(name, {}).get("pass") is True for name in POINTS.keys() - wrong)
    unmeasured = sum(stated.get("value") is None for stated in missed.values())
    print(
        f"{passed} of {len(POINTS)} points pass, {len(missed)} stated as missed ({unmeasured} of them not measured), "
        f"{len(found)} problems in {path}"
    )
    return 1 if found else 0
