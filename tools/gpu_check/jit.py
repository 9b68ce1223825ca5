"""Nothing compiles and nothing is loaded from disk once an engine is ready: row counts, widths, graph modes."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from dsv4.compile import jit_events
from dsv4.engine import Engine
from dsv4.graphs.deep_gemm_cache import counter
from dsv4.graphs.jit_monitor import JitMonitor, JitReport, KeyCounts
from dsv4.inputs import Segment
from dsv4.ops import shapes
from dsv4.ops._jit_libraries import jit_libraries
from dsv4.runner import Sequence

from .common import Record, random_tokens
from .models import random_engine, settings_of, wide_config
from .place import Place
from .runs import MAX_REQUESTS, MAX_ROWS, SWEEP_ROWS

RATIOS = {"flash": (0, 4, 128), "pro": (128, 4)}  # every layer kind that the width has
FEW_EXPERTS = 8
HISTORY = 200
DRAFT_TOKENS = 1


def sweep(place: Place, record: Record, run: str) -> None:
    """``run``: ``width.mode.backend``. Steps through graphs, drafts after them, and the same eagerly without pads.

    Counted is what this process compiles and loads, by library and key: Triton and TileLang through their hooks,
    Inductor (the pieces of ``piecewise``, from the compile cache or not) by the methods that :func:`jit_events` wraps,
    DeepGEMM by what appears in its cache directory, which other processes of the run therefore do not share. The same
    monitor must have seen start-up compile or load something of every library that serves the run.

    How many pairs an expert has decides on tiles, so engines of full graphs have as many experts as the model of that
    width, those of piecewise graphs few.
    """
    width, mode, backend = run.split(".")
    ratios = RATIOS[width]
    with record.block("zero_compilations", "zero_loads") as (compilations, loads):
        counters: dict[str, Callable[[], Mapping[str, KeyCounts]]] = {"inductor": _inductor}
        if backend == "libraries" and not place.dry:
            counters["deep_gemm"] = counter(place.own_deep_gemm_cache(run))
        experts = getattr(shapes, width).num_experts if mode == "full" else FEW_EXPERTS
        config = wide_config(width, place, layers=len(ratios), ratios=ratios, experts=experts)
        budget = 128 if place.dry else MAX_ROWS
        settings = settings_of(
            place, mode, backend, numerics="official", max_seq_len=budget + 256, max_requests=MAX_REQUESTS,
            num_blocks=300, token_budget=budget, cache_storage="fp8", prefix_reuse=False, draft_tokens=DRAFT_TOKENS,
            # DeepGEMM's grouped products too
            expert_weights="fp8" if (width, backend) == ("flash", "libraries") else "fp4",
        )  # fmt: skip
        with JitMonitor(libraries=jit_libraries(), counters=counters) as start_up:
            engine = random_engine(place, config, settings, mode, share_experts=True)
        if not place.dry:
            serving = {"triton", *(["inductor"] if mode == "piecewise" else ["tilelang"][: backend == "libraries"])}
            _require_seen(start_up.report(), serving)
        steps = _Steps(engine, "full" if place.dry else mode)
        with JitMonitor(libraries=jit_libraries(), counters=counters) as monitor:
            counts = _Counts(monitor, compilations.setdefault(run, {}), loads.setdefault(run, {}))
            for kind, sizes in SWEEP_ROWS.items():
                for rows in (rows for rows in sizes if rows <= budget):
                    steps.run(kind, rows, counts.note)
        report = monitor.report()
        for library in report.libraries:
            compilations[run].setdefault("by_library", {})[library] = report.total(library).compilations
            loads[run].setdefault("by_library", {})[library] = report.total(library).loads
        details = record.samples.setdefault("jit_details", {}).setdefault(run, {})
        details["start_up"] = {name: vars(start_up.report().total(name)) for name in start_up.report().libraries}
        details["keys"] = {name: sorted(keys) for name, keys in report.libraries.items()}
        with record.profiling():
            steps.run("prefill", 33, lambda kind, rows: None)


def _inductor() -> dict[str, KeyCounts]:
    return {key: KeyCounts(*events) for key, events in jit_events().items()}


def _require_seen(report: JitReport, libraries: set[str]) -> None:
    """A monitor that saw nothing of start-up would see nothing afterwards either."""
    for name in sorted(libraries):
        seen = report.total(name)
        if not seen.compilations + seen.loads:
            raise RuntimeError(
                f"start-up must compile or load kernels of {name} that are counted, got {report.libraries}"
            )


class _Counts:
    """What was compiled and loaded since the last note."""

    def __init__(self, monitor: JitMonitor, compilations: dict[str, Any], loads: dict[str, Any]) -> None:
        self.monitor, self.found, self.known = monitor, (compilations, loads), (0, 0)

    def note(self, kind: str, rows: int) -> None:
        report = self.monitor.report()
        now = report.compilations, report.loads
        for found, before, after in zip(self.found, self.known, now, strict=True):
            found.setdefault(kind, {})[str(rows)] = after - before
        self.known = now


class _Steps:
    """Steps of a ready engine whose graphs are of ``mode``."""

    def __init__(self, engine: Engine, mode: str) -> None:
        self.engine, self.mode = engine, mode

    @torch.no_grad()
    def run(self, kind: str, rows: int, note: Callable[[str, int], None]) -> None:
        """A step of ``kind`` and a draft after it through graphs, then both eagerly; ``note`` is called after each."""
        runner = self.engine.runner
        step = runner.inputs(_segments(kind, rows))
        streams = runner.step(step, runner.caches)[1].clone()
        self._require_replay("step")
        note(kind, rows)
        draft = replace(step, logit_rows=step.query_starts[1:].long() - 1)  # one token per request
        runner.draft(draft, runner.caches, streams)
        self._require_replay("draft")
        note(f"draft of {kind}", rows)
        runner.model.forward_streams(step, runner.caches)
        runner.model.forward_mtp(draft, runner.caches, streams)
        if streams.is_cuda:
            torch.cuda.synchronize()
        note(f"unpadded {kind}", rows)

    def _require_replay(self, function: str) -> None:
        captured = self.engine.started.captured
        if captured and (path := captured[function].last_path).kind != self.mode:
            raise RuntimeError(f"a {function} of {path.sizes} must be replayed, got {path.kind}: {path.reason}")


def _segments(kind: str, rows: int) -> list[Segment]:
    """Every request has pages of its own; all but a prompt have ``HISTORY`` tokens behind them."""
    if kind == "prefill":
        return [Sequence().segment(random_tokens(rows, rows), (rows - 1,))]
    each = 1 + DRAFT_TOKENS if kind == "verify" else 1
    decoding = rows // each if kind != "mixed" else min(rows // 2, MAX_REQUESTS - 1)
    made = [Sequence(i, 2 * i, i).segment(random_tokens(each, i), range(each), start=HISTORY) for i in range(decoding)]
    chunk = rows - each * decoding
    if chunk:
        sequence = Sequence(decoding, 2 * decoding, decoding)
        made.append(sequence.segment(random_tokens(chunk, rows), (chunk - 1,), start=HISTORY))
    return made
