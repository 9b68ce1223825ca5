"""The decode step after the one that runs, launched before the host knows the tokens of this one.

Of a decode step only the tokens depend on what the step before samples, and they are on the device already; positions,
pages and slots follow from the plan. So when every request that goes on will decode one row, the next step is built and
launched before the host waits for the tokens: the device never waits for the host.

A request may turn out to have ended (a stop token). Its row was computed for nothing, into pages that it held alone and
behind everything that was committed, like the row of a rejected draft; the rows of the others are taken. Any other
change of plan (a new request, a new page) drops the launched step. The rows that are then computed again have the same
tokens, positions and pages, so they write what is there already. Expert loads count every row computed, these too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .inputs import Segment, StepInputs
from .ops.shapes import BLOCK_TOKENS, WINDOW_PAGE_TOKENS
from .runner import Runner
from .scheduler import Scheduler
from .step_plan import PlanEntry, Request, StepPlan
from .transfer import upload

_ANY_TOKEN = 0  # of a row whose token the host does not know yet
Outputs = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class AheadStep:
    """A decode step of one row of each of ``requests``.

    Attributes:
        requests, segments: in order of the rows; the tokens of the segments mean nothing.
        inputs: complete, with the tokens.
        outputs: logits and streams of the rows, or ``None`` if the step was built and not launched.
    """

    requests: Sequence[Request]
    segments: Sequence[Segment]
    inputs: StepInputs
    outputs: Outputs | None

    @classmethod
    def after(
        cls, plan: StepPlan, tokens: torch.Tensor, scheduler: Scheduler, runner: Runner, *, launch: bool
    ) -> "AheadStep | None":
        """What probably follows ``plan``, which is running; ``None`` if that is no plain decode step.

        Args:
            tokens: int64 on the device, what the plan's logit rows sample, in order.
            launch: whether to launch the step; its outputs may take the place of those of the running step.
        """
        ends = {entry.request.id: _decodes_from(entry) for entry in plan.entries}
        ending = any(map(_ends_now, scheduler.running))
        admits = scheduler.waiting and (ending or len(scheduler.running) < scheduler.max_requests)
        if admits or None in ends.values() or any(request.id not in ends for request in scheduler.running):
            return None
        going_on = [request for request in scheduler.running if not _ends_now(request)]
        segments = [_segment(request, ends[request.id] or 0) for request in going_on]
        if not segments or any(s is None for s in segments):
            return None
        known = [s for s in segments if s is not None]
        inputs = runner.inputs(known)
        sampled = {request_id: row for row, request_id in enumerate(ends)}  # an entry has one logit row
        rows = [sampled[request.id] for request in going_on]
        inputs.token_ids.copy_(_rows(tokens, rows), non_blocking=True)
        return cls(going_on, known, inputs, runner.run(known, ready=inputs) if launch else None)

    def rows_of(self, plan: StepPlan, segments: Sequence[Segment]) -> list[int] | None:
        """Which rows are those of ``plan``, whose segments are given, or ``None`` if it has others."""
        places = {id(request): row for row, request in enumerate(self.requests)}
        rows = [places.get(id(entry.request)) for entry in plan.entries]
        known = [row for row in rows if row is not None]
        if len(known) < len(rows) or not all(_same_row(self.segments[r], s) for r, s in zip(known, segments)):
            return None
        return known

    def outputs_of(self, rows: Sequence[int]) -> Outputs | None:
        """What the step, if it was launched, has found for these rows."""
        if self.outputs is None:
            return None
        logits, streams = self.outputs
        return _rows(logits, rows), _rows(streams, rows)


def _rows(tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    if list(rows) == list(range(len(tensor))):
        return tensor
    return tensor.index_select(0, upload(rows, torch.int64, tensor.device))


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


def _same_row(ahead: Segment, planned: Segment) -> bool:
    """Neither a window page released meanwhile (−1), which lies before the row's window, nor a page added behind the
    row's own makes a difference."""
    return (
        len(planned.token_ids) == 1
        and (ahead.start, ahead.state_slot) == (planned.start, planned.state_slot)
        and tuple(planned.logit_offsets) == ahead.logit_offsets
        and tuple(planned.blocks[: len(ahead.blocks)]) == ahead.blocks
        and len(planned.window_pages) >= len(ahead.window_pages)
        and all(now in (page, -1) for page, now in zip(ahead.window_pages, planned.window_pages))
    )
