"""What is installed: the four folders as one namespace, without any optional library, and nothing else."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import dsv4

from .test_imports import FOLDERS, MODULES, THIRD_PARTY

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
OPTIONAL = ("triton", "tilelang", "deep_gemm", "deep_ep", "transformers")
TRIED_BY_TORCH = {"triton"}  # its compiler looks for it


def module_name(path: str) -> str:
    """``dsv4.ops.linear`` of ``ops/linear.py``."""
    folder, *rest = path.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join([FOLDERS[folder], *rest])


def python(code: str, *, cwd: Path, path: list[Path], executable: Path | str = sys.executable) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1"}
    command = [executable, "-c", code]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_package_is_listed():
    """A package missing from the list would be missing from the wheel, and only there."""
    found = {module_name(path) for path in MODULES if path.endswith("/__init__.py")}
    assert sorted(SETUPTOOLS["packages"]) == sorted(found)
    assert SETUPTOOLS["package-dir"] == {name: folder for folder, name in FOLDERS.items()}
    folders = {(ROOT / path).parent for path in MODULES}
    assert all((folder / "__init__.py").is_file() for folder in folders), "a folder of modules is no package"


def test_every_data_file_is_listed():
    data = {
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    listed = {f"{package}/{name}" for package, names in SETUPTOOLS["package-data"].items() for name in names}
    assert data == listed and "dsv4/py.typed" in listed


def test_metadata():
    project = PROJECT["project"]
    assert project["version"] == dsv4.__version__
    assert project["scripts"] == {"dsv4": "dsv4.cli:main"}
    assert (ROOT / project["readme"]).is_file()
    assert all((ROOT / name).is_file() for name in project["license-files"])


def test_dependencies_cover_the_imports():
    """What the packages may import is required, or an extra that holds the module's own name."""
    required = {re.split(r"[<>=~\[; ]", line)[0] for line in PROJECT["project"]["dependencies"]}
    extras = set(PROJECT["project"]["optional-dependencies"])
    assert set().union(*THIRD_PARTY.values()) <= required | extras
    assert required.isdisjoint(OPTIONAL)


def holds_kernels(path: str) -> bool:
    """Modules that ops import when they first launch on a GPU."""
    is_kernel = path.endswith("_kernel.py") or "\nimport triton" in (ROOT / path).read_text()
    return path.startswith("ops/") and is_kernel


def test_needs_no_optional_library(tmp_path):
    """Every module but those that hold kernels loads where no optional library can be imported, and none tries to."""
    for name in OPTIONAL:
        trap = f"import builtins\nbuiltins.tried.append('{name}')\nraise ImportError('{name}')"
        (tmp_path / f"{name}.py").write_text(trap)
    code = f"""
import builtins, importlib, json
builtins.tried = []
import dsv4, dsv4.ops
light = list(tried)
for name in {sorted({module_name(path) for path in MODULES if not holds_kernels(path)} - {"dsv4.__main__"})}:
    importlib.import_module(name)
print(json.dumps([dsv4.__file__, light, tried]))
"""
    where, light, everything = json.loads(python(code, cwd=tmp_path, path=[tmp_path, ROOT]))
    assert Path(where) == ROOT / "dsv4" / "__init__.py"
    assert light == []
    assert set(everything) <= TRIED_BY_TORCH


@pytest.mark.parametrize("folder", sorted(set(FOLDERS) - {"dsv4"}))
def test_refuses_another_name(folder):
    with pytest.raises(ImportError, match=f"import this package as dsv4.{folder}, not as {folder}"):
        importlib.import_module(folder)
    assert folder not in sys.modules


@pytest.mark.slow
def test_wheel(tmp_path):
    """Built from a copy, installed without the tree in sight: files, console script, and a run from elsewhere."""
    source, wheels, elsewhere = tmp_path / "source", tmp_path / "wheels", tmp_path / "elsewhere"
    elsewhere.mkdir()
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", wheels, source]
    subprocess.run(build, check=True, cwd=tmp_path, timeout=300)
    (wheel,) = wheels.glob("dsv4-*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = {module_name(path): path for path in MODULES}
    expected = {
        f"{name.replace('.', '/')}/__init__.py" if path.endswith("/__init__.py") else f"{name.replace('.', '/')}.py"
        for name, path in modules.items()
    }
    assert names == expected | {"dsv4/py.typed"}

    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    inner = home / "bin" / "python"
    subprocess.run([*pip, "--python", inner, "install", "--no-deps", wheel], check=True, cwd=tmp_path, timeout=300)
    (site,) = (home / "lib").glob("python*/site-packages")
    paths = [path for path in sys.path if path.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(paths))  # after the install, which must not see this tree's own
    code = f"""
import importlib, inspect, sys
for name in {sorted(set(modules) - {"dsv4.__main__"})}:
    assert inspect.getsource(importlib.import_module(name)) is not None
print(sys.modules["dsv4.ops.linear"].__file__)
"""
    assert python(code, cwd=elsewhere, path=[], executable=inner).startswith(str(site))
    prompts = elsewhere / "prompts.json"
    prompts.write_text("[[5, 6, 7]]")
    nano = ROOT / "assets" / "nano"
    command = [home / "bin" / "dsv4", "logits", nano, "--prompts", prompts, "--out", "out", "--json"]
    done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, timeout=300, check=True)
    assert json.loads(done.stdout) == {"out": "out", "prompts": 1, "vocab": 2048}
