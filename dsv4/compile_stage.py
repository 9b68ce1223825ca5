"""The compile stage of start-up: trace the step and draft functions, compile their pieces or load them from disk.

Nothing of the model runs here, so no collective does either.
"""

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from . import ops
from .caches import ModelCaches
from .compile import CompiledModel, compile_model, mark_unbacked_sizes
from .compile.cache import require_usable
from .engine_config import EngineConfig
from .inputs import StepInputs
from .runner import Runner, Sequence as PlacedSequence

logger = logging.getLogger(__name__)

_CACHE_FIELDS = ("window", "entries", "index_entries", "state", "index_state")


def check_compile_cache(settings: EngineConfig) -> None:
    """Raise ``ValueError`` if pieces could not be kept where they should be: before weights are loaded for minutes."""
    if settings.compile != "off" and settings.compile_cache is not None:
        require_usable(Path(settings.compile_cache))


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


def compile_functions(runner: Runner, settings: EngineConfig) -> dict[str, CompiledModel]:
    """Trace and compile the step function (and the draft function when drafting), and install them in ``runner``.

    The caches of ``runner`` only lend their types: caches of other sizes may take their place afterwards.
    """
    cuts = ops.boundary_ops() if settings.boundary_ops is None else settings.boundary_ops
    options = {
        "boundary_ops": cuts if settings.compile == "piecewise" else (),
        "mode": settings.compile,
        "cache_dir": Path(settings.compile_cache) if settings.compile_cache else None,
        "cache_salt": compile_salt(),
    }
    model, caches = runner.model, runner.caches
    inputs = runner.inputs([PlacedSequence().segment([0, 1, 2], (2,))], num_rows=4, num_requests=2)
    mark_step_sizes(inputs, caches)
    compiled = {"step": compile_model(model.forward_streams, **options)}
    compiled["step"].prepare(inputs, caches)
    runner.step = compiled["step"]
    if settings.draft_tokens:
        streams = runner.empty_streams(len(inputs.token_ids))
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
