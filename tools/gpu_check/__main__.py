"""``python3 -m tools.gpu_check run | section | child | validate``; people start tools/gpu_check.sh.

Nothing heavy is imported here: a run starts its processes, and a process its children, before torch is imported.
"""

import argparse
import ctypes
import gc
import json
import logging
import re
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

from . import children
from .place import ROOT, Place


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="every section, then the report")
    run.add_argument("out", type=Path)
    run.add_argument("described", nargs="?", default="", help="commit, with -dirty behind it if files differ from it")
    run.add_argument("only", nargs="*", help="only sections whose names begin so")
    section = commands.add_parser("section", help="sections, one after another in this process")
    section.add_argument("out", type=Path, help="folder for one JSON file per section")
    section.add_argument("cache", type=Path)
    section.add_argument("ready", type=Path, help="made once all is imported; a line on stdin then lets it measure")
    section.add_argument("names", nargs="+")
    child = commands.add_parser("child", help="a measurement that needs a process of its own")
    child.add_argument("cache", type=Path)
    child.add_argument("function", choices=children.FUNCTIONS)
    child.add_argument("arguments", nargs="*")
    check = commands.add_parser("validate", help="recompute a report")
    check.add_argument("file", type=Path)
    for each in (run, section, child):
        each.add_argument("--dry", action="store_true", help="on the CPU, small: shows only that the code runs")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    return globals()[f"_{arguments.command}"](arguments)


def _run(arguments: argparse.Namespace) -> int:
    from .report import run_all

    if wrong := _misuse(arguments):
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    if not arguments.dry and not _reaches_gpu():
        print("a run must be on a machine whose driver finds a GPU, got none; --dry shows that the code runs")
        return 2
    described = arguments.described or _described()
    cache = arguments.out.resolve() / "caches"
    report = run_all(Place(arguments.dry, cache=cache), arguments.out.resolve(), described, arguments.only)
    return 0 if all(one["pass"] for one in report["points"].values()) else 1


def _misuse(arguments: argparse.Namespace) -> str | None:
    """What is wrong with the arguments of a run, which would otherwise be found after minutes, or never."""
    from .sections import SECTIONS

    out, described = arguments.out, arguments.described
    if out.exists() and not out.is_dir():
        return f"OUT_DIR must be a folder, got the file {out}"
    if described and not re.fullmatch(r"[0-9a-f]{40}(-dirty)?", described):
        return f"COMMIT must be 40 hex digits, with -dirty behind them if files differ, got {described!r}"
    for name in arguments.only:
        if not any(section.startswith(name) for section in SECTIONS):
            return f"SECTION must begin the name of one of {', '.join(SECTIONS)}, got {name!r}"
    if arguments.dry or _reaches_gpu():  # nothing is made for a run that cannot begin
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return f"OUT_DIR must be a folder that can be made, got {out}: {error}"
    return None


def _reaches_gpu() -> bool:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def _described() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def _section(arguments: argparse.Namespace) -> int:
    from .sections import SECTIONS

    sections = {name: SECTIONS[name] for name in arguments.names}
    places = {n: Place(arguments.dry, s.stage == "together", arguments.cache) for n, s in sections.items()}
    prepared = {n: getattr(children, s.prepare)(places[n]) for n, s in sections.items() if s.prepare}
    try:
        from .common import Record

        loaded = {name: section.load(places[name]) for name, section in sections.items()}
        records = {name: Record(arguments.out / f"{name}.json") for name in sections}
        for name, several in prepared.items():
            for child in several:
                try:
                    child.wait_ready()
                except RuntimeError as error:
                    records[name].fail(sections[name].points, error)
        arguments.ready.touch()
        if not sys.stdin.readline():
            return 1  # the run is gone
        for name, section in sections.items():
            began = time.perf_counter()
            try:
                loaded[name](places[name], records[name], **({"prepared": prepared[name]} if name in prepared else {}))
            except Exception as error:  # outside of the blocks of its points: the other sections must still be seen
                records[name].fail(section.points, error)
            records[name].finished = True
            records[name].write()
            print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)
            _free(arguments.dry)
    finally:
        for child in (child for several in prepared.values() for child in several):
            child.process.kill()
    return 0


def _free(dry: bool) -> None:
    import torch

    gc.collect()
    if not dry:
        torch.cuda.empty_cache()


def _child(arguments: argparse.Namespace) -> int:
    module, _, name = children.FUNCTIONS[arguments.function].partition(".")
    measure = getattr(import_module(f".{module}", __package__), name)
    found = measure(Place(arguments.dry, cache=arguments.cache), *arguments.arguments)
    print("result", json.dumps(found, default=str), flush=True)
    return 0


def _validate(arguments: argparse.Namespace) -> int:
    from .validate import validate

    return validate(arguments.file, ROOT / "bench" / "missed.json")


if __name__ == "__main__":
    sys.exit(main())
