"""The capture stage, and steps that replay what it captured.

A :class:`CapturedStep` is one step function of a model with its static inputs, its bucket ladder and its memory pool.
:meth:`CapturedStep.capture` runs once at start-up, in this order: the caller's prewarm, one eager warm-up run of every
bucket on the stream of capture, then the capture of every bucket, largest first, with Python's garbage collector off.
All of it runs on pad rows, so caches keep their content. A caller that sizes caches by what capture leaves free does
the first two by :meth:`CapturedStep.warm_up`, then measures with :meth:`CapturedStep.trial`, then allocates, then
captures.

A step then copies its inputs into the static buffers, pads them to the smallest bucket that holds it, replays and
slices the outputs. A step beyond the largest bucket runs eagerly, unpadded; :attr:`CapturedStep.last_path` and
:attr:`CapturedStep.path_counts` say which way steps took. Steps of one object run one after another, on one stream.
"""

import gc
import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .buckets import Bucket, Ladder
from .device_graphs import DeviceGraphs
from .pieces import CapturedPieces, CaptureError, Mode, Tape, describe, naming
from .static_inputs import SIZES, SizeName, StaticInputs

logger = logging.getLogger(__name__)

MIB = 2**20
MOST_DRIVER_BYTES = 256 * MIB
"""Of one bucket's graphs. What is free belongs to all processes of the device: another one may allocate during a trial,
and its memory must not be counted once for every bucket."""
AskedMode = Mode | Literal["auto"]
MODES = ("piecewise", "full", "auto")


@dataclass(frozen=True, kw_only=True)
class BucketStats:
    """What the capture of one bucket made: graphs, eager calls between them, copies of what these return."""

    bucket: Bucket
    mode: Mode
    graphs: int
    boundary_calls: int
    copied_outputs: int
    seconds: float
    mib: float


@dataclass(frozen=True, kw_only=True)
class CaptureReport:
    """The capture stage in numbers.

    Attributes:
        buckets: in order of capture; ``mib`` is what each added to the pool.
        problems: why pieces cannot be part of a graph; with mode ``auto`` these make the capture piecewise.
        warm_up_seconds: of the warm-up, which may have come long before the capture.
        static_mib: static input buffers.
        device_mib: what capture took of the device: the pool, and what the driver keeps for each graph.
    """

    buckets: tuple[BucketStats, ...]
    problems: tuple[str, ...]
    prewarm_seconds: float
    warm_up_seconds: float
    capture_seconds: float
    static_mib: float
    device_mib: float

    @property
    def graphs(self) -> int:
        return sum(b.graphs for b in self.buckets)

    @property
    def mib(self) -> float:
        return sum(b.mib for b in self.buckets)


@dataclass(frozen=True, kw_only=True)
class TrialReport:
    """What the capture of the largest bucket alone took of the device: pool bytes, and bytes of the driver."""

    bucket: Bucket
    graphs: int
    pool_bytes: int
    driver_bytes: int
    seconds: float

    def expected_bytes(self, num_buckets: int) -> int:
        """Of a whole ladder: smaller buckets fit into the pool's memory, but the driver keeps data of every graph."""
        return self.pool_bytes + self.driver_bytes * num_buckets


@dataclass(frozen=True)
class StepPath:
    """How a step ran: ``bucket`` is what was replayed, ``reason`` why nothing was."""

    kind: Literal["piecewise", "full", "eager"]
    sizes: tuple[int, int, int]
    bucket: Bucket | None = None
    reason: str | None = None


@dataclass(frozen=True)
class _WarmUp:
    problems: dict[int, str]
    seconds: float


class CapturedStep:
    """See the module's docstring.

    Args:
        model: the step function. With ``wrap_pieces`` (``dsv4.compile.CompiledModel``, already traced) it can be
            captured piecewise; this object is then the wrapper of its pieces during capture, and always in debug mode.
        inputs: static buffers of the step's inputs.
        ladder: the buckets.
        graphs: graphs and memory pool of the device, which this object owns.
        arguments: arguments of ``model`` for inputs, e.g. ``lambda inputs: (inputs, caches)``. What it adds to the
            inputs may be written in place but must stay where it is.
        trim: per output of the model, the size that its first dimension has.
        mode: ``piecewise``, ``full``, ``auto`` (full unless a piece cannot be captured), or one of these per bucket.
        debug: compare the address of every input of every piece with the capture before it is replayed. This calls the
            model, so it is slow. A full graph has no pieces to look at: ``watch`` is compared instead.
        watch: the tensors besides the inputs that a full graph reads.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        inputs: StaticInputs,
        ladder: Ladder,
        graphs: DeviceGraphs,
        *,
        arguments: Callable[[Any], tuple[Any, ...]],
        trim: Sequence[SizeName],
        mode: AskedMode | Callable[[Bucket], AskedMode] = "auto",
        debug: bool = False,
        watch: Callable[[], Iterable[torch.Tensor]] = tuple,
    ) -> None:
        if not callable(mode) and mode not in MODES:
            raise ValueError(f"mode must be one of {MODES} or a function of the bucket, got {mode!r}")
        self.model, self.inputs, self.ladder, self.debug = model, inputs, ladder, debug
        self.last_path: StepPath | None = None
        self.path_counts: Counter[str] = Counter()
        self.report: CaptureReport | None = None
        self._graphs, self._arguments, self._trim, self._mode, self._watch = graphs, arguments, trim, mode, watch
        self._pieces = CapturedPieces(model, graphs)
        self._tapes: dict[Bucket, Tape] = {}
        self._warm: _WarmUp | None = None

    # --- capture ------------------------------------------------------------------------------------------------------

    def warm_up(self, prewarm: Callable[[], Any]) -> None:
        """Prewarm, then run every bucket once, eagerly, on the stream of capture.

        Raises:
            CaptureError, RuntimeError: as :meth:`capture`.
        """
        self._check_start()
        prewarm()
        with self._all_or_nothing([]):
            self._warm = self._warm_up()

    def trial(self) -> TrialReport:
        """Capture the largest bucket alone, measure what that takes of the device, and free it again.

        What counts is taken by the capture *and* given back afterwards: other processes use the device too, and the
        driver's first capture makes it keep memory that later ones share.

        Raises:
            CaptureError, RuntimeError: as :meth:`capture`; also before :meth:`warm_up`.
        """
        self._check_start()
        if self._warm is None:
            raise RuntimeError("a trial must come after warm_up(), got a step that is cold")
        stats: list[BucketStats] = []
        self._graphs.settle()
        free = self._graphs.free_bytes()
        with self._all_or_nothing(stats), frozen_gc():
            self._capture(self.ladder.largest, self._warm.problems, stats)
        self._graphs.settle()
        pool, left = self._graphs.pool_bytes(), self._graphs.free_bytes()
        self._free()
        own = min(free - left, self._graphs.free_bytes() - left)
        return TrialReport(
            bucket=self.ladder.largest,
            graphs=stats[0].graphs,
            pool_bytes=pool,
            driver_bytes=min(max(0, own - pool), MOST_DRIVER_BYTES),
            seconds=stats[0].seconds,
        )

    def capture(
        self, prewarm: Callable[[], Any], progress: Callable[[BucketStats], None] = lambda stats: None
    ) -> CaptureReport:
        """Prewarm, warm up unless that was done, and capture every bucket; ``progress`` is called after each.

        Raises:
            CaptureError: naming bucket and piece; :class:`CaptureMemoryError` when device memory runs out. No graph is
                left, its memory is free again, and the model and :meth:`eager` work as before.
            RuntimeError: called twice, or while a stream is being captured.
        """
        self._check_start()
        started = time.perf_counter()
        prewarm()
        prewarmed, stats = time.perf_counter(), []
        with self._all_or_nothing(stats):
            if self._warm is None:
                self._warm = self._warm_up()
            began, free = time.perf_counter(), self._graphs.free_bytes()
            with frozen_gc():
                for bucket in self.ladder.largest_first:
                    self._capture(bucket, self._warm.problems, stats)
                    progress(stats[-1])
        if self.debug:
            self._pieces.wrap()
        self.report = CaptureReport(
            buckets=tuple(stats),
            problems=tuple(self._warm.problems.values()),
            prewarm_seconds=prewarmed - started,
            warm_up_seconds=self._warm.seconds,
            capture_seconds=time.perf_counter() - began,
            static_mib=self.inputs.nbytes() / MIB,
            device_mib=max(0, free - self._graphs.free_bytes()) / MIB,
        )
        logger.info("captured %d graphs of %d buckets, %.0f MiB, in %.1f s", self.report.graphs, len(stats),
                    self.report.mib, self.report.capture_seconds)  # fmt: skip
        return self.report

    def _check_start(self) -> None:
        if self._tapes:
            raise RuntimeError(f"a step must be captured once, got {len(self._tapes)} buckets: close() it first")
        if self._graphs.capturing():
            raise RuntimeError("a capture stage must start outside stream capture, got a stream that is being captured")

    @contextmanager
    def _all_or_nothing(self, stats: list[BucketStats]) -> Iterator[None]:
        """The pieces are wrapped inside the block; if it fails, every graph that it made (``stats``) is freed."""
        self._pieces.wrap()
        try:
            with torch.no_grad():
                yield
        except BaseException as error:
            _clear_frames(error)  # their locals are tensors in the pool
            self._free()
            if not isinstance(error, CaptureError):
                raise
            mib = sum(s.mib for s in stats)
            raise type(error)(
                f"{error}; the {len(stats)} of {len(self.ladder.buckets)} buckets captured before ({mib:.0f} MiB) "
                "were freed, and steps can still run eagerly"
            ) from error.__cause__
        self._pieces.unwrap()

    def _warm_up(self) -> _WarmUp:
        started, problems = time.perf_counter(), {}
        for bucket in self.ladder.largest_first:
            args = self._arguments(self.inputs.fill_pads(bucket))
            with self._graphs.side_stream(), naming(f"bucket of {bucket}: warm-up"):
                found = self._pieces.problems(args)
            problems.update({i: f"{describe(piece)}: {reason}" for i, (piece, reason) in sorted(found.items())})
        self._graphs.settle()
        return _WarmUp(problems, time.perf_counter() - started)

    def _capture(self, bucket: Bucket, problems: dict[int, str], stats: list[BucketStats]) -> None:
        mode = self._mode_of(bucket, problems)
        before, started = self._graphs.pool_bytes(), time.perf_counter()
        args = self._arguments(self.inputs.fill_pads(bucket))
        with self._graphs.side_stream():
            tape = self._pieces.capture(str(bucket), mode, args, self._watch())
        self._tapes[bucket] = tape
        num_outputs = len(tape.outputs) if isinstance(tape.outputs, tuple) else 1
        if num_outputs != len(self._trim):
            raise CaptureError(f"trim must have one entry per output, {num_outputs}, got {len(self._trim)}")
        made = BucketStats(
            bucket=bucket,
            mode=mode,
            graphs=len(tape.graphs),
            boundary_calls=tape.boundary_calls,
            copied_outputs=tape.copied,
            seconds=time.perf_counter() - started,
            mib=(self._graphs.pool_bytes() - before) / MIB,
        )
        stats.append(made)
        logger.info("bucket of %s: %s, %d graphs, %.1f MiB, %.2f s", bucket, mode, made.graphs, made.mib, made.seconds)

    def _mode_of(self, bucket: Bucket, problems: dict[int, str]) -> Mode:
        asked = self._mode(bucket) if callable(self._mode) else self._mode
        where = f"bucket of {bucket}"
        if asked not in MODES:
            raise CaptureError(f"{where}: mode must be one of {MODES}, got {asked!r}")
        if asked == "full" and problems:
            raise CaptureError(
                f"{where}: the pieces of a full graph must all be capturable, got {'; '.join(problems.values())}"
            )
        if asked == "piecewise" and not self._pieces.has_pieces:
            raise CaptureError(f"{where}: a piecewise capture needs a compiled model with pieces, got {self.model!r}")
        if asked == "auto":
            return "piecewise" if problems else "full"
        return asked

    # --- steps --------------------------------------------------------------------------------------------------------

    def __call__(self, inputs: Any) -> Any:
        """Run a step; the outputs are valid until the next step: clone what must outlive it."""
        if not self._tapes:
            raise RuntimeError("a step must be captured before a replay, got no graphs: capture() it, or use eager()")
        sizes = self.inputs.measure(inputs)
        bucket = self.ladder.bucket_for(*sizes)
        if bucket is None:
            return self.eager(inputs, f"the step is {self.ladder.why_none(*sizes)}")
        tape = self._tapes[bucket]
        with torch.no_grad():
            views = self.inputs.fill(inputs, bucket)
            if self.debug:
                outputs = self._pieces.replay_checked(tape, self._arguments(views), self._watch())
            else:
                outputs = tape.replay()
        self._took(StepPath(tape.mode, sizes, bucket))
        lengths = dict(zip(SIZES, sizes, strict=True))
        if isinstance(outputs, torch.Tensor):
            return outputs[: lengths[self._trim[0]]]
        return tuple(o[: lengths[size]] for o, size in zip(outputs, self._trim, strict=True))

    def replay_pads(self) -> None:
        """Replay every bucket once on pad rows: the first launch of a graph also sends it to the device."""
        with torch.no_grad():
            for bucket, tape in self._tapes.items():
                self.inputs.fill_pads(bucket)
                tape.replay()
        self._graphs.settle()

    def eager(self, inputs: Any, reason: str = "the caller asked for it") -> Any:
        """Run a step without graphs and pads; works in every state of the object."""
        with torch.no_grad():
            outputs = self.model(*self._arguments(inputs))
        self._took(StepPath("eager", self.inputs.measure(inputs), None, reason))
        return outputs

    def _took(self, path: StepPath) -> None:
        self.last_path = path
        self.path_counts[path.kind] += 1
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("step of %s: %s, %s", path.sizes, path.kind, path.bucket or path.reason)

    # --- end ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free all graphs and the pool; the model and :meth:`eager` go on working, and it can be captured again."""
        self._free()

    def _free(self) -> None:
        if self._tapes:
            self._graphs.settle()  # a replay may still run
        for tape in self._tapes.values():
            tape.reset()
        self._tapes.clear()
        self.report = None
        self._pieces.unwrap()
        self._graphs.release()


@contextmanager
def frozen_gc() -> Iterator[None]:
    """No garbage collection inside the block: a collection could free a CUDA object while a stream is captured."""
    gc.collect()
    enabled, freeze = gc.isenabled(), gc.get_freeze_count() == 0
    gc.disable()
    if freeze:
        gc.freeze()
    try:
        yield
    finally:
        if freeze:
            gc.unfreeze()
        if enabled:
            gc.enable()


def _clear_frames(error: BaseException | None) -> None:
    """Drop the locals of the frames that an error, and what caused it, passed through."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
