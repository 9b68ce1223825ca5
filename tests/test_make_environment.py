"""`make demo` sets up .venv: on this machine's torch where that reaches a GPU, else its own; downloads are spied on."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SPEC = importlib.util.spec_from_file_location("make_environment", ROOT / "tools" / "make_environment.py")
tool = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tool)


def packages(directory: Path, *, gpu: bool = True, without: str = "", torch: str = "2.11.0+cu130") -> Path:
    """Empty packages with the names of the dependencies, pip among them, which writes down how it was called."""
    for name, least in (*tool.requirements().items(), ("pip", "25.0")):
        if name == without:
            continue
        version = torch if name == "torch" else f"{least}.1"
        (directory / name).mkdir(parents=True)
        (directory / name / "__init__.py").write_text(f"__version__ = {version!r}\n")
        info = directory / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    with open(directory / "torch" / "__init__.py", "a") as module:
        module.write(f"class cuda:\n    is_available = staticmethod(lambda: {gpu})\n")
    (directory / "pip" / "__main__.py").write_text(
        f"import sys\nopen({str(directory / 'calls')!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
    )
    return directory


def make(directory: Path, site: Path) -> subprocess.CompletedProcess:
    """Run the tool by an interpreter that has the packages in ``site`` alone."""
    command = [sys.executable, "-S", ROOT / "tools" / "make_environment.py", directory / "venv", "torch==9.9"]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": str(site)}, capture_output=True, text=True)


def ask(directory: Path, code: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [directory / "venv" / "bin" / "python", "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def test_shares_a_torch_that_reaches_a_gpu(tmp_path):
    site = packages(tmp_path / "site")
    made = make(tmp_path, site)
    assert made.returncode == 0 and "using the torch of this machine" in made.stderr, made.stderr
    assert not (site / "calls").exists()  # nothing was fetched
    assert ask(tmp_path, "import torch, rich; print(torch.__version__)") == "2.11.0+cu130"
    assert ask(tmp_path, "import dsv4; print(dsv4.__file__)") == str(ROOT / "dsv4" / "__init__.py")
    assert (tmp_path / "venv" / "bin" / "dsv4").read_text().startswith(f"#!{tmp_path}/venv/bin/python\n")


@pytest.mark.parametrize("without", ["typer", "safetensors"])
def test_fetches_what_is_missing(tmp_path, without):
    site = packages(tmp_path / "site", without=without)
    made = make(tmp_path, site)
    assert made.returncode == 0 and f"installing {without}" in made.stderr, made.stderr
    assert (site / "calls").read_text() == f"install -q -e {ROOT}\n"


@pytest.mark.parametrize(
    "torch, gpu, shared", [("2.11.0", True, True), ("2.10.1", True, False), ("2.13.0", False, False)]
)
def test_which_torch_is_shared(monkeypatch, torch, gpu, shared):
    fake = type(sys)("torch")
    fake.__version__, fake.cuda = torch, type("cuda", (), {"is_available": staticmethod(lambda: gpu)})
    monkeypatch.setitem(sys.modules, "torch", fake)
    assert tool.has_gpu_torch(tool.requirements()["torch"]) is shared


def test_installs_its_own_elsewhere(monkeypatch, tmp_path):
    ran: list[list[str]] = []
    monkeypatch.setattr(tool, "has_gpu_torch", lambda least: False)
    monkeypatch.setattr(tool.subprocess, "run", lambda command, **_: ran.append([str(word) for word in command]))
    tool.main(str(tmp_path / "venv"), "torch==9.9")
    python = str(tmp_path / "venv" / "bin" / "python")
    assert ran == [
        [sys.executable, "-m", "venv", str(tmp_path / "venv")],
        [python, "-m", "pip", "install", "-q", "torch==9.9"],
        [python, "-m", "pip", "install", "-q", "-e", str(ROOT)],
    ]


def test_old_pythons_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 2))
    with pytest.raises(SystemExit, match="dsv4 needs Python 3.11 or newer, got .*: set PYTHON"):
        tool.main("venv", "torch")
