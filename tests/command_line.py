"""Runs the console entry in this process and checks what every call must keep."""

import json
from pathlib import Path

import pytest

from dsv4.cli import main

ROOT = Path(__file__).resolve().parent.parent
NANO = ROOT / "assets" / "nano"
GOLDEN = ROOT / "tests" / "golden"


def run(capfd: pytest.CaptureFixture, *argv: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``dsv4 argv…``."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in argv])
    return end.value.code, *capfd.readouterr()


def parse(out: str) -> dict:
    """The one JSON object of ``out``: one line, ASCII, no NaN or infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert out.endswith("\n") and out.count("\n") == 1 and out.isascii(), out
    value = json.loads(out, parse_constant=refuse)
    assert isinstance(value, dict)
    return value


def run_json(capfd: pytest.CaptureFixture, *argv: object) -> dict:
    """The object that a successful call with ``--json`` writes."""
    code, out, err = run(capfd, *argv, "--json")
    assert code == 0, err
    return parse(out)


def refused(capfd: pytest.CaptureFixture, *argv: object, code: int = 2) -> str:
    """The message of a call that must be refused: an object with key ``error``, and the same on one line of stderr."""
    got, out, err = run(capfd, *argv, "--json")
    assert got == code, (out, err)
    message = parse(out)["error"]
    lines = [line for line in err.splitlines() if "loading weights" not in line]
    assert lines == [f"error: {message}"]
    return message


def write_json(path: Path, value: object) -> Path:
    path.write_text(json.dumps(value))
    return path
