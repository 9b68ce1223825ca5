"""Start-up of a loaded model: prewarm kernels, compile pieces, capture graphs, in this order.

This module, ``prewarming.py`` and ``inspection.py`` are the only ones of ``dsv4`` that import the compile and graphs
packages; everything else runs eagerly, traced or captured alike. On the CPU only the compile stage has work to do.
"""

import hashlib
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from . import ops
from .caches import ModelCaches
from .compile import CompiledModel, CompileReport, compile_model, mark_unbacked_sizes
from .engine_config import EngineConfig
from .graphs.buckets import Ladder
from .graphs.capture import CapturedStep, CaptureReport
from .graphs.device_graphs import CudaGraphs
from .graphs.prewarm import PrewarmReport
from .graphs.static_inputs import Extent, StaticInputs
from .inputs import StepInputs
from .prewarming import choose_backends, disarm, warm_kernels
from .runner import Runner, Sequence as PlacedSequence

logger = logging.getLogger(__name__)

_CACHE_FIELDS = ("window", "entries", "index_entries", "state", "index_state")
_ROWS, _REQUESTS = Extent("tokens"), Extent("requests")
_EXTENTS = {
    "token_ids": _ROWS,
    "positions": _ROWS,
    "row_requests": _ROWS,
    "window_slots": _ROWS,
    "query_starts": Extent("requests", 1),
    "seq_lens": _REQUESTS,
    "block_tables": _REQUESTS,
    "window_tables": _REQUESTS,
    "state_slots": _REQUESTS,
    "logit_rows": Extent("logits"),
}
_PADS: dict[str, int | str] = {
    "token_ids": -1,
    "positions": -1,
    "row_requests": -1,
    "window_slots": -1,
    "query_starts": "num_valid",
    "seq_lens": 0,
    "block_tables": -1,
    "window_tables": -1,
    "state_slots": -1,
    "logit_rows": 0,
}


@dataclass
class StartUp:
    """What start-up did.

    Attributes:
        seconds: per stage: ``prewarm``, ``compile``, ``capture``; a stage without work is absent.
        prewarm: report of the prewarm; ``None`` on the CPU, whose references have nothing to warm.
        compiled: by function (``step``, ``draft``).
        captured: the step that replays graphs; ``None`` without graphs.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    prewarm: PrewarmReport | None = None
    compiled: dict[str, CompiledModel] = field(default_factory=dict)
    captured: CapturedStep | None = None

    @property
    def compile_reports(self) -> dict[str, CompileReport]:
        return {name: compiled.report for name, compiled in self.compiled.items()}

    @property
    def capture_report(self) -> CaptureReport | None:
        return None if self.captured is None else self.captured.report


def start_up(runner: Runner, settings: EngineConfig) -> StartUp:
    """Run the stages for ``runner`` and install the step functions that they made."""
    started = StartUp()
    device = torch.device(settings.device)
    choose_backends(settings)
    if device.type == "cuda" and settings.prewarm:
        with _timed(started, "prewarm"):
            started.prewarm = warm_kernels(runner.model.config, settings)
    else:
        disarm(runner.model)  # the caller wants cold kernels to compile when they are first used
    if settings.compile != "off":
        with _timed(started, "compile"):
            started.compiled = _compile(runner, settings)
    if settings.graphs != "off":
        with _timed(started, "capture"):
            started.captured = _capture(runner, settings, started)
    return started


class _timed:
    def __init__(self, started: StartUp, stage: str) -> None:
        self.started, self.stage = started, stage

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.started.seconds[self.stage] = time.perf_counter() - self.began


# ---- compile ---------------------------------------------------------------------------------------------------------


def compile_salt() -> str:
    """Hash of everything a compiled piece depends on besides its graph and torch: op schemas and op sources."""
    digest = hashlib.sha256()
    for name, spec in sorted(ops.specs().items()):
        digest.update(f"{name}{spec.schema}".encode())
    for path in sorted(Path(ops.__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def mark_step_sizes(inputs: StepInputs, caches: ModelCaches) -> None:
    """Mark the sizes that vary between steps (rows, requests, logit rows) and between engines (cache pages)."""
    rows, requests = {0: "rows"}, {0: "requests"}
    mark_unbacked_sizes(
        inputs,
        {
            **dict.fromkeys(("token_ids", "positions", "row_requests", "window_slots"), rows),
            **dict.fromkeys(("seq_lens", "block_tables", "window_tables", "state_slots"), requests),
            "query_starts": 0,
            "logit_rows": 0,
        },
    )
    for layer in (*caches.layers, *caches.mtp):
        used = [n for n, t in zip(_CACHE_FIELDS, layer.tensors(), strict=True) if t.shape[0]]
        mark_unbacked_sizes(layer, {name: 0 for name in used})


def _compile(runner: Runner, settings: EngineConfig) -> dict[str, CompiledModel]:
    """Trace and compile the step function (and the draft function when drafting), and install them in ``runner``."""
    cuts = ops.boundary_ops() if settings.boundary_ops is None else settings.boundary_ops
    options = {
        "boundary_ops": cuts if settings.compile == "piecewise" else (),
        "mode": settings.compile,
        "cache_dir": Path(settings.compile_cache) if settings.compile_cache else None,
        "cache_salt": compile_salt(),
    }
    model, caches = runner.model, runner.caches
    sequence = PlacedSequence()
    inputs = runner.inputs([sequence.segment([0, 1, 2], (2,))], num_rows=4, num_requests=2)
    mark_step_sizes(inputs, caches)
    compiled = {"step": compile_model(model.forward_streams, **options)}
    compiled["step"].prepare(inputs, caches)
    runner.step = compiled["step"]
    if settings.draft_tokens:
        streams = model.embed_tokens(inputs.token_ids)
        mark_unbacked_sizes(_Streams(streams), {"streams": {0: "rows"}})
        compiled["draft"] = compile_model(model.forward_mtp, **options)
        compiled["draft"].prepare(inputs, caches, streams)
        runner.draft = compiled["draft"]
    for name, each in compiled.items():
        report = each.report
        logger.info(
            "%s: %d pieces, %d distinct, %d loaded from disk; trace %.1f s, compile %.1f s, load %.1f s",
            name, report.num_pieces, report.num_distinct_pieces, report.cache_hits,
            report.seconds.trace, report.seconds.compile, report.seconds.load,
        )  # fmt: skip
    return compiled


@dataclass
class _Streams:
    streams: torch.Tensor


# ---- capture ---------------------------------------------------------------------------------------------------------


def _capture(runner: Runner, settings: EngineConfig, started: StartUp) -> CapturedStep:
    """Capture the step function for a ladder of buckets and let ``runner`` replay it."""
    caches = runner.caches
    ladder = Ladder.build(
        settings.token_budget,
        max_requests=settings.max_requests,
        max_logits=settings.max_requests * (1 + settings.draft_tokens),
    )
    example = runner.inputs([PlacedSequence().segment([0, 1, 2], (2,))])
    step = started.compiled["step"] if "step" in started.compiled else runner.model.forward_streams
    captured = CapturedStep(
        step,
        StaticInputs(example, ladder, extents=_EXTENTS, pads=_PADS),
        ladder,
        CudaGraphs(settings.device),
        arguments=lambda inputs: (inputs, caches),
        trim=("logits", "tokens"),
        mode=settings.graphs,
        watch=lambda: (*caches.tensors(), *runner.model.buffers()),
    )

    def warm() -> None:
        if settings.prewarm:  # a no-op when the prewarm stage has run, which this enforces
            warm_kernels(runner.model.config, settings)

    captured.capture(warm)
    runner.step = lambda inputs, _caches: captured(inputs)
    return captured
