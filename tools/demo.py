"""`make demo`: nano generates four prompts through compiled pieces, and is scored on the golden tokens.

The start-up is timed twice in fresh processes: cold (nothing compiled yet) and warm (pieces loaded from disk).
"""

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dsv4 import evaluate
from dsv4.engine import Engine
from dsv4.engine_config import EngineConfig
from dsv4.sampling import SamplingParams

ROOT = Path(__file__).resolve().parent.parent
NANO, GOLDEN = ROOT / "assets" / "nano", ROOT / "tests" / "golden"
PROMPTS = (
    "Ge 1:1 In the beginning",
    "And the LORD said unto Moses,",
    "hacker: n. A person who",
    "Blessed are the",
)


def start(cache: str) -> tuple[Engine, float]:
    """An engine with compiled pieces, and the seconds until it could serve."""
    began = time.perf_counter()
    settings = EngineConfig(compile="piecewise", compile_cache=cache, max_seq_len=1280, max_requests=4)
    return Engine.from_checkpoint(NANO, settings), time.perf_counter() - began


def cold_start(cache: str) -> float:
    """Seconds of a first start, in a process of its own."""
    command = [sys.executable, __file__, "--start-only", cache]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        sys.exit(result.returncode)
    return json.loads(result.stdout)["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start-only", metavar="CACHE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    if arguments.start_only:
        _, seconds = start(arguments.start_only)
        print(json.dumps({"seconds": seconds}))
        return
    console = Console()
    with tempfile.TemporaryDirectory(prefix="dsv4-demo-") as cache:
        console.print("[bold]Cold start[/bold]: tracing nano and compiling its distinct pieces")
        cold = cold_start(cache)
        console.print("[bold]Warm start[/bold]: a new process loads them from disk")
        engine, warm = start(cache)
        completions, run = engine.generate_with_stats(PROMPTS, SamplingParams(max_new_tokens=48))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        console.print(f"\n[bold]{prompt}[/bold]{completion.text}", highlight=False)
    console.print("\nScoring the golden tokens through the same compiled pieces …")
    record = json.loads((GOLDEN / "exact_nll.json").read_text())
    nll = evaluate.score(engine.runner, record["tokens"], window=record["window"]).nll
    report = engine.compile_reports["step"]
    table = Table(show_header=False)
    for row in (
        ("start, cold / warm", f"{cold:.1f} s / {warm:.1f} s"),
        ("tokens per second, batch of 4", f"{run.tokens_per_second:.1f}"),
        ("NLL on the golden tokens", f"{nll:.6f}"),
        ("expected", f"{record['nll']:.6f}"),
        ("graph breaks", str(report.graph_breaks)),
        ("pieces / distinct", f"{report.num_pieces} / {report.num_distinct_pieces}"),
        ("recompiles", str(report.num_recompiles)),
    ):
        table.add_row(*row)
    console.print(table)
    if abs(nll - record["nll"]) > 1e-4:
        sys.exit(f"NLL must be within 1e-4 of {record['nll']:.6f}, got {nll:.6f}")


if __name__ == "__main__":
    main()
