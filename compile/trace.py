"""Trace a function once, cut the trace, compile its pieces, and never trace again.

``compile_model`` returns a callable. Its first call (or :meth:`CompiledModel.prepare`, which executes nothing) traces
the function with ``fullgraph=True``; the caller marks sizes that vary with :func:`mark_unbacked_sizes` before that
call, and everything else is a constant of the trace. A later call that would need another trace raises
:class:`RecompileError` naming the guard. Sizes 0 and 1 are no special cases of an unbacked size.

A model is called always inside or always outside of inference mode (a guard), and the memory-sharing pattern of its
arguments must be the same in every call: pieces are compiled for it.

Errors: :class:`GraphBreakError` if the function is not one graph, or reads a value back from a tensor.
"""

import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import fx

from . import inductor
from .cache import ArtifactCache, load_or_build
from .dedupe import distinct
from .inductor import RecompileError
from .report import (
    CompileReport,
    PieceNodes,
    Seconds,
    count_nodes,
    op_calls,
    plan_listing,
    used_boundary_ops,
)
from .split import Piece, SplitPlan, split
from .stitch import Stitched, stitch

Mode = Literal["piecewise", "full", "none"]
Backend = Literal["inductor", "eager"]
SizeSpec = int | Sequence[int] | Mapping[int, str]
Wrapper = Callable[[Piece, Callable[..., Any]], Callable[..., Any]]


def mark_unbacked_sizes(tree: object, sizes: Mapping[str, SizeSpec]) -> None:
    """Mark the sizes of ``tree``'s tensors that may differ from call to call.

    Args:
        tree: a dataclass instance, or any nest of objects, mappings and sequences.
        sizes: per field, a dim, several dims, or dims with names. A dotted field reaches into nested values
            (``layers.0.cache``). Dims of one name are one size, here and in every later call.
    """
    seen: dict[str, tuple[str, int]] = {}
    for path, spec in sizes.items():
        tensor = _field(tree, path)
        for dim, name in _dims(spec).items():
            if not -tensor.dim() <= dim < tensor.dim():
                raise ValueError(f"dim of {path} must be in [0, {tensor.dim()}), got {dim}")
            if name is not None:
                first, size = seen.setdefault(name, (path, tensor.shape[dim]))
                if tensor.shape[dim] != size:
                    raise ValueError(f"{name} of {path} must be {size} as in {first}, got {tensor.shape[dim]}")
            inductor.mark_unbacked(tensor, dim % tensor.dim(), name)


def _dims(spec: SizeSpec) -> dict[int, str | None]:
    if isinstance(spec, int):
        return {spec: None}
    return dict(spec) if isinstance(spec, Mapping) else dict.fromkeys(spec)


def _field(tree: object, path: str) -> torch.Tensor:
    value: Any = tree
    for part in path.split("."):
        try:
            if isinstance(value, Mapping):
                value = value[part]
            else:
                value = value[int(part)] if isinstance(value, Sequence) else getattr(value, part)
        except (AttributeError, KeyError, IndexError, ValueError):
            raise ValueError(f"sizes must name fields of {type(value).__name__}, got {path!r}") from None
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"sizes must name tensors, got {path!r} of type {type(value).__name__}")
    return value


class _Prepared(Exception):
    """Leaves the traced function before its first piece runs."""


@dataclass
class _Built:
    """What one trace produced."""

    plan: SplitPlan
    groups: list[list[Piece]]
    calls: list[Callable[..., Any]]
    stitched: Stitched
    seconds: Seconds
    cache_hits: int
    cache_misses: int
    piece_nodes: tuple[PieceNodes, ...] | None = field(default=None)


class CompiledModel:
    """A function that was, or on its first call will be, traced once. Made by :func:`compile_model`."""

    def __init__(
        self, fn: Callable[..., Any], boundary_ops: tuple[str, ...], backend: Backend, cache: ArtifactCache | None
    ) -> None:
        self._boundary_ops, self._backend, self._cache = boundary_ops, backend, cache
        self._built: _Built | None = None
        self._preparing = False
        self._refused = self._breaks = 0
        self._started = 0.0
        self._compiled = torch.compile(_entry(fn), fullgraph=True, dynamic=False, backend=self._build)

    def __call__(self, *args: Any) -> Any:
        with torch.no_grad():
            if self._built is None:
                return self._first(*args)
            try:
                with inductor.recompile_forbidden():
                    return self._compiled(*args)
            except RecompileError:
                self._refused += 1
                raise

    def prepare(self, *args: Any) -> CompileReport:
        """Trace and compile for ``args`` without executing any op."""
        if self._built is None:
            self._preparing = True
            try:
                with torch.no_grad():
                    self._first(*args)
            except _Prepared:
                pass
            finally:
                self._preparing = False
        return self.report

    @property
    def plan(self) -> SplitPlan:
        return self._result.plan

    @property
    def source(self) -> str:
        """Text of the stitched function."""
        return self._result.stitched.source

    @property
    def report(self) -> CompileReport:
        built = self._result
        values = built.plan.values
        if built.piece_nodes is None:
            built.piece_nodes = tuple(count_nodes(pieces[0], values) for pieces in built.groups)
        return CompileReport(
            graph_breaks=self._breaks,
            num_pieces=len(built.plan.pieces),
            num_distinct_pieces=len(built.groups),
            boundary_ops=used_boundary_ops(built.plan, self._boundary_ops),
            num_recompiles=self._refused,
            op_calls=op_calls(built.plan),
            piece_nodes=built.piece_nodes,
            seconds=built.seconds,
            cache_hits=built.cache_hits,
            cache_misses=built.cache_misses,
            plan=plan_listing(built.plan, built.groups),
        )

    def wrap_pieces(self, wrap: Wrapper) -> None:
        """Stitch again with every piece replaced by ``wrap(piece, call)``, for capture, timing or inspection.

        Wraps the original calls, so that a second wrapper replaces the first.
        """
        built = self._result
        built.stitched = stitch(built.plan, [wrap(p, c) for p, c in zip(built.plan.pieces, built.calls, strict=True)])

    @property
    def _result(self) -> _Built:
        if self._built is None:
            raise RuntimeError("a compiled model must be called or prepared before it is inspected")
        return self._built

    def _first(self, *args: Any) -> Any:
        before, self._started = inductor.num_graph_breaks(), time.perf_counter()
        with inductor.tracing_allowed():
            try:
                return self._compiled(*args)
            finally:
                self._breaks = inductor.num_graph_breaks() - before

    def _build(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Dynamo's backend."""
        if self._built is not None:
            raise RecompileError("a compiled model must be traced once, got a second trace: Dynamo's caches were reset")
        recording = inductor.record(graph_module, example_inputs)
        plan = split(graph_module, recording, self._boundary_ops)
        groups = distinct(plan.pieces, plan.values)
        traced = time.perf_counter()
        programs, hits, misses, seconds = self._programs(plan, groups)
        calls: list[Callable[..., Any]] = [piece.module.forward for piece in plan.pieces]
        for pieces, program in zip(groups.values(), programs, strict=True):
            for piece in pieces:
                calls[piece.index] = program
        self._built = _Built(
            plan=plan,
            groups=list(groups.values()),
            calls=calls,
            stitched=stitch(plan, calls),
            seconds=Seconds(traced - self._started, *seconds),
            cache_hits=hits,
            cache_misses=misses,
        )
        return self._run

    def _run(self, *args: Any) -> tuple[Any, ...]:
        if self._preparing:
            raise _Prepared
        assert self._built is not None
        return self._built.stitched.call(*args)

    def _programs(
        self, plan: SplitPlan, groups: Mapping[str, list[Piece]]
    ) -> tuple[list[Callable[..., Any]], int, int, tuple[float, float]]:
        """One program per group, cache hits and misses, and seconds of compiling and loading."""
        if self._backend == "eager":
            return [pieces[0].module.forward for pieces in groups.values()], 0, 0, (0.0, 0.0)
        start, spent = time.perf_counter(), [0.0]

        def builder(piece: Piece) -> Callable[[], Any]:
            def build() -> Any:
                began = time.perf_counter()
                fakes = [plan.values[name] for name in piece.inputs]
                if any(isinstance(f, torch.Tensor) and f.device.type == "cpu" for f in fakes):
                    inductor.check_compiler()
                artifact = inductor.compile_piece(piece.module, fakes)
                spent[0] += time.perf_counter() - began
                return artifact

            return build

        outcomes = load_or_build(list(groups), [builder(pieces[0]) for pieces in groups.values()], self._cache)
        hits = sum(o.loaded for o in outcomes)
        misses = len(outcomes) - hits if self._cache is not None else 0
        return [o.call for o in outcomes], hits, misses, (spent[0], time.perf_counter() - start - spent[0])


def _entry(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function with a code object of its own: Dynamo keeps traces and recompile counts per code object."""

    def step(*args: Any) -> Any:
        return fn(*args)

    own = types.FunctionType(step.__code__.replace(), step.__globals__, "step", None, step.__closure__)
    return own


def compile_model(
    fn: Callable[..., Any],
    boundary_ops: Sequence[str] = (),
    mode: Mode = "piecewise",
    backend: Backend = "inductor",
    cache_dir: Path | None = None,
    cache_salt: str = "",
) -> CompiledModel:
    """Prepare ``fn`` to be traced once and run as compiled pieces.

    Args:
        fn: a module or function of registered pytrees, tensors and constants.
        boundary_ops: qualified names (``"namespace::op"``) of the ops that run eagerly between compiled pieces.
        mode: ``piecewise`` cuts at ``boundary_ops``; ``full`` and ``none`` are the empty set: one piece.
        backend: ``inductor`` compiles pieces; ``eager`` runs them as traced, on any device, ``meta`` included.
        cache_dir: where artifacts are kept, or None for no cache.
        cache_salt: hash of what artifacts depend on beside the graph and torch: op schemas and sources.

    Raises:
        ValueError: unknown mode or backend, or a boundary op that is not registered.
    """
    for what, value, choices in (("mode", mode, get_args(Mode)), ("backend", backend, get_args(Backend))):
        if value not in choices:
            raise ValueError(f"{what} must be one of {choices}, got {value!r}")
    for name in boundary_ops:
        namespace, separator, op = name.partition("::")
        if not separator or not hasattr(getattr(torch.ops, namespace), op):
            raise ValueError(f"boundary_ops must name registered ops as 'namespace::op', got {name!r}")
    cache = ArtifactCache(Path(cache_dir), cache_salt) if cache_dir is not None and backend == "inductor" else None
    return CompiledModel(fn, tuple(boundary_ops) if mode == "piecewise" else (), backend, cache)
