"""``tools/gpu_check.sh --validate`` of something that is no report: one line and exit status 1, never a traceback."""

import os
import subprocess
import sys

import pytest

from tools.gpu_check.validate import validate

from .conftest import ROOT


@pytest.mark.parametrize("text, message", [
    (None, "a report must be a file of JSON, got {path}: [Errno 2] No such file"),
    ("", "a report must be a file of JSON, got {path}: Expecting value"),
    ("{", "a report must be a file of JSON, got {path}: Expecting"),
    ("[1]", "a report must be a JSON object, got {path}: list"),
    ("[" * 100_000, "a report must be a file of JSON, got {path}: "),
    ('{"points": [1]}', "points must be a JSON object, got list in {path}"),
    ('{"clean_tree": false, "clean_tree": true}', "a report must be a file of JSON, got {path}: a key must stand once"),
    ('{"points": {"ops": 3}}', "points ops must be a JSON object, got int in {path}"),
])  # fmt: skip
def test_what_is_no_report_is_one_line(tmp_path, text, message):
    path = tmp_path / "report.json"
    if text is not None:
        path.write_text(text)
    command = ["bash", "tools/gpu_check.sh", "--validate", path]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and done.stderr == "" and len(done.stdout.splitlines()) == 1
    assert done.stdout.startswith("WRONG   " + message.format(path=path)), done.stdout


def test_bytes_and_misses_that_cannot_be_read(tmp_path, capsys):
    path, missed = tmp_path / "report.json", tmp_path / "missed.json"
    path.write_bytes(b"\xff\xfe\x00")
    assert validate(path, missed) == 1
    assert capsys.readouterr().out.startswith("WRONG   a report must be a file of JSON")
    path.write_text("{}")
    for text, message in (("{", "a list of misses must be a file of JSON"), ('{"ops": 3}', "misses ops must be")):
        missed.write_text(text)
        assert validate(path, missed) == 1 and capsys.readouterr().out.startswith(f"WRONG   {message}")
