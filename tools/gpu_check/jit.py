"""Nothing compiles and nothing is loaded from disk once an engine is ready: row counts, widths, graph modes."""

from typing import Any

import torch

from dsv4.engine import Engine
from dsv4.graphs.deep_gemm_cache import counter
from dsv4.graphs.jit_monitor import JitMonitor
from dsv4.inputs import StepInputs
from dsv4.ops._jit_libraries import jit_libraries
from dsv4.runner import Sequence

from .common import Record, random_tokens
from .models import random_engine, settings_of, wide_config
from .place import Place
from .points import DECODE_ROWS, MAX_ROWS, SWEEP_ROWS

RATIOS = {"flash": (0, 4, 128), "pro": (128, 4)}  # every layer kind that the width has


def sweep(place: Place, record: Record, run: str) -> None:
    """``run``: ``width.mode.backend``.

    Counted is what this process compiles and loads: Triton, TileLang and Inductor through hooks, DeepGEMM by what
    appears in its cache directory, which other processes of the run therefore do not share.
    """
    width, mode, backend = run.split(".")
    ratios = RATIOS[width]
    with record.block("zero_compilations", "zero_loads") as (compilations, loads):
        counters = {}
        if backend == "libraries" and not place.dry:
            counters["deep_gemm"] = counter(place.own_deep_gemm_cache(run))
        config = wide_config(width, place, layers=len(ratios), ratios=ratios, experts=8)
        budget = 128 if place.dry else MAX_ROWS
        settings = settings_of(
            place, mode, backend, numerics="official", max_seq_len=budget + 256, max_requests=max(DECODE_ROWS),
            num_blocks=300, token_budget=budget, cache_storage="fp8", prefix_reuse=False, draft_tokens=1,
            # DeepGEMM's grouped products too
            expert_weights="fp8" if (width, backend) == ("flash", "libraries") else "fp4",
        )  # fmt: skip
        engine = random_engine(place, config, settings, mode)
        with JitMonitor(libraries=jit_libraries(), counters=counters) as monitor:
            counts = _Counts(monitor, compilations.setdefault(run, {}), loads.setdefault(run, {}))
            for rows in SWEEP_ROWS:
                if rows <= budget:
                    _prefill(engine, rows, counts)
            for rows in DECODE_ROWS:
                made = [Sequence(i, 2 * i, i).segment([7 + i], (0,), start=200) for i in range(rows)]
                _run(engine, engine.runner.inputs(made))
                counts.note("decode", rows)
        with record.profiling():
            _prefill(engine, 33, _Counts(None, {}, {}))


class _Counts:
    """What was compiled and loaded since the last note."""

    def __init__(self, monitor: JitMonitor | None, compilations: dict[str, Any], loads: dict[str, Any]) -> None:
        self.monitor, self.found = monitor, (compilations, loads)
        self.known = self._read()

    def _read(self) -> tuple[int, int]:
        if self.monitor is None:
            return 0, 0
        report = self.monitor.report()
        return report.compilations, report.loads

    def note(self, kind: str, rows: int) -> None:
        now = self._read()
        for found, before, after in zip(self.found, self.known, now, strict=True):
            found.setdefault(kind, {})[str(rows)] = after - before
        self.known = now


def _prefill(engine: Engine, rows: int, counts: "_Counts") -> None:
    """One prompt through graphs, through the draft, and eagerly without pads."""
    runner = engine.runner
    inputs = runner.inputs([Sequence().segment(random_tokens(rows, rows), (rows - 1,))])
    streams = _run(engine, inputs)
    counts.note("prefill", rows)
    with torch.no_grad():
        runner.draft(inputs, runner.caches, streams)
        counts.note("draft", rows)
        runner.model.forward_streams(inputs, runner.caches)
        runner.model.forward_mtp(inputs, runner.caches, streams)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    counts.note("unpadded", rows)


@torch.no_grad()
def _run(engine: Engine, inputs: StepInputs) -> torch.Tensor:
    runner = engine.runner
    _, streams = runner.step(inputs, runner.caches)
    step = engine.started.captured.get("step")
    if step is not None and step.last_path.bucket is None:
        raise RuntimeError(f"a step of {step.last_path.sizes} must be replayed, got {step.last_path.reason}")
    return streams.clone()
