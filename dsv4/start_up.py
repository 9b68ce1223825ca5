"""Start-up of a loaded model, in this order: prewarm kernels, compile pieces, meet the other ranks, warm every bucket,
capture the largest one on trial, size and allocate the caches, capture, rehearse, ready.

Kernels compile before anything measures memory, pieces compile before any collective runs, and the caches get what is
really free once it is known what capture takes. Graphs hold the caches' addresses, so capture comes last. Until the
caches have their size, small ones stand in for them.

Stages live in ``prewarming``, ``compile_stage``, ``cache_sizing`` and ``capture_stage``. On the CPU, whose references
have nothing to warm or capture, only compilation and the caches are left of them.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from .cache_sizing import CachePlan, DeviceMemory, cache_bytes, plan_cache
from .caches import ModelCaches, allocate_caches
from .capture_stage import capture_all, captured_steps, install
from .compile import CompiledModel, CompileReport
from .compile_stage import check_compile_cache, compile_functions
from .config import ModelConfig
from .engine_config import EngineConfig
from .graphs.capture import CapturedStep, CaptureReport, TrialReport
from .graphs.jit_monitor import JitMonitor
from .graphs.pieces import CaptureMemoryError
from .graphs.prewarm import PrewarmReport
from .graphs.ranks import LONGEST_WAIT, Meeting, Ranks, default_group
from .hardware import Hardware, hardware_of
from .model import DeepseekV4
from .prewarm_progress import stage_progress
from .prewarming import check_backends
from .runner import Runner
from .step_loop import cache_pages

logger = logging.getLogger(__name__)

MIB = 2**20
LATE_SECONDS = 1.0
"""Nothing may compile for longer than this once the ranks have met."""


@dataclass(frozen=True)
class StageRow:
    """One line of the start-up table. ``keys``: of kernels, or compiled pieces; ``mib``: memory that stays taken."""

    stage: str
    seconds: float
    keys: int | None
    graphs: int | None
    mib: float | None


@dataclass(frozen=True)
class LateCompilation:
    """What compiled, or was loaded from disk, after the ranks had met and before the engine was ready."""

    library: str
    key: str
    compilations: int
    loads: int
    seconds: float


@dataclass
class StartUp:
    """What start-up did.

    Attributes:
        seconds: per stage, in order: ``load``, ``prewarm``, ``compile``, ``barrier``, ``warm``, ``trial``, ``empty``,
            ``caches``, ``capture``, and an engine's ``rehearse``; a stage without work is absent.
        weight_bytes: of the model.
        prewarm: report of the prewarm; ``None`` on the CPU, and when the settings switch it off.
        compiled: by function (``step``, ``draft``).
        trials: by function, what the capture of its largest bucket took.
        caches: how the caches got their size.
        captured: by function, what replays its graphs; empty without graphs.
        capture_error: why there are no graphs although ``graphs`` was ``auto``: device memory ran out. Steps then run
            eagerly, each with this reason in ``captured[...].last_path``. Any other choice raises it.
        late_compilations: see :class:`LateCompilation`.
        ready_at: seconds since the epoch; whatever compiles from then on compiles while somebody waits.
        hardware: where it ran; ``None`` for the CPU.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    weight_bytes: int = 0
    prewarm: PrewarmReport | None = None
    compiled: dict[str, CompiledModel] = field(default_factory=dict)
    trials: dict[str, TrialReport] = field(default_factory=dict)
    caches: CachePlan | None = None
    captured: dict[str, CapturedStep] = field(default_factory=dict)
    capture_error: CaptureMemoryError | None = None
    late_compilations: tuple[LateCompilation, ...] = ()
    ready_at: float = 0.0
    hardware: Hardware | None = None

    @property
    def compile_reports(self) -> dict[str, CompileReport]:
        return {name: compiled.report for name, compiled in self.compiled.items()}

    @property
    def capture_reports(self) -> dict[str, CaptureReport]:
        return {name: step.report for name, step in self.captured.items() if step.report is not None}

    def table(self) -> list[StageRow]:
        """One row per stage in order; capture has one per function."""
        rows = []
        for stage, seconds in self.seconds.items():
            keys = mib = None
            if stage == "load":
                mib = self.weight_bytes / MIB
            elif stage == "prewarm":
                keys = len(self.prewarm.keys) if self.prewarm is not None and self.prewarm.enabled else None
            elif stage == "compile":
                keys = sum(report.num_distinct_pieces for report in self.compile_reports.values())
            elif stage == "caches":
                mib = self.caches.cache_bytes / MIB if self.caches is not None else None
            if stage != "capture":
                rows.append(StageRow(stage, seconds, keys, None, mib))
                continue
            reports = self.capture_reports
            rows += [StageRow(f"capture {n}", r.capture_seconds, None, r.graphs, r.mib) for n, r in reports.items()]
            if not reports:
                rows.append(StageRow("capture", seconds, None, 0, 0.0))
        return rows

    def close(self) -> None:
        """Free all graphs and their pools."""
        for step in self.captured.values():
            step.close()

    def release_cached(self) -> None:
        """Give memory that the allocator caches back to the device."""
        if self.hardware is not None:
            self.hardware.release_cached()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage; its seconds add up."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


def start_ranks(
    settings: EngineConfig,
    group: dist.ProcessGroup | None = None,
    store: dist.Store | None = None,
    timeout: timedelta = LONGEST_WAIT,
) -> Ranks:
    """The ranks that start together: of ``group``, or on a GPU all of ``torch.distributed`` where it is in use."""
    if group is None and torch.device(settings.device).type == "cuda":
        group = default_group()
    return Ranks.of(group, store, timeout)


def check_settings(config: ModelConfig, settings: EngineConfig) -> None:
    """Raise for settings with which no engine of such a model can start, before anything takes time."""
    if settings.draft_tokens and not config.num_nextn_predict_layers:
        raise ValueError(f"draft_tokens must be 0 for a model without an MTP block, got {settings.draft_tokens}")
    longest = config.max_position_embeddings
    if settings.max_seq_len > longest:
        raise ValueError(f"max_seq_len must be at most max_position_embeddings {longest}, got {settings.max_seq_len}")
    check_backends(settings)
    check_compile_cache(settings)


def start_up(
    model: DeepseekV4,
    settings: EngineConfig,
    *,
    before: dict[str, float] | None = None,
    progress: bool = True,
    hardware: Hardware | None = None,
    group: dist.ProcessGroup | None = None,
    store: dist.Store | None = None,
    timeout: timedelta = LONGEST_WAIT,
    last: Callable[[Runner, StartUp], object] = lambda runner, started: None,
) -> tuple[Runner, StartUp]:
    """Run the stages; returns a runner whose functions are the ones that they made, and what they did.

    Ranks meet after every stage that can fail: none waits for one that has failed, and none is ready alone.

    Args:
        model: loaded, with RoPE tables for ``settings.max_blocks`` blocks.
        settings: the engine's settings.
        before: seconds of stages that ran before, by name (``load``, ``prewarm``).
        progress: show progress of prewarm and capture on stderr.
        hardware: default: that of ``settings.device``.
        group: ranks that must agree and wait for each other; default: see :func:`start_ranks`.
        store: in place of the store of ``group``.
        timeout: longest wait for another rank.
        last: the last stage, on a GPU called ``rehearse``; gets what is returned, and its failure is one of start-up.

    Raises:
        CaptureError: a function could not be captured, with ``graphs`` ``full`` or ``piecewise`` also because memory
            ran out; nothing stays allocated, and the model can be used again.
        ValueError: settings that break a rule, a model that was made for others, or caches that do not fit.
        RuntimeError: another rank failed.
        TimeoutError: another rank did not come.
    """
    ranks = start_ranks(settings, group, store, timeout)
    with ranks.together("settings"):
        check_settings(model.config, settings)
        if model.execution != settings.execution:
            raise ValueError(f"the model's execution must be {settings.execution}, got {model.execution}")
        hardware = hardware or hardware_of(settings)
        runner = Runner.eager(model, _small_caches(model, settings), settings.max_blocks)
    weights = sum(b.nbytes for b in model.buffers())
    started = StartUp(dict(before or {}), weight_bytes=weights, hardware=hardware)
    stages = _Stages(runner, settings, started, ranks, progress)
    try:
        if hardware is None:
            stages.run_without_kernels(last)
        else:
            stages.run(hardware, group, store, last)
    except BaseException:
        runner.close()  # the error's frames hold the runner, and a caller may start another engine while it has them
        started.close()
        started.release_cached()
        raise
    started.ready_at = time.time()
    return runner, started


def _small_caches(model: DeepseekV4, settings: EngineConfig) -> ModelCaches:
    """Caches of the right types, for a trace and for steps of pad rows, which write nothing."""
    return _allocate(model, settings, num_blocks=1, num_window_pages=1, num_slots=1)


def _allocate(model: DeepseekV4, settings: EngineConfig, **sizes: int) -> ModelCaches:
    return allocate_caches(
        model.config, settings.execution, storage=settings.storage, max_draft=settings.draft_tokens,
        device=settings.device, **sizes,
    )  # fmt: skip


@dataclass
class _Stages:
    runner: Runner
    settings: EngineConfig
    started: StartUp
    ranks: Ranks
    progress: bool

    def run_without_kernels(self, last: Callable[[Runner, StartUp], object]) -> None:
        self.compile()
        with self.together("caches") as sizes:
            sizes.value = self.plan(None)
        with self.together("ready"):
            self.allocate(min(sizes.values))
            last(self.runner, self.started)

    def run(
        self,
        hardware: Hardware,
        group: dist.ProcessGroup | None,
        store: dist.Store | None,
        last: Callable[[Runner, StartUp], object],
    ) -> None:
        started, done = self.started, False

        def prewarm() -> None:
            nonlocal done
            if not done:
                with started.stage("prewarm"):
                    started.prewarm = hardware.prewarm(
                        self.runner.model, self.settings, group=group, store=store, progress=self.progress
                    )
            done = True

        prewarm()
        self.compile()
        with JitMonitor(libraries=hardware.jit_libraries()) as monitor:
            self._warm_to_capture(hardware, prewarm)
            with self.together("ready"), started.stage("rehearse"):
                last(self.runner, started)
        started.late_compilations = tuple(
            LateCompilation(library, key, each.compilations, each.loads, each.seconds)
            for library, keys in monitor.report().libraries.items()
            for key, each in keys.items()
        )
        for late in started.late_compilations:
            level = logging.WARNING if late.seconds > LATE_SECONDS else logging.INFO
            logger.log(level, "%s compiled or loaded %s late, in %.2f s", late.library, late.key, late.seconds)

    def together(self, name: str) -> AbstractContextManager[Meeting]:
        """:meth:`Ranks.together`, whose waiting is the stage ``barrier``."""
        return self.ranks.together(name, self.started.stage("barrier"))

    def compile(self) -> None:
        """Compile, and wait until every rank has: from here on collectives may run."""
        with self.together("compiled"):
            if self.settings.compile != "off":
                with self.started.stage("compile"):
                    self.started.compiled = compile_functions(self.runner, self.settings)

    def _warm_to_capture(self, hardware: Hardware, prewarm: Callable[[], None]) -> None:
        started = self.started
        with self.together("caches") as sizes:
            with started.stage("warm"):
                steps = captured_steps(self.runner, self.settings, hardware)
                hardware.reset_peak()
                for step in steps.values():
                    step.warm_up(prewarm)
                transient = hardware.transient_bytes()
            if hardware.graph_mode == "off":
                steps = {}
            else:
                with started.stage("trial"), self._memory_errors(hardware, steps):
                    started.trials = {name: step.trial() for name, step in steps.items()}
            with started.stage("empty"):
                hardware.release_cached()
            free, total = hardware.free_and_total_bytes()
            graphs = sum(trial.expected_bytes(len(steps[n].ladder.buckets)) for n, trial in started.trials.items())
            blocks = self.plan(DeviceMemory(free=free, total=total, graphs=graphs, transient=transient))
            sizes.value = {"blocks": blocks, "no_graphs": self._no_graphs()}
        self._agree_on_graphs(sizes, steps)
        started.captured = steps
        with self.together("captured") as captured:
            self.allocate(min(value["blocks"] for value in sizes.values))
            if steps and started.capture_error is None:
                show = stage_progress("capture", enabled=self.progress)
                with started.stage("capture"), self._memory_errors(hardware, steps), show as shown:
                    capture_all(steps, prewarm, shown)
            captured.value = {"no_graphs": self._no_graphs()}
        self._agree_on_graphs(captured, steps)
        if steps:
            install(self.runner, steps, started.capture_error)

    @contextmanager
    def _memory_errors(self, hardware: Hardware, steps: dict[str, CapturedStep]) -> Iterator[None]:
        """With ``auto``, a capture that ran out of memory leaves its error in ``capture_error``; else it is the end."""
        try:
            yield
        except CaptureMemoryError as error:
            if hardware.graph_mode != "auto":
                raise
            error.__cause__ = error.__context__ = None  # its frames hold tensors, and the text says it all
            self._do_without_graphs(steps, error.with_traceback(None))

    def _do_without_graphs(self, steps: dict[str, CapturedStep], error: CaptureMemoryError) -> None:
        for step in steps.values():
            step.close()
        self.started.capture_error = error
        logger.error("steps will run eagerly, which is slow, because their capture failed: %s", error)

    def _no_graphs(self) -> str | None:
        return None if self.started.capture_error is None else str(self.started.capture_error)

    def _agree_on_graphs(self, meeting: Meeting, steps: dict[str, CapturedStep]) -> None:
        """Where one rank has to do without graphs all do: they would take different paths in one step."""
        for rank, value in enumerate(meeting.values):
            if value["no_graphs"] is not None and self.started.capture_error is None:
                self._do_without_graphs(steps, CaptureMemoryError(f"rank {rank}: {value['no_graphs']}"))

    def plan(self, memory: DeviceMemory | None) -> int:
        """Blocks that this rank has memory for."""
        with self.started.stage("caches"):
            self.started.caches = plan_cache(self.runner.model.config, self.settings, memory)
        return self.started.caches.num_blocks

    def allocate(self, num_blocks: int) -> None:
        """Put caches of ``num_blocks``, alike on every rank, in the place of the small ones."""
        model, settings = self.runner.model, self.settings
        assert self.started.caches is not None
        with self.started.stage("caches"):
            given = settings.with_blocks(num_blocks)
            self.started.caches = replace(
                self.started.caches, num_blocks=num_blocks, cache_bytes=cache_bytes(model.config, settings, num_blocks)
            )
            blocks, pages = cache_pages(given, model.config.sliding_window)
            self.runner.caches = _allocate(
                model, settings, num_blocks=blocks, num_window_pages=pages, num_slots=settings.max_requests
            )
        logger.info("caches take %.2f GiB, %d blocks", self.runner.caches.bytes() / 2**30, blocks)
