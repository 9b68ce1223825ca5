"""The engine: loads a checkpoint, starts the model up, and serves prompts with continuous batching.

An engine is a context manager; its end frees graphs and caches. Several may live in one process, each with a share of
the device's memory (``gpu_memory_utilization`` or ``num_blocks``).
"""

import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .cache_sizing import check_host_memory
from .checkpoint import Checkpoint
from .completion import Completion, RunStats, Timings, TokenEvent
from .config import ModelConfig
from .engine_config import EngineConfig
from .inputs import check_token_ids
from .model import DeepseekV4
from .ops.shapes import BLOCK_TOKENS
from .prewarming import warm_loaded
from .prompts import Prompt, encode_prompt
from .rehearsal import rehearse
from .runner import Runner
from .sampling import SamplingParams
from .start_up import CompileReport, StartUp, check_settings, start_ranks, start_up
from .step_loop import StepLoop
from .step_plan import Request
from .tokenizer import StreamDecoder, Tokenizer
from .weights import load_weights

logger = logging.getLogger(__name__)


@dataclass
class _Live:
    """Engine-side state of one request."""

    prompt_idx: int
    request: Request
    stream: StreamDecoder | None
    text: list[str] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0

    def events(self, tokens: Sequence[int]) -> Iterator[TokenEvent]:
        """Events of newly committed tokens; the last token of a finished request also brings the rest of its text."""
        for number, token in enumerate(tokens, start=1):
            ends = number == len(tokens) and self.request.state == "finished"
            text = self.stream.push([token]) if self.stream is not None else ""
            if ends and self.stream is not None:
                text += self.stream.finish()
            self.text.append(text)
            reason = self.request.finish_reason if ends else None
            yield TokenEvent(prompt_idx=self.prompt_idx, token_id=token, text=text, finish_reason=reason)


@dataclass
class _Batch:
    """A checked batch: what can be served by request id, and the other prompts by index."""

    live: dict[str, _Live] = field(default_factory=dict)
    refused: dict[int, Completion] = field(default_factory=dict)


class Engine:
    """See the module's docstring; make one with :meth:`from_checkpoint` or :meth:`from_model`.

    Attributes:
        config: the model's config.
        settings: the engine's settings, with the number of cache blocks that start-up decided on.
        runner: the model with its caches; ``dsv4.evaluate`` works on it while no prompt is being served, at the cost of
            the prefixes that could have been reused.
        tokenizer: text and ids; ``None`` for a checkpoint without one.
        timings: start-up seconds.
        started: what start-up compiled, warmed and captured.
        loop: the step loop, which owns the scheduler.
    """

    def __init__(
        self,
        config: ModelConfig,
        settings: EngineConfig,
        runner: Runner,
        tokenizer: Tokenizer | None,
        timings: Timings,
        started: StartUp,
    ) -> None:
        self.config, self.settings, self.runner = config, settings, runner
        self.tokenizer, self.timings, self.started = tokenizer, timings, started
        self.loop = StepLoop(runner, config, settings)
        self._num_requests, self._closed = 0, False

    @classmethod
    def from_checkpoint(
        cls, path: str | Path, settings: EngineConfig | None = None, *, progress: bool = True
    ) -> "Engine":
        """Load, then start up; see ``dsv4.start_up``.

        Args:
            path: checkpoint directory in the official layout; its tokenizer is used when there is one.
            settings: defaults are :class:`EngineConfig`'s.
            progress: show progress on stderr: loading, prewarm and capture.

        Raises:
            ValueError: a checkpoint or setting that breaks a rule, or caches that do not fit; nothing is left
                half-loaded.
            CaptureError: as :meth:`from_model`.
        """
        settings, path = settings or EngineConfig(), Path(path)
        ranks, execution = start_ranks(settings), settings.execution
        with ranks.together("checkpoint"):
            config = ModelConfig.from_json(path)
            check_settings(config, settings)
            if torch.device(settings.device).type == "cpu":
                check_host_memory(config, settings)  # what a GPU has left is known later
            tokenizer = Tokenizer.from_dir(path) if (path / "tokenizer.json").is_file() else None
        began = time.perf_counter()
        with ranks.together("loaded"):
            weights = load_weights(
                Checkpoint.open(path), config, settings.numerics, dtype=execution.dtype, device=settings.device,
                progress=progress, expert_weights=settings.expert_weights,
            )  # fmt: skip
        before = {"load": time.perf_counter() - began}
        began = time.perf_counter()
        if warm_loaded(config, settings, progress=progress) is not None:
            before["prewarm"] = time.perf_counter() - began
        began = time.perf_counter()
        model = DeepseekV4(config, execution, weights, max_positions=settings.max_blocks * BLOCK_TOKENS)
        before["load"] += time.perf_counter() - began
        logger.info("loaded %s in %.1f s", path, before["load"])
        return cls._start(model, settings, tokenizer, before, progress=progress)

    @classmethod
    def from_model(
        cls,
        model: DeepseekV4,
        settings: EngineConfig,
        tokenizer: Tokenizer | None = None,
        *,
        progress: bool = True,
        **start_up_options: Any,
    ) -> "Engine":
        """Serve a model built elsewhere, whose ``execution`` must be that of ``settings``.

        Args:
            model: with RoPE tables for ``settings.max_seq_len``, rounded up to a multiple of 256.
            settings: how to compile, cache and schedule.
            tokenizer: without one, prompts are token ids and completions have no text.
            progress: show progress on stderr: prewarm and capture.
            start_up_options: ``hardware``, ``group``, ``store`` and ``timeout`` of ``dsv4.start_up.start_up``.

        Raises:
            ValueError: a setting that breaks a rule, or caches that do not fit into free memory.
            CaptureError: a step could not be captured. Nothing stays allocated: an engine with ``graphs="off"`` can be
                made of the same model. With ``graphs="auto"`` a lack of memory is no error but
                ``started.capture_error``, and steps run eagerly.
        """
        return cls._start(model, settings, tokenizer, {}, progress=progress, **start_up_options)

    @classmethod
    def _start(
        cls,
        model: DeepseekV4,
        settings: EngineConfig,
        tokenizer: Tokenizer | None,
        before: dict[str, float],
        **options: Any,
    ) -> "Engine":
        made: list[Engine] = []

        def last(runner: Runner, started: StartUp) -> None:
            seconds = [report.seconds for report in started.compile_reports.values()]
            timings = Timings(
                load_seconds=before.get("load", 0.0),
                trace_seconds=sum(s.trace for s in seconds),
                compile_seconds=sum(s.compile for s in seconds),
                piece_load_seconds=sum(s.load for s in seconds),
            )
            assert started.caches is not None
            given = settings.with_blocks(started.caches.num_blocks)
            engine = cls(model.config, given, runner, tokenizer, timings, started)
            if started.hardware is not None:
                engine.rehearse()
            made.append(engine)

        start_up(model, settings, before=before, last=last, **options)
        return made[0]

    def rehearse(self) -> None:
        """Serve a few requests that nobody asked for and forget them, reusable prefixes and counts of paths included:
        the last stage of start-up on a GPU. After it a request meets nothing for the first time."""
        number = self._num_requests
        rehearse(self.generate, self.loop, self.started, texts=self.tokenizer is not None)
        self._num_requests = number

    def close(self) -> None:
        """Free graphs, pools and caches. The model stays usable; this engine does not. May be called twice."""
        if self.loop.has_work:
            raise RuntimeError("an engine must be idle to be closed, got one with unfinished prompts")
        self._closed = True
        self.started.close()
        self.runner.close()
        self.loop.reset()  # snapshots of reusable prefixes
        self.started.release_cached()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # an error inside the block ends the prompts that are still being served
            self.loop.reset()
        self.close()

    @property
    def compile_reports(self) -> dict[str, CompileReport]:
        """By function (``step``, ``draft``); empty when ``compile`` is ``off``."""
        return self.started.compile_reports

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
            prompts: texts (a beginning-of-sentence token is prepended unless spelled) or token ids, each a list or a
                one-dimensional array or tensor of integers.
            params: for all prompts, or one per prompt.
            on_token: called for every committed token, in order.

        Returns:
            One completion per prompt, in order, and the totals. A refused prompt has ``error`` set; others are served.
        """
        batch, stats = self._prepare(prompts, params), RunStats()
        found: dict[int, Completion] = {}
        for completions in self._serve(batch, on_token or (lambda event: None), stats):
            found.update(completions)
        return [found[index] for index in range(len(prompts))], stats

    def stream(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> Generator[TokenEvent, None, None]:
        """Yield every token of a batch as it is committed.

        The batch is checked at the call, where a bad prompt raises ``ValueError``, and queued at the first ``next``: a
        stream that nobody reads holds nothing.
        """
        batch = self._prepare(prompts, params)
        for index, completion in batch.refused.items():
            raise ValueError(f"prompt {index} was refused: {completion.error}")
        return self._events(batch)

    def _events(self, batch: _Batch) -> Generator[TokenEvent, None, None]:
        events: list[TokenEvent] = []
        with closing(self._serve(batch, events.append, RunStats())) as steps:
            for _ in steps:
                yield from events
                events.clear()

    def _prepare(self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]) -> _Batch:
        """Check a batch; nothing is queued."""
        if isinstance(prompts, (str, bytes)) or not isinstance(prompts, (Sequence, np.ndarray, torch.Tensor)):
            got = f"one text: {prompts!r}" if isinstance(prompts, str) else repr(prompts)
            raise ValueError(f"prompts must be a list of prompts, got {got}")
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        if not isinstance(each, Sequence) or not all(isinstance(own, SamplingParams) for own in each):
            raise ValueError(f"params must be SamplingParams, or one per prompt, got {params!r}")
        if len(each) != len(prompts):
            raise ValueError(f"params must have one entry per prompt, {len(prompts)}, got {len(each)}")
        self._check_idle()
        batch = _Batch()
        for index, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
            self._num_requests += 1
            request_id = f"r{self._num_requests}"
            try:
                request = self._request(request_id, prompt, own)
            except ValueError as error:
                batch.refused[index] = Completion.refused(request_id, str(error))
                continue
            stream = self.tokenizer.stream() if self.tokenizer else None
            batch.live[request_id] = _Live(index, request, stream)
        return batch

    def _check_idle(self) -> None:
        if self._closed:
            raise RuntimeError("an engine must be open to serve prompts, got one that was closed")
        if self.loop.has_work:
            raise RuntimeError("an engine must serve one batch at a time, got another while a stream is open: close it")

    def _request(self, request_id: str, prompt: Prompt, params: SamplingParams) -> Request:
        check_token_ids(params.stop_token_ids, self.config.vocab_size, "stop_token_ids")
        ids = encode_prompt(prompt, self.tokenizer)
        check_token_ids(ids, self.config.vocab_size, "prompt")
        request = Request(id=request_id, prompt_ids=ids, params=params.with_seed())
        self.loop.scheduler.check(request)
        return request

    def _serve(
        self, batch: _Batch, on_token: Callable[[TokenEvent], None], stats: RunStats
    ) -> Iterator[dict[int, Completion]]:
        """Run until all prompts are done; yields those that ended, by prompt, first the refused, then after every
        step."""
        self._check_idle()
        live = dict(batch.live)
        try:
            for state in live.values():
                self.loop.add(state.request)
            yield batch.refused
            started = time.perf_counter()
            while self.loop.has_work:
                self._step(live, on_token, stats)
                stats.seconds = time.perf_counter() - started
                ended = [live.pop(key) for key, state in list(live.items()) if state.request.state == "finished"]
                yield {state.prompt_idx: _completion(state) for state in ended}
        finally:
            if not self._closed:  # a closed engine has forgotten them
                self.loop.abandon(s.request for s in live.values() if s.request.state != "finished")

    def _step(self, live: dict[str, _Live], on_token: Callable[[TokenEvent], None], stats: RunStats) -> None:
        advances = self.loop.step()
        stats.steps += 1
        for advance in advances:
            state = live[advance.request.id]
            state.drafted += advance.num_drafts
            state.accepted += advance.num_accepted
            stats.rows += advance.num_rows
            stats.drafted_tokens += advance.num_drafts
            stats.accepted_tokens += advance.num_accepted
            stats.generated_tokens += len(advance.tokens)
            for event in state.events(advance.tokens):
                on_token(event)


def _completion(state: _Live) -> Completion:
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
