"""``tools/gpu_check.sh`` called for help, called wrongly, and called from another folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT

SCRIPT = ROOT / "tools" / "gpu_check.sh"


def call(*argv: object, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    command = ["bash", SCRIPT, *map(str, argv)]
    return subprocess.run(
        command, cwd=cwd, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help(flag):
    done = call(flag)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("Every check that needs a GPU")
    for word in ("OUT_DIR [COMMIT [SECTION...]]", "--dry OUT_DIR", "--validate FILE", "Exit status: 0"):
        assert word in done.stdout


@pytest.mark.parametrize("argv, message", [
    ((), "OUT_DIR, where the report goes, must be given"),
    (("--dry",), "OUT_DIR, where the report goes, must be given"),
    (("--validate",), "FILE, a report, must be given"),
    (("--validate", "a", "b"), "--validate must come with one FILE, got also b"),
    (("--wet", "out"), "options must be --dry, --validate or --help, got --wet"),
    (("--dry", "--validate", "out"), "options must be --dry, --validate or --help, got --validate"),
    (("out", "--dry"), "options must come first, got --dry"),
], ids=str)  # fmt: skip
def test_misuse_shows_the_usage(argv, message):
    done = call(*argv)
    assert done.returncode == 2 and done.stdout == ""
    first, rest = done.stderr.split("\n", 1)
    assert first == f"error: {message}" and rest == call("--help").stdout


@pytest.mark.parametrize("argv, message", [
    (("out", "decode"), "COMMIT must be 40 hex digits, with -dirty behind them if files differ, got 'decode'"),
    (("out", "a" * 40 + "-dirt"), "COMMIT must be 40 hex digits"),
    (("out", "", "decode", "no_such"), "SECTION must begin the name of one of prewarm, "),
    (("/proc/nope", "", "references"), "OUT_DIR must be a folder that can be made, got /proc/nope: "),
    (("README.md",), f"OUT_DIR must be a folder, got the file {ROOT / 'README.md'}"),
], ids=str)  # fmt: skip
def test_a_run_that_would_measure_something_else(argv, message):
    done = call("--dry", *argv)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith(f"error: {message}")
    assert len(done.stderr.splitlines()) == 1
    assert not (ROOT / "out").exists()


def test_paths_are_those_of_the_caller(tmp_path):
    (tmp_path / "report.json").write_text("[1]")
    done = call("--validate", "report.json", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == f"WRONG   a report must be a JSON object, got {tmp_path / 'report.json'}: list\n"
