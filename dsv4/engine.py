"""The engine: loads a checkpoint, compiles the model in pieces, and serves prompts with continuous batching.

This is the only module of ``dsv4`` that imports the compile package: everything below it runs eagerly or traced alike.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from . import ops
from .caches import (
    TAIL_ROWS,
    ModelCaches,
    allocate_caches,
    copy_window_page,
    restore_tail_rows,
    ring_rows,
    tail_rows,
)
from .checkpoint import Checkpoint
from .completion import Completion, RunStats, Timings, TokenEvent
from .compile import CompiledModel, CompileReport, compile_model, mark_unbacked_sizes
from .config import ModelConfig
from .drafting import DraftRows, draft
from .engine_config import EngineConfig
from .inputs import Segment, StepInputs, check_token_ids
from .model import DeepseekV4
from .ops.shapes import WINDOW_PAGE_TOKENS
from .runner import Runner, Sequence as PlacedSequence
from .sampling import SamplingParams, sample
from .scheduler import Scheduler
from .step_plan import PlanEntry, Request, StepPlan
from .tokenizer import Tokenizer
from .weights import load_weights

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]


@dataclass
class _Snapshot:
    """What resuming after a reused prefix needs besides its pages."""

    tail: list[torch.Tensor]
    streams: torch.Tensor


@dataclass
class _Live:
    """Engine-side state of one request."""

    prompt_idx: int
    request: Request
    stream: object
    text: list[str] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0


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


_CACHE_FIELDS = ("window", "entries", "index_entries", "state", "index_state")


class Engine:
    """See the module's docstring; make one with :meth:`from_checkpoint`.

    Attributes:
        config: the model's config.
        settings: the engine's settings.
        runner: the model with its caches; ``dsv4.evaluate`` works on it while no prompt is being served.
        tokenizer: text and ids.
        timings: start-up seconds.
        compile_reports: by function (``step``, ``draft``); empty when ``compile`` is ``off``.
    """

    def __init__(
        self,
        config: ModelConfig,
        settings: EngineConfig,
        runner: Runner,
        tokenizer: Tokenizer | None,
        timings: Timings,
        compiled: dict[str, CompiledModel],
    ) -> None:
        self.config, self.settings, self.runner = config, settings, runner
        self.tokenizer, self.timings, self._compiled = tokenizer, timings, compiled
        self._streams: torch.Tensor | None = None
        self._first_row: dict[str, int] = {}
        self._scheduler = self._new_scheduler()
        self._num_requests = 0
        self._snapshot_end: dict[str, int] = {}

    @classmethod
    def from_checkpoint(cls, path: str | Path, settings: EngineConfig | None = None, *, progress: bool = True) -> "Engine":
        """Load, then compile.

        Args:
            path: checkpoint directory in the official layout; its tokenizer is used when there is one.
            settings: defaults are :class:`EngineConfig`'s.
            progress: show a progress bar on stderr while loading.

        Raises:
            ValueError: a checkpoint or setting that breaks a rule; nothing is left half-loaded.
        """
        settings = settings or EngineConfig()
        path = Path(path)
        config = ModelConfig.from_json(path)
        if settings.draft_tokens and not config.num_nextn_predict_layers:
            raise ValueError(
                f"draft_tokens must be 0 for a model without an MTP block, got {settings.draft_tokens}"
            )
        if settings.max_seq_len > config.max_position_embeddings:
            raise ValueError(
                f"max_seq_len must be at most max_position_embeddings {config.max_position_embeddings}, "
                f"got {settings.max_seq_len}"
            )
        tokenizer = Tokenizer.from_dir(path) if (path / "tokenizer.json").is_file() else None
        started, execution = time.perf_counter(), settings.execution
        weights = load_weights(
            Checkpoint.open(path), config, settings.numerics, dtype=execution.dtype, device=settings.device,
            progress=progress,
        )  # fmt: skip
        model = DeepseekV4(config, execution, weights, max_positions=settings.max_blocks * 256)
        loaded = time.perf_counter() - started
        logger.info("loaded %s in %.1f s", path, loaded)
        num_blocks = settings.num_blocks or settings.max_requests * settings.max_blocks
        caches = allocate_caches(
            config,
            execution,
            num_blocks=num_blocks,
            num_window_pages=_window_pages(settings, config, num_blocks),
            num_slots=settings.max_requests,
            storage=settings.storage,
            max_draft=settings.draft_tokens,
            device=settings.device,
        )
        logger.info("caches take %.2f GiB", caches.bytes() / 2**30)
        runner = Runner.eager(model, caches, settings.max_blocks)
        compiled = _compile(runner, settings) if settings.compile != "off" else {}
        reports = [c.report.seconds for c in compiled.values()]
        timings = Timings(
            load_seconds=loaded,
            trace_seconds=sum(s.trace for s in reports),
            compile_seconds=sum(s.compile for s in reports),
            piece_load_seconds=sum(s.load for s in reports),
        )
        return cls(config, settings, runner, tokenizer, timings, compiled)

    @property
    def compile_reports(self) -> dict[str, CompileReport]:
        return {name: compiled.report for name, compiled in self._compiled.items()}

    # ---- serving -----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        on_token: Callable[[TokenEvent], None] | None = None,
    ) -> list[Completion]:
        """Complete a batch of prompts; see :meth:`generate_with_stats`."""
        return self.generate_with_stats(prompts, params, on_token=on_token)[0]

    def generate_with_stats(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        on_token: Callable[[TokenEvent], None] | None = None,
    ) -> tuple[list[Completion], RunStats]:
        """Complete a batch of prompts.

        Args:
            prompts: texts (a beginning-of-sentence token is prepended unless spelled) or lists of token ids.
            params: for all prompts, or one per prompt.
            on_token: called for every committed token, in order.

        Returns:
            One completion per prompt, in order, and the totals. A refused prompt has ``error`` set; others are served.
        """
        stats = RunStats()
        done = list(self._serve(prompts, params, on_token or (lambda event: None), stats))
        return done[-1], stats

    def stream(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> Iterator[TokenEvent]:
        """Yield every token of a batch as it is committed. A refused prompt raises ``ValueError`` before any step."""
        events: list[TokenEvent] = []
        for completions in self._serve(prompts, params, events.append, RunStats()):
            errors = [c.error for c in completions if c.error]
            if errors:
                raise ValueError(errors[0])
            yield from events
            events.clear()

    def _serve(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        on_token: Callable[[TokenEvent], None],
        stats: RunStats,
    ) -> Iterator[list[Completion]]:
        """Run until all prompts are done; yields the completions so far after admission and after every step."""
        if isinstance(prompts, str):
            raise ValueError("prompts must be a list of prompts, got one string")
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"params must have one entry per prompt, {len(prompts)}, got {len(each)}")
        if self._scheduler.has_work:
            raise RuntimeError("an engine serves one batch at a time: finish or close the running stream first")
        results: list[Completion | None] = [None] * len(prompts)
        live: dict[str, _Live] = {}
        for index, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
            try:
                request = self._admit(prompt, own)
            except ValueError as error:
                results[index] = _refused(str(error))
                continue
            decoder = self.tokenizer.stream() if self.tokenizer is not None else None
            live[request.id] = _Live(index, request, decoder)
        yield [r for r in results if r is not None]
        started = time.perf_counter()
        try:
            while self._scheduler.has_work:
                self._step(live, on_token, stats)
                for state in list(live.values()):
                    if state.request.state == "finished":
                        results[state.prompt_idx] = self._completion(live.pop(state.request.id))
                stats.seconds = time.perf_counter() - started
                yield [r for r in results if r is not None]
        finally:
            if live:
                self._abandon([state.request for state in live.values()])

    def _abandon(self, requests: Sequence[Request]) -> None:
        """End the requests of a stream that was closed, or of a step that failed half-way."""
        try:
            for request in requests:
                self._scheduler.abort(request)
        except ValueError:  # rows of a failed step are uncommitted: nothing in the caches can be trusted
            self._scheduler = self._new_scheduler()

    def _admit(self, prompt: Prompt, params: SamplingParams) -> Request:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("a text prompt needs a tokenizer.json in the checkpoint directory, got none")
            if not prompt:
                raise ValueError("prompt must have at least 1 character, got an empty text")
            ids = self.tokenizer.encode(prompt)
            ids = ids if ids[:1] == [self.tokenizer.bos_id] else [self.tokenizer.bos_id, *ids]
        else:
            ids = list(prompt)
        check_token_ids(ids, self.config.vocab_size, "prompt")
        check_token_ids(params.stop_token_ids, self.config.vocab_size, "stop_token_ids")
        self._num_requests += 1
        request = Request(id=f"r{self._num_requests}", prompt_ids=ids, params=params.with_seed())
        self._scheduler.add(request)
        return request

    def _step(self, live: dict[str, _Live], on_token: Callable[[TokenEvent], None], stats: RunStats) -> None:
        plan = self._scheduler.schedule()
        carried = {entry.request.id: self._restore(entry) for entry in plan.entries}
        logits, self._streams = self.runner.run([_segment(entry) for entry in plan.entries])
        outcomes = self._outcomes(plan, logits)
        drafts = self._draft(plan, outcomes, carried, self._streams)
        row = 0
        for entry, (accepted, token), proposed in zip(plan.entries, outcomes, drafts, strict=True):
            request, state = entry.request, live[entry.request.id]
            self._first_row[request.id] = row - entry.start
            self._snapshot_end[request.id] = entry.start + len(entry.token_ids)
            before = len(request.generated)
            self._scheduler.commit(request, token, accepted)
            if proposed and request.decoding:
                self._scheduler.propose(request, proposed)
            state.drafted += entry.num_drafts
            state.accepted += accepted
            stats.drafted_tokens += entry.num_drafts
            stats.accepted_tokens += accepted
            stats.generated_tokens += len(request.generated) - before
            self._emit(state, request.generated[before:], on_token)
            row += len(entry.token_ids)
        stats.steps += 1
        stats.rows += row

    def _outcomes(self, plan: StepPlan, logits: torch.Tensor) -> list[tuple[int, int | None]]:
        """Per entry: how many drafts are right, and the token after the last right one (``None`` within a prompt)."""
        params = [entry.request.params for entry in plan.entries for _ in entry.logit_offsets]
        steps = [
            len(entry.request.generated) + index for entry in plan.entries for index in range(len(entry.logit_offsets))
        ]
        chosen = iter(sample(logits, params, steps).tolist())
        outcomes: list[tuple[int, int | None]] = []
        for entry in plan.entries:
            tokens = [next(chosen) for _ in entry.logit_offsets]
            drafted = entry.token_ids[len(entry.token_ids) - entry.num_drafts :]
            accepted = 0
            while accepted < entry.num_drafts and tokens[accepted] == drafted[accepted]:
                accepted += 1
            outcomes.append((accepted, tokens[accepted] if tokens else None))
        return outcomes

    def _draft(
        self,
        plan: StepPlan,
        outcomes: list[tuple[int, int | None]],
        carried: dict[str, torch.Tensor | None],
        streams: torch.Tensor,
    ) -> list[list[int]]:
        """Run the MTP block over the rows that this step is about to commit, while their pages are still held."""
        if not self.settings.draft_tokens:
            return [[] for _ in plan.entries]
        rows, first = [], 0
        for entry, (accepted, token) in zip(plan.entries, outcomes, strict=True):
            request = entry.request
            kept = len(entry.token_ids) - entry.num_drafts + accepted
            known = [*request.token_ids[: entry.start], *entry.token_ids[:kept]]
            after = token if token is not None else request.token_ids[len(known)]
            rows.append(
                DraftRows(
                    first_row=first,
                    start=entry.start,
                    next_tokens=[*known[entry.start + 1 :], after],
                    window_pages=request.window_page_ids,
                    blocks=request.block_ids,
                    state_slot=request.state_slot,
                    carried=carried[request.id],
                    carried_token=entry.token_ids[0],
                    num_drafts=self.settings.draft_tokens if token is not None else 0,
                )
            )
            first += len(entry.token_ids)
        return draft(self.runner, rows, streams)

    def _emit(self, state: _Live, tokens: Sequence[int], on_token: Callable[[TokenEvent], None]) -> None:
        request = state.request
        for index, token in enumerate(tokens):
            last = index == len(tokens) - 1 and request.state == "finished"
            text = state.stream.push([token]) if state.stream is not None else ""
            if last and state.stream is not None:
                text += state.stream.finish()
            state.text.append(text)
            reason = request.finish_reason if last else None
            on_token(TokenEvent(prompt_idx=state.prompt_idx, token_id=token, text=text, finish_reason=reason))

    def _completion(self, state: _Live) -> Completion:
        request = state.request
        return Completion(
            request_id=request.id,
            text="".join(state.text),
            token_ids=list(request.generated),
            finish_reason=request.finish_reason,
            prompt_tokens=len(request.prompt_ids),
            cached_tokens=request.cached_tokens,
            drafted_tokens=state.drafted,
            accepted_tokens=state.accepted,
            error=None,
        )

    # ---- prefix reuse ------------------------------------------------------------------------------------------------

    def _new_scheduler(self) -> Scheduler:
        s = self.settings
        caches = self.runner.caches
        return Scheduler(
            token_budget=s.token_budget,
            max_requests=s.max_requests,
            chunk_tokens=s.chunk_tokens,
            max_length=s.max_seq_len,
            num_blocks=s.num_blocks or s.max_requests * s.max_blocks,
            num_window_pages=caches.layers[0].window.shape[0],
            window=self.config.sliding_window,
            eos_token_id=self.config.eos_token_id,
            take_snapshot=self._take_snapshot if s.prefix_reuse else None,
            copy_page=(lambda a, b: copy_window_page(caches, a, b)) if s.draft_tokens else None,
        )

    def _take_snapshot(self, request: Request, num_tokens: int) -> _Snapshot | None:
        """Compressor tail rows and last streams at ``num_tokens``, if this step still holds them."""
        end = self._snapshot_end[request.id]
        if end - (num_tokens - TAIL_ROWS) > ring_rows(4, self.settings.draft_tokens):
            return None  # later rows of the same chunk have taken their place in the ring
        assert self._streams is not None
        row = self._first_row[request.id] + num_tokens - 1
        return _Snapshot(
            tail_rows(self.runner.caches, request.state_slot, num_tokens), self._streams[row].clone()
        )

    def _restore(self, entry: PlanEntry) -> torch.Tensor | None:
        """Load a reused prefix's tail into the request's state slot; returns the streams of its last row."""
        if entry.restore is None:
            return None
        snapshot = entry.restore
        assert isinstance(snapshot, _Snapshot)
        restore_tail_rows(self.runner.caches, entry.request.state_slot, entry.start, snapshot.tail)
        return snapshot.streams


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


def _refused(error: str) -> Completion:
    return Completion(
        request_id="", text="", token_ids=[], finish_reason=None, prompt_tokens=0, cached_tokens=0, drafted_tokens=0,
        accepted_tokens=0, error=error,
    )  # fmt: skip


def _window_pages(settings: EngineConfig, config: ModelConfig, num_blocks: int) -> int:
    """Pages for every running request's window and chunk, plus one per block that prefix reuse may keep."""
    span = config.sliding_window + max(settings.chunk_tokens, 1 + settings.draft_tokens)
    running = settings.max_requests * (-(-span // WINDOW_PAGE_TOKENS) + 2)
    return running + (num_blocks if settings.prefix_reuse else 0)


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
