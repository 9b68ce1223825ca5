"""``python3 -m tools.gpu_check run | section | child | serve | validate``; people start tools/gpu_check.sh."""

import argparse
import gc
import json
import logging
import subprocess
import sys
import time
from pathlib import Path

import torch

from .common import ROOT, Place, Record


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
    section.add_argument("names", nargs="+")
    child = commands.add_parser("child", help="a measurement that needs a process of its own")
    child.add_argument("function")
    child.add_argument("arguments", nargs="*")
    serve = commands.add_parser("serve", help="an engine that serves ten requests when told to")
    serve.add_argument("cache", type=Path)
    serve.add_argument("path")
    check = commands.add_parser("validate", help="recompute a report")
    check.add_argument("file", type=Path)
    for each in (run, section, child, serve):
        each.add_argument("--dry", action="store_true", help="on the CPU, small: shows only that the code runs")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    return globals()[f"_{arguments.command}"](arguments)


def _run(arguments: argparse.Namespace) -> int:
    from .report import run_all

    described = arguments.described or _described()
    cache = arguments.out.resolve() / "caches"
    report = run_all(Place(arguments.dry, cache=cache), arguments.out.resolve(), described, arguments.only)
    return 0 if all(one["pass"] for one in report["points"].values()) else 1


def _described() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def _section(arguments: argparse.Namespace) -> int:
    from .sections import SECTIONS

    for name in arguments.names:
        section, record = SECTIONS[name], Record(arguments.out / f"{name}.json")
        began = time.perf_counter()
        try:
            section.run(Place(arguments.dry, section.stage == "together", arguments.cache), record)
        except Exception as error:  # outside of the blocks of its points: the other sections must still be seen
            record.fail(section.points, error)
        record.write()
        print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)
        gc.collect()
        if not arguments.dry:
            torch.cuda.empty_cache()
    return 0


def _child(arguments: argparse.Namespace) -> int:
    from .warm import CHILDREN

    print(
        "result",
        json.dumps(CHILDREN[arguments.function](Place(arguments.dry), *arguments.arguments), default=str),
        flush=True,
    )
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    from .speed import serve

    serve(Place(arguments.dry, cache=arguments.cache), arguments.path)
    return 0


def _validate(arguments: argparse.Namespace) -> int:
    from .validate import validate

    return validate(arguments.file, ROOT / "bench" / "missed.json")


if __name__ == "__main__":
    sys.exit(main())
