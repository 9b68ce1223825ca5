"""Makes .venv for the Makefile, with the interpreter that runs this file: ``make_environment.py VENV TORCH``.

Where this interpreter already has a torch that reaches a GPU, the environment uses that torch: another one might not
fit the driver. If everything else is there too, nothing is downloaded. Otherwise pip installs TORCH and what it needs.
"""

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = """#!{python}
from dsv4.cli import main

main()
"""


def requirements() -> dict[str, str]:
    """Dependencies in pyproject.toml, each a package and a module of one name, with the least release."""
    import tomllib  # below Python 3.11 nothing gets here

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return dict(re.fullmatch(r"([a-z]+)>=([0-9.]+)", text).groups() for text in project["dependencies"])


def release(text: str) -> tuple[int, ...]:
    """``2.11.0+cu130`` -> (2, 11, 0)."""
    return tuple(map(int, re.match(r"[0-9]+(\.[0-9]+)*", text)[0].split(".")))


def has_gpu_torch(least: str) -> bool:
    """Whether this interpreter's torch is new enough and reaches a GPU."""
    try:
        import torch
    except (ImportError, OSError):  # OSError: a library of its own is missing
        return False
    return release(torch.__version__) >= release(least) and torch.cuda.is_available()


def has(name: str, least: str) -> bool:
    """Whether this interpreter has the package in a release that is new enough."""
    try:
        return release(importlib.metadata.version(name)) >= release(least)
    except importlib.metadata.PackageNotFoundError:
        return False


def site_directories(names: Sequence[str]) -> list[str]:
    """Where this interpreter finds the packages ``names``; those that it has not are left out."""
    specs = [importlib.util.find_spec(name) for name in names]
    found = [str(Path(spec.origin).parent.parent) for spec in specs if spec is not None and spec.origin]
    return list(dict.fromkeys(found))


def share(environment: Path) -> None:
    """An environment on this interpreter's packages; pip, itself one of them, fetches only what is missing."""
    names = list(requirements())
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    query = [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
    own = Path(subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip())
    lines = [f"import site; site.addsitedir({path!r})" for path in site_directories([*names, "pip"])]
    (own / "shared.pth").write_text("\n".join(lines) + "\n")
    missing = [name for name, least in requirements().items() if not has(name, least)]
    if missing:
        print(f"installing {', '.join(missing)}", file=sys.stderr)
        subprocess.run([python, "-m", "pip", "install", "-q", "-e", str(ROOT)], check=True)
        return
    (own / "dsv4.pth").write_text(f"{ROOT}\n")
    script = environment / "bin" / "dsv4"
    script.write_text(SCRIPT.format(python=python.absolute()))
    script.chmod(0o755)


def install(environment: Path, torch: str) -> None:
    """An environment of its own."""
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    for wanted in ([torch], ["-e", str(ROOT)]):
        subprocess.run([environment / "bin" / "python", "-m", "pip", "install", "-q", *wanted], check=True)


def main(environment: str, torch: str) -> None:
    if sys.version_info < (3, 11):
        sys.exit(f"dsv4 needs Python 3.11 or newer, got {sys.version.split()[0]}: set PYTHON")
    if has_gpu_torch(requirements()["torch"]):
        print("using the torch of this machine, which reaches a GPU", file=sys.stderr)
        share(Path(environment))
    else:
        install(Path(environment), torch)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
