"""Inputs of a decode step, built while the device still runs the step before.

Of a decode step only the tokens depend on what the step before samples; positions, pages and slots do not. So when
every request that goes on will decode one row, the next step's inputs are built and copied before the host waits for
the tokens. They are a pure function of segments: if the plan then turns out to be another one (a request ended, a page
was added or left the window), they do not match it and are dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .inputs import Segment, StepInputs
from .ops.shapes import BLOCK_TOKENS, WINDOW_PAGE_TOKENS
from .runner import Runner
from .scheduler import Scheduler
from .step_plan import PlanEntry, Request, StepPlan
from .transfer import upload

_ANY_TOKEN = 0  # of a row whose token is not known yet


@dataclass(frozen=True)
class AheadInputs:
    """Inputs of a step of ``segments``, whose tokens are still to come."""

    segments: Sequence[Segment]
    inputs: StepInputs

    @classmethod
    def after(cls, plan: StepPlan, scheduler: Scheduler, runner: Runner) -> "AheadInputs | None":
        """What probably follows ``plan``, which is running; ``None`` if that is no plain decode step."""
        ends = {entry.request.id: _decodes_from(entry) for entry in plan.entries}
        admits = scheduler.waiting and len(scheduler.running) < scheduler.max_requests
        if admits or None in ends.values() or any(request.id not in ends for request in scheduler.running):
            return None
        going_on = [request for request in scheduler.running if not _ends_now(request)]
        segments = [_segment(request, ends[request.id] or 0) for request in going_on]
        if not segments or any(s is None for s in segments):
            return None
        known = [s for s in segments if s is not None]
        return cls(known, runner.inputs(known))

    def for_segments(self, segments: Sequence[Segment]) -> StepInputs | None:
        """The inputs of ``segments``, or ``None`` if these differ in more than their tokens."""
        if len(segments) != len(self.segments) or not all(map(_same_rows, segments, self.segments)):
            return None
        ids = [segment.token_ids[0] for segment in segments]
        tokens = self.inputs.token_ids
        return replace(self.inputs, token_ids=upload(ids, torch.int64, tokens.device))


def _decodes_from(entry: PlanEntry) -> int | None:
    """First position after the entry's rows, if its request will decode a single row from there."""
    plain = len(entry.logit_offsets) == 1 and not entry.num_drafts
    return entry.start + len(entry.token_ids) if plain else None


def _ends_now(request: Request) -> bool:
    return len(request.generated) + 1 >= request.params.max_new_tokens


def _segment(request: Request, start: int) -> Segment | None:
    """The row at ``start``, if the request has its pages already."""
    segment = Segment(
        token_ids=(_ANY_TOKEN,),
        start=start,
        blocks=tuple(request.block_ids),
        window_pages=tuple(request.window_page_ids),
        state_slot=request.state_slot,
        logit_offsets=(0,),
    )
    covered = start < len(segment.blocks) * BLOCK_TOKENS and start < len(segment.window_pages) * WINDOW_PAGE_TOKENS
    return segment if covered else None


def _same_rows(one: Segment, two: Segment) -> bool:
    return (
        len(one.token_ids) == len(two.token_ids)
        and (one.start, one.state_slot, tuple(one.logit_offsets)) == (two.start, two.state_slot, two.logit_offsets)
        and tuple(one.blocks) == two.blocks
        and tuple(one.window_pages) == two.window_pages
    )
