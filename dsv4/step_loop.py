"""The step loop: plan a step, run it, sample and verify, draft, commit. Token ids only; text is the engine's matter.

On a GPU a step waits for the device once, for its sampled tokens, and once more for its drafts when it drafts; a step
inside a prompt has neither and waits for nothing. Before it waits, the decode step that will follow is launched
(``ahead``), so that the device runs on. What the host does with tokens comes after the wait: commit, plan, text.

What a reused prefix needs besides its pages is a snapshot: the compressor rows of the last ratio-4 window, and the
streams of the last row, because the MTP block's row there depends on the token that follows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from .ahead import AheadStep, Outputs
from .caches import TAIL_ROWS, copy_window_page, restore_tail_rows, ring_rows, tail_rows
from .config import ModelConfig
from .drafting import DraftRows, draft
from .engine_config import EngineConfig
from .inputs import Segment
from .ops.shapes import BLOCK_TOKENS, WINDOW_PAGE_TOKENS
from .runner import Runner
from .sampling import sample
from .scheduler import Scheduler
from .step_plan import PlanEntry, Request, StepPlan
from .transfer import Download


@dataclass(frozen=True, kw_only=True)
class Advance:
    """What one step did for one request.

    Attributes:
        request: the request; finished when ``request.state`` says so.
        tokens: tokens committed to its output, in order; empty within its prompt.
        num_rows: rows it had in the step.
        num_drafts: drafts among them.
        num_accepted: drafts among ``tokens``.
    """

    request: Request
    tokens: Sequence[int]
    num_rows: int
    num_drafts: int
    num_accepted: int


@dataclass(frozen=True)
class _Snapshot:
    tail: list[torch.Tensor]
    streams: torch.Tensor


@dataclass(frozen=True)
class _Outcome:
    """Of an entry: how many drafts are right, and the token after the last right one (``None`` within a prompt)."""

    accepted: int
    token: int | None


def cache_pages(settings: EngineConfig, window: int) -> tuple[int, int]:
    """Entry blocks and window pages: enough for every running request, and a page per block that prefixes may keep."""
    num_blocks = settings.num_blocks or settings.max_requests * settings.max_blocks
    span = window + max(settings.chunk_tokens, 1 + settings.draft_tokens)
    running = settings.max_requests * (-(-span // WINDOW_PAGE_TOKENS) + 2)
    return num_blocks, running + (num_blocks if settings.prefix_reuse else 0)


class StepLoop:
    """Serves requests on a runner: ``add`` them, then ``step`` while ``has_work``.

    Args:
        runner: with caches of at least :func:`cache_pages`. Others may use it while there is no work; reusable
            prefixes are then dropped, because nobody knows which pages were written.
        config: the model's config.
        settings: the engine's settings.

    Attributes:
        launches_ahead: launch a decode step before the host knows the tokens of the one before: on a GPU, without
            drafts.
    """

    def __init__(self, runner: Runner, config: ModelConfig, settings: EngineConfig) -> None:
        self.runner, self.config, self.settings = runner, config, settings
        self.launches_ahead = runner.model.embed.device.type == "cuda" and not settings.draft_tokens
        self._streams = torch.empty(0)
        self._placed: dict[str, tuple[int, PlanEntry]] = {}  # of the step being committed, with first rows in _streams
        self.reset()

    def reset(self) -> None:
        """Forget every request and every reusable prefix."""
        s, caches = self.settings, self.runner.caches
        num_blocks, num_window_pages = cache_pages(s, self.config.sliding_window)
        self.scheduler = Scheduler(
            token_budget=s.token_budget,
            max_requests=s.max_requests,
            chunk_tokens=s.chunk_tokens,
            max_length=s.max_seq_len,
            num_blocks=num_blocks,
            num_window_pages=num_window_pages,
            window=self.config.sliding_window,
            eos_token_id=self.config.eos_token_id,
            take_snapshot=self._take_snapshot if s.prefix_reuse else None,
            copy_page=(lambda source, target: copy_window_page(caches, source, target)) if s.draft_tokens else None,
        )
        self._own_inputs, self._mid_step = self.runner.num_inputs, False
        self._ahead: AheadStep | None = None

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Queue a request; raises ``ValueError`` if it can never run."""
        if not self.has_work and self._own_inputs != self.runner.num_inputs:
            self.reset()
        self.scheduler.add(request)

    def abandon(self, requests: Iterable[Request]) -> None:
        """End unfinished requests before their time."""
        if self._mid_step:  # rows of a failed step are uncommitted: nothing in the caches can be trusted
            self.reset()
            return
        for request in requests:
            self.scheduler.abort(request)

    def step(self) -> list[Advance]:
        """Run one step and commit it; one entry per request that had rows."""
        if self._own_inputs != self.runner.num_inputs:
            raise RuntimeError("the runner must be left alone while prompts are being served, got a foreign step")
        self._mid_step = True
        plan = self.scheduler.schedule()
        carried = [self._restore(entry) for entry in plan.entries]
        segments = [_segment(entry) for entry in plan.entries]
        logits, self._streams = self._run(plan, segments)
        first_rows = accumulate((len(entry.token_ids) for entry in plan.entries), initial=0)
        self._placed = {entry.request.id: (row, entry) for row, entry in zip(first_rows, plan.entries)}
        ids = self._sample(plan, logits)
        sampled = Download(ids)
        if self.launches_ahead:
            launch = not self._needs_streams(plan)
            self._ahead = AheadStep.after(plan, ids, self.scheduler, self.runner, launch=launch)
        outcomes = self._outcomes(plan, sampled.wait().tolist())
        drafts = self._draft(plan, outcomes, carried)
        advances = [
            self._commit(entry, outcome, proposed)
            for entry, outcome, proposed in zip(plan.entries, outcomes, drafts, strict=True)
        ]
        self._own_inputs, self._mid_step = self.runner.num_inputs, False
        return advances

    def _run(self, plan: StepPlan, segments: Sequence[Segment]) -> Outputs:
        """Logits and streams of the plan: of the step launched ahead, if that was it."""
        ahead, self._ahead = self._ahead, None
        rows = None if ahead is None else ahead.rows_of(plan, segments)
        if ahead is None or rows is None:
            return self.runner.run(segments)
        outputs = ahead.outputs_of(rows)
        if outputs is not None:
            return outputs
        return self.runner.run(segments, ready=ahead.inputs if len(rows) == len(ahead.requests) else None)

    def _needs_streams(self, plan: StepPlan) -> bool:
        """Whether the plan's commit may take a snapshot: its streams must not have been overwritten by then."""
        ends = [(entry.start, entry.start + len(entry.token_ids)) for entry in plan.entries]
        return self.settings.prefix_reuse and any(start // BLOCK_TOKENS < end // BLOCK_TOKENS for start, end in ends)

    def _commit(self, entry: PlanEntry, outcome: _Outcome, proposed: Sequence[int]) -> Advance:
        request, before = entry.request, len(entry.request.generated)
        self.scheduler.commit(request, outcome.token, outcome.accepted)
        if proposed and request.decoding:
            self.scheduler.propose(request, proposed)
        tokens = tuple(request.generated[before:])
        return Advance(
            request=request,
            tokens=tokens,
            num_rows=len(entry.token_ids),
            num_drafts=entry.num_drafts,
            num_accepted=min(outcome.accepted, len(tokens)),  # a right draft after the output's end is not in it
        )

    def _sample(self, plan: StepPlan, logits: torch.Tensor) -> torch.Tensor:
        params = [entry.request.params for entry in plan.entries for _ in entry.logit_offsets]
        steps = [len(entry.request.generated) + n for entry in plan.entries for n in range(len(entry.logit_offsets))]
        return sample(logits, params, steps)

    def _outcomes(self, plan: StepPlan, sampled: Sequence[int]) -> list[_Outcome]:
        chosen = iter(sampled)
        outcomes = []
        for entry in plan.entries:
            tokens = [next(chosen) for _ in entry.logit_offsets]
            drafts = entry.token_ids[len(entry.token_ids) - entry.num_drafts :]
            accepted = 0
            while accepted < entry.num_drafts and tokens[accepted] == drafts[accepted]:
                accepted += 1
            outcomes.append(_Outcome(accepted, tokens[accepted] if tokens else None))
        return outcomes

    def _draft(
        self, plan: StepPlan, outcomes: Sequence[_Outcome], carried: Sequence[torch.Tensor | None]
    ) -> list[list[int]]:
        """Run the MTP block over the rows that this step is about to commit, while their pages are still held."""
        if not self.settings.draft_tokens:
            return [[] for _ in plan.entries]
        rows = []
        for entry, outcome, streams in zip(plan.entries, outcomes, carried, strict=True):
            request = entry.request
            kept = entry.token_ids[: len(entry.token_ids) - entry.num_drafts + outcome.accepted]
            after = request.token_ids[entry.start + len(kept)] if outcome.token is None else outcome.token
            rows.append(
                DraftRows(
                    first_row=self._placed[request.id][0],
                    start=entry.start,
                    next_tokens=[*kept[1:], after],
                    window_pages=request.window_page_ids,
                    blocks=request.block_ids,
                    state_slot=request.state_slot,
                    carried=streams,
                    carried_token=entry.token_ids[0],
                    num_drafts=0 if outcome.token is None else self.settings.draft_tokens,
                )
            )
        return draft(self.runner, rows, self._streams)

    def _take_snapshot(self, request: Request, num_tokens: int) -> _Snapshot | None:
        """Compressor tail and last streams at ``num_tokens``, a position of the step being committed."""
        first_row, entry = self._placed[request.id]
        assert self._ahead is None or self._ahead.outputs is None, "a step launched meanwhile took the streams"
        end = entry.start + len(entry.token_ids)
        if end - (num_tokens - TAIL_ROWS) > ring_rows(4, self.settings.draft_tokens):
            return None  # later rows of the step have taken their place in the ring
        tail = tail_rows(self.runner.caches, request.state_slot, num_tokens)
        return _Snapshot(tail, self._streams[first_row + num_tokens - 1 - entry.start].clone())

    def _restore(self, entry: PlanEntry) -> torch.Tensor | None:
        """Load a reused prefix's tail into the request's state slot; returns the streams of its last row."""
        if entry.restore is None:
            return None
        assert isinstance(entry.restore, _Snapshot)
        restore_tail_rows(self.runner.caches, entry.request.state_slot, entry.start, entry.restore.tail)
        return entry.restore.streams


def _segment(entry: PlanEntry) -> Segment:
    request = entry.request
    return Segment(
        token_ids=entry.token_ids,
        start=entry.start,
        blocks=request.block_ids,
        window_pages=request.window_page_ids,
        state_slot=request.state_slot,
        logit_offsets=entry.logit_offsets,
    )
