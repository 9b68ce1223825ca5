"""A model captured for one bucket: piece by piece with boundary ops between, or as one graph.

:class:`CapturedPieces` wraps the pieces of a compiled model and calls it once per bucket. Every compiled piece becomes
a graph; boundary pieces run eagerly, on the tensors that they will always run on. The result is a :class:`Tape`, which
replays without the model: graph, boundary, graph, …

Ownership. What a captured piece returns is pool memory, held until the stitched model drops it: after its last consumer
(boundary or piece) has run. Only then can a later capture get that memory, and replay keeps this order, so the tape can
borrow it. What a boundary *returns* is not pool memory: the tape owns the tensor of the capture, and a replay copies
into it, because later graphs read that address. Boundary ops that write into buffers of the piece before them need no
such copy.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import torch

from .device_graphs import DeviceGraphs, Graph

Mode = Literal["piecewise", "full"]
UNSAFE_TAGS = (torch.Tag.cudagraph_unsafe, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Piece(Protocol):
    """What a piece of a compiled model says about itself; ``kind`` is ``compiled`` or ``boundary``."""

    index: int
    kind: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    op_names: tuple[str, ...]


class CaptureError(RuntimeError):
    """A model could not be captured; says which bucket and piece, and why."""


class CaptureMemoryError(CaptureError):
    """A capture ran out of device memory."""


class StaleAddressError(RuntimeError):
    """A replay would have read other memory than the tensors of this call."""


@dataclass
class Record:
    """One piece on a tape: what it was captured with, how to run it again, and what it returns."""

    piece: Piece
    identities: tuple[Any, ...]
    run: Callable[[], None]
    outputs: tuple[Any, ...]


@dataclass
class Tape:
    """One captured bucket.

    Attributes:
        label: the bucket, for messages.
        outputs: what the model returns: borrowed tensors, valid until the next replay of any tape of the same pool.
        graphs: in order of replay.
        copied: outputs of boundary pieces that every replay copies.
        watched: identities of the tensors that the caller watches in debug mode.
    """

    label: str
    mode: Mode
    outputs: Any = None
    graphs: list[Graph] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    runs: list[Callable[[], None]] = field(default_factory=list)
    copied: int = 0
    watched: tuple[Any, ...] = ()

    def replay(self) -> Any:
        for run in self.runs:
            run()
        return self.outputs

    def reset(self) -> None:
        for graph in self.graphs:
            graph.reset()
        self.graphs, self.records, self.runs, self.outputs = [], [], [], None

    @property
    def boundary_calls(self) -> int:
        return sum(r.piece.kind == "boundary" for r in self.records)


def capture_problem(piece: Piece, args: Sequence[Any], device: torch.device) -> str | None:
    """Why a piece cannot be part of a graph on ``device``; None if nothing speaks against it."""
    for name in piece.op_names:
        for tag in UNSAFE_TAGS:
            if tag in _tags(name):
                return f"op {name} is tagged {tag.name}"
    for name, arg in zip(piece.inputs, args, strict=True):
        if isinstance(arg, torch.Tensor) and arg.device != device:
            return f"input {name} is on {arg.device}"
    return None


def _tags(op_name: str) -> set[torch.Tag]:
    namespace, _, name = op_name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name)
    return {tag for overload in packet.overloads() for tag in getattr(packet, overload).tags}


def describe(piece: Piece) -> str:
    names = list(dict.fromkeys(piece.op_names))
    shown = f"{', '.join(names[:6])}, …" if len(names) > 6 else ", ".join(names)
    return f"{piece.kind} piece {piece.index} ({shown or 'no custom op'})"


Visit = Callable[[Piece, Callable[..., Any], tuple[Any, ...]], Any]


class CapturedPieces:
    """Captures and replays a model; see the module's docstring.

    Args:
        model: a callable. With a ``wrap_pieces`` method (``dsv4.compile.CompiledModel``) it can be captured piecewise;
            this object is then the wrapper of its pieces until :meth:`unwrap`. Any other callable is one full graph.
        graphs: the device's graphs and pool.
    """

    def __init__(self, model: Callable[..., Any], graphs: DeviceGraphs) -> None:
        self.model, self.graphs = model, graphs
        self.has_pieces = hasattr(model, "wrap_pieces")
        self._visit: Visit | None = None
        self._wrapped = False

    def wrap(self) -> None:
        if self.has_pieces:
            self.model.wrap_pieces(self._wrapper)
            self._wrapped = True

    def unwrap(self) -> None:
        if self._wrapped:
            self.model.wrap_pieces(lambda piece, call: call)
            self._wrapped = False

    def _wrapper(self, piece: Piece, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            return call(*args) if self._visit is None else self._visit(piece, call, args)

        return run

    @contextmanager
    def _visiting(self, visit: Visit) -> Iterator[None]:
        self._visit = visit
        try:
            yield
        finally:
            self._visit = None

    def problems(self, args: Sequence[Any]) -> dict[int, tuple[Piece, str]]:
        """Run the model eagerly once; returns, by piece index, why a piece cannot be captured."""
        found: dict[int, tuple[Piece, str]] = {}

        def visit(piece: Piece, call: Callable[..., Any], piece_args: tuple[Any, ...]) -> Any:
            reason = capture_problem(piece, piece_args, self.graphs.device)
            if reason is not None:
                found[piece.index] = (piece, reason)
            with naming(f"warm-up of {describe(piece)}"):
                return call(*piece_args)

        with self._visiting(visit):
            self.model(*args)
        return found

    def capture(self, label: str, mode: Mode, args: Sequence[Any], watched: Iterable[torch.Tensor] = ()) -> Tape:
        """Capture the model for ``args``, whose addresses every replay reads; each graph is also replayed once.

        Raises:
            CaptureError: nothing of this bucket is left allocated in a graph.
        """
        tape = Tape(label, mode, watched=tuple(map(identity, watched)))
        try:
            if mode == "full":
                self._capture_full(tape, args)
            else:
                self._capture_piecewise(tape, args)
        except BaseException:
            tape.reset()
            raise
        return tape

    def _capture_full(self, tape: Tape, args: Sequence[Any]) -> None:
        def visit(piece: Piece, call: Callable[..., Any], piece_args: tuple[Any, ...]) -> Any:
            with naming(f"bucket of {tape.label}: {describe(piece)}"):
                return call(*piece_args)

        with self._visiting(visit), naming(f"bucket of {tape.label}: the whole step"):
            graph = self._new_graph(tape)
            outputs = graph.capture(partial(self.model, *args))
            graph.replay()
        tape.runs.append(graph.replay)
        tape.outputs = self._borrow_outputs(outputs)

    def _capture_piecewise(self, tape: Tape, args: Sequence[Any]) -> None:
        borrowed: dict[str, Any] = {}  # by name, what captured pieces of this bucket returned

        def visit(piece: Piece, call: Callable[..., Any], piece_args: tuple[Any, ...]) -> tuple[Any, ...]:
            with naming(f"bucket of {tape.label}: {describe(piece)}"):
                if piece.kind == "boundary":
                    later = [borrowed.get(name, arg) for name, arg in zip(piece.inputs, piece_args, strict=True)]
                    outputs, kept, run = self._boundary(tape, call, piece_args, later)
                else:
                    outputs, kept, run = self._graph(tape, piece, call, piece_args)
            borrowed.update(zip(piece.outputs, kept, strict=True))
            tape.records.append(Record(piece, tuple(map(identity, piece_args)), run, kept))
            tape.runs.append(run)
            return outputs

        with self._visiting(visit):
            outputs = self.model(*args)
        if not tape.graphs:
            raise CaptureError(f"bucket of {tape.label}: a piecewise capture must have a compiled piece, got none")
        tape.outputs = self._borrow_outputs(outputs)

    def _graph(
        self, tape: Tape, piece: Piece, call: Callable[..., Any], args: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...], Callable[[], None]]:
        """Capture a compiled piece: its outputs, the borrowed ones, and its replay."""
        reason = capture_problem(piece, args, self.graphs.device)
        if reason is not None:
            raise CaptureError(
                f"bucket of {tape.label}: {describe(piece)} must be capturable, got a reason against it: {reason}"
            )
        graph = self._new_graph(tape)
        outputs = tuple(graph.capture(partial(call, *args)))
        for name, output in zip(piece.outputs, outputs, strict=True):
            if isinstance(output, torch.Tensor) and output.device != self.graphs.device:
                raise ValueError(f"output {name} must be on {self.graphs.device}, got {output.device}")
        graph.replay()  # so that the boundary after it runs on values that can occur
        return outputs, tuple(map(self._borrow, outputs)), graph.replay

    def _boundary(
        self, tape: Tape, call: Callable[..., Any], args: Sequence[Any], later: Sequence[Any]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...], Callable[[], None]]:
        """Run a boundary piece: its outputs, the kept ones, and how to run it into those again, with args ``later``."""
        outputs = tuple(call(*args))
        if not outputs:
            return outputs, outputs, partial(call, *later)
        inputs = {_storage(a) for a in args if isinstance(a, torch.Tensor)}
        fresh = [isinstance(o, torch.Tensor) and _storage(o) not in inputs for o in outputs]
        kept = tuple(o if new else self._borrow(o) for o, new in zip(outputs, fresh, strict=True))
        tape.copied += sum(fresh)

        def run() -> None:
            for keep, new in zip(kept, call(*later), strict=True):
                if not isinstance(keep, torch.Tensor):
                    if keep != new:
                        raise StaleAddressError(f"a size from a boundary op must be {keep} as captured, got {new}")
                elif keep.shape != new.shape:
                    raise StaleAddressError(
                        f"the output of a boundary op must have shape {list(keep.shape)} as captured, "
                        f"got {list(new.shape)}"
                    )
                elif keep.data_ptr() != new.data_ptr():
                    keep.copy_(new)

        return outputs, kept, run

    def replay_checked(self, tape: Tape, args: Sequence[Any], watched: Iterable[torch.Tensor] = ()) -> Any:
        """Replay through the model, and compare the address of everything that a graph reads with the capture.

        Raises:
            StaleAddressError: naming the piece and its input.
        """
        _compare(f"bucket of {tape.label}: watched tensor", map(str, range(len(tape.watched))), tape.watched, watched)
        if tape.mode == "full":
            return tape.replay()
        records = iter(tape.records)

        def visit(piece: Piece, call: Callable[..., Any], piece_args: tuple[Any, ...]) -> tuple[Any, ...]:
            record = next(records)
            where = f"bucket of {tape.label}: {describe(piece)}: input"
            _compare(where, piece.inputs, record.identities, piece_args)
            record.run()
            return record.outputs

        with self._visiting(visit):
            self.model(*args)
        if next(records, None) is not None:
            raise RuntimeError("the wrapper of a captured model's pieces must stay in place, got a replay past it")
        return tape.outputs

    def _new_graph(self, tape: Tape) -> Graph:
        graph = self.graphs.graph()
        tape.graphs.append(graph)  # before the capture, so that a failed one is reset too
        return graph

    def _borrow(self, value: Any) -> Any:
        return self.graphs.borrow(value) if isinstance(value, torch.Tensor) else value

    def _borrow_outputs(self, outputs: Any) -> Any:
        if isinstance(outputs, torch.Tensor):
            return self._borrow(outputs)
        if isinstance(outputs, (tuple, list)) and all(isinstance(o, torch.Tensor) for o in outputs):
            return tuple(map(self._borrow, outputs))
        raise CaptureError(f"a captured model must return a tensor or a tuple of tensors, got {type(outputs).__name__}")


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Turn any error of the block into a :class:`CaptureError` that says where it happened."""
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        if _out_of_memory(error):
            raise CaptureMemoryError(f"{where} must fit into device memory, got {error}") from error
        raise CaptureError(f"{where} must be capturable, got {type(error).__name__}: {error}") from error


def _out_of_memory(error: Exception) -> bool:
    """Of the allocator, or of the driver, which says so in the text of a ``RuntimeError`` alone."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()


def identity(value: Any) -> Any:
    """What must not change between capture and replay: address and shape of a tensor, or the value itself."""
    return (value.data_ptr(), value.shape) if isinstance(value, torch.Tensor) else value


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _compare(where: str, names: Iterable[str], before: Sequence[Any], values: Iterable[Any]) -> None:
    for name, old, new in zip(names, before, map(identity, values), strict=True):
        if old != new:
            raise StaleAddressError(f"{where} {name} must be {_shown(old)} as captured, got {_shown(new)}")


def _shown(value: Any) -> str:
    return f"{list(value[1])} at {value[0]:#x}" if isinstance(value, tuple) else repr(value)
