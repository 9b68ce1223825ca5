"""The capture stage of start-up: step and draft functions as graphs, each with static inputs, a ladder and a pool.

Two pools, because the step's streams must survive the draft steps that read them, and the reverse.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .caches import ModelCaches
from .engine_config import EngineConfig
from .graphs.buckets import Ladder
from .graphs.capture import CapturedStep
from .graphs.pieces import CaptureMemoryError
from .graphs.static_inputs import Extent, StaticInputs
from .hardware import Hardware
from .inputs import StepInputs
from .prewarm_progress import ItemProgress
from .runner import Runner, Sequence as PlacedSequence

logger = logging.getLogger(__name__)

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
class DraftInputs:
    """Everything a draft step reads besides weights and caches; ``streams`` is ``[T, M, D]``, zeros in pad rows."""

    step: StepInputs
    streams: torch.Tensor


def step_ladder(settings: EngineConfig) -> Ladder:
    """Buckets of steps: up to the token budget, every draft of every request verified."""
    most_logits = settings.max_requests * (1 + settings.draft_tokens)
    return Ladder.build(settings.token_budget, max_requests=settings.max_requests, max_logits=most_logits)


def draft_ladder(settings: EngineConfig) -> Ladder:
    """Buckets of draft steps: the rows of a step, and one more per request that resumes a reused prefix."""
    return Ladder.build(settings.max_rows, max_requests=settings.max_requests)


def captured_steps(runner: Runner, settings: EngineConfig, hardware: Hardware) -> dict[str, CapturedStep]:
    """The functions of ``runner`` with their static inputs, ready to be warmed and captured.

    They read the caches that ``runner`` has at the time, so that a trial can run on small ones.
    """
    example = runner.inputs([PlacedSequence().segment([0, 1, 2], (2,))])
    mode = "auto" if hardware.graph_mode == "off" else hardware.graph_mode
    options = {
        "mode": mode,
        "debug": settings.debug_graphs,
        "watch": lambda: (*runner.caches.tensors(), *runner.model.buffers()),
    }
    ladder = step_ladder(settings)
    steps = {
        "step": CapturedStep(
            runner.step,
            StaticInputs(example, ladder, extents=_EXTENTS, pads=_PADS),
            ladder,
            hardware.graphs(),
            arguments=lambda inputs: (inputs, runner.caches),
            trim=("logits", "tokens"),
            **options,
        )
    }
    if settings.draft_tokens:
        ladder = draft_ladder(settings)
        inputs = StaticInputs(
            DraftInputs(example, runner.empty_streams(len(example.token_ids))),
            ladder,
            extents={f"step.{name}": extent for name, extent in _EXTENTS.items()} | {"streams": _ROWS},
            pads={f"step.{n}": f"step.{p}" if isinstance(p, str) else p for n, p in _PADS.items()} | {"streams": 0},
        )
        steps["draft"] = CapturedStep(
            runner.draft,
            inputs,
            ladder,
            hardware.graphs(),
            arguments=lambda inputs: (inputs.step, runner.caches, inputs.streams),
            trim=("logits", "tokens"),
            **options,
        )
    return steps


@dataclass(frozen=True)
class _BucketDone:
    """An :class:`ItemProgress`."""

    key: str
    num_done: int
    num_keys: int
    seconds: float
    state: str = "done"


def capture_all(
    steps: dict[str, CapturedStep], prewarm: Callable[[], object], show: Callable[[ItemProgress], None]
) -> None:
    """Capture every bucket of every function; ``show`` is called after each.

    Raises:
        CaptureError: one of them could not be captured; no graph is left.
    """
    num_buckets, done = sum(len(step.ladder.buckets) for step in steps.values()), 0
    try:
        for name, step in steps.items():

            def progress(stats, name: str = name) -> None:
                nonlocal done
                done += 1
                show(_BucketDone(f"{name}: {stats.bucket}, {stats.mode}", done, num_buckets, stats.seconds))

            step.capture(prewarm, progress)
    except BaseException:
        for step in steps.values():
            step.close()
        raise


def install(runner: Runner, steps: dict[str, CapturedStep], failure: CaptureMemoryError | None) -> None:
    """Let ``runner`` replay ``steps`` on its present caches or, after a ``failure``, run them eagerly."""
    caches = runner.caches

    def run(step: CapturedStep, inputs: StepInputs | DraftInputs, given: ModelCaches):
        if given is not caches:
            raise ValueError("caches of a captured step must be those of the capture, got others")
        return step(inputs) if failure is None else step.eager(inputs, f"capture failed: {failure}")

    runner.step = lambda inputs, given: run(steps["step"], inputs, given)
    if "draft" in steps:
        runner.draft = lambda inputs, given, streams: run(steps["draft"], DraftInputs(inputs, streams), given)
