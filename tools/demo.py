"""`make demo`: nano generates four prompts through compiled pieces, and is scored on the golden tokens.

On a supported GPU pieces and kernels are replayed as CUDA graphs, and the start-up is shown stage by stage. It is timed
twice in fresh processes: cold (no kernel or piece compiled yet) and warm (all loaded from disk).
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Column, Table

from dsv4 import evaluate
from dsv4.engine import Engine
from dsv4.engine_config import EngineConfig
from dsv4.graphs.jit_monitor import JitMonitor
from dsv4.sampling import SamplingParams

ROOT = Path(__file__).resolve().parent.parent
NANO, GOLDEN = ROOT / "assets" / "nano", ROOT / "tests" / "golden"
PROMPTS = (
    "Ge 1:1 In the beginning",
    "And the LORD said unto Moses,",
    "hacker: n. A person who",
    "Blessed are the",
)
CAPABILITY = (9, 0)  # of the oldest GPU that the kernels are written for
# fp32 sums in another order; on a GPU activations are bf16
NLL_BOUND = {"cpu": 1e-4, "cuda": 5e-3}
KERNEL_CACHES = ("TRITON_CACHE_DIR", "TILELANG_CACHE_DIR", "DG_JIT_CACHE_DIR")


def choose_device() -> str:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= CAPABILITY:
        return "cuda"
    return "cpu"


def start(cache: str, device: str) -> tuple[Engine, float]:
    """An engine with compiled pieces, and the seconds until it could serve. Nothing is kept outside ``cache``."""
    os.environ |= {name: f"{cache}/{name.lower()}" for name in KERNEL_CACHES}
    began = time.perf_counter()
    settings = EngineConfig(
        device=device, compile="piecewise", compile_cache=f"{cache}/pieces", max_seq_len=1280, max_requests=4,
        num_blocks=64,
    )  # fmt: skip
    return Engine.from_checkpoint(NANO, settings), time.perf_counter() - began


def cold_start(cache: str, device: str) -> float:
    """Seconds of a first start, in a process of its own."""
    command = [sys.executable, __file__, "--start-only", cache, "--device", device]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        sys.exit(result.returncode)
    return json.loads(result.stdout)["seconds"]


def start_up_table(engine: Engine) -> Table:
    """Stage by stage: seconds, keys warmed or pieces compiled, graphs captured, and memory that stays taken."""
    table = Table("stage", *(Column(name, justify="right") for name in ("seconds", "keys", "graphs", "MiB")))
    for row in engine.started.table():
        counts = ("" if n is None else str(n) for n in (row.keys, row.graphs))
        table.add_row(row.stage, f"{row.seconds:.2f}", *counts, "" if row.mib is None else f"{row.mib:.0f}")
    return table


def results(engine: Engine, cold: float, warm: float, rate: float, nll: float, expected: float) -> Table:
    report, started = engine.compile_reports["step"], engine.started
    rows = [
        ("start, cold / warm", f"{cold:.1f} s / {warm:.1f} s"),
        ("tokens per second, batch of 4", f"{rate:.1f}"),
        ("NLL on the golden tokens", f"{nll:.6f}"),
        ("expected", f"{expected:.6f}"),
        ("graph breaks", str(report.graph_breaks)),
        ("pieces / distinct", f"{report.num_pieces} / {report.num_distinct_pieces}"),
        ("recompiles", str(report.num_recompiles)),
    ]
    for name, step in started.captured.items():
        paths = ", ".join(f"{count} {kind}" for kind, count in sorted(step.path_counts.items()))
        rows.append((f"{name}s by path", paths))
    table = Table(show_header=False)
    for row in rows:
        table.add_row(*row)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default=choose_device())
    parser.add_argument("--start-only", metavar="CACHE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = arguments.device
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    if arguments.start_only:
        _, seconds = start(arguments.start_only, device)
        print(json.dumps({"seconds": seconds}))
        return
    console = Console()
    record = json.loads((GOLDEN / "exact_nll.json").read_text())
    with tempfile.TemporaryDirectory(prefix="dsv4-demo-") as cache:
        if device == "cuda":
            console.print(f"On {torch.cuda.get_device_name()}, torch {torch.__version__}", highlight=False)
        console.print("[bold]Cold start[/bold]: tracing nano and compiling its distinct pieces and kernels")
        cold = cold_start(cache, device)
        console.print("[bold]Warm start[/bold]: a new process loads them from disk")
        engine, warm = start(cache, device)
        if device == "cuda":
            console.print(start_up_table(engine))
        hardware = engine.started.hardware
        watched = {} if hardware is None else hardware.jit_libraries()
        with JitMonitor(
            libraries={name: watched.get(name, "not used on the CPU") for name in ("triton", "tilelang")}
        ) as jit:
            completions, run = engine.generate_with_stats(PROMPTS, SamplingParams(max_new_tokens=48))
            for prompt, completion in zip(PROMPTS, completions, strict=True):
                console.print(f"\n[bold]{prompt}[/bold]{completion.text}", highlight=False)
            console.print("\nScoring the golden tokens through the same compiled pieces …")
            nll = evaluate.score(engine.runner, record["tokens"], window=record["window"]).nll
        found = jit.report()
    table = results(engine, cold, warm, run.tokens_per_second, nll, record["nll"])
    if hardware is not None:
        table.add_row("kernels compiled or loaded since", str(found.compilations + found.loads))
    console.print(table)
    if abs(nll - record["nll"]) > NLL_BOUND[device]:
        sys.exit(f"NLL must be within {NLL_BOUND[device]} of {record['nll']:.6f}, got {nll:.6f}")


if __name__ == "__main__":
    main()
