"""What was traced, cut and compiled, as data."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from . import inductor
from .split import Piece, SplitPlan, custom_op_name, op_name


@dataclass(frozen=True)
class PieceNodes:
    """Nodes of one distinct compiled piece, traced down to overloads.

    Attributes:
        ops: calls of custom ops, by qualified name.
        aten: what is left for the compiler, by qualified name.
    """

    ops: Mapping[str, int]
    aten: Mapping[str, int]


@dataclass(frozen=True)
class Seconds:
    """Time of the first call: Dynamo and splitting, compiling pieces, loading pieces."""

    trace: float
    compile: float
    load: float


@dataclass(frozen=True)
class CompileReport:
    """Result of one trace.

    Attributes:
        graph_breaks: always zero, as counted by Dynamo.
        num_pieces: compiled pieces and boundary regions.
        num_distinct_pieces: programs compiled.
        boundary_ops: boundary ops that occur in the trace, in order of first use.
        num_recompiles: calls refused because they needed another trace.
        op_calls: calls of each custom op in the whole trace.
        piece_nodes: per distinct compiled piece.
        cache_hits, cache_misses: pieces loaded from, and missing in, the artifact cache.
        plan: listing of the pieces that does not depend on the torch version.
    """

    graph_breaks: int
    num_pieces: int
    num_distinct_pieces: int
    boundary_ops: tuple[str, ...]
    num_recompiles: int
    op_calls: Mapping[str, int]
    piece_nodes: tuple[PieceNodes, ...]
    seconds: Seconds
    cache_hits: int
    cache_misses: int
    plan: str


def op_calls(plan: SplitPlan) -> dict[str, int]:
    return dict(Counter(name for piece in plan.pieces for name in piece.op_names))


def used_boundary_ops(plan: SplitPlan, boundary_ops: Sequence[str]) -> tuple[str, ...]:
    used = [name for piece in plan.pieces if piece.kind == "boundary" for name in piece.op_names]
    return tuple(dict.fromkeys(name for name in used if name in boundary_ops))


def count_nodes(piece: Piece, values: Mapping[str, Any]) -> PieceNodes:
    """Count the nodes of ``piece`` below Dynamo's level."""
    graph = inductor.aten_nodes(piece.module, [values[name] for name in piece.inputs]).graph
    names = [(custom_op_name(n.target), op_name(n.target)) for n in graph.nodes if n.op == "call_function"]
    ops = Counter(custom for custom, _ in names if custom is not None)
    aten = Counter(name for custom, name in names if custom is None and name is not None)
    return PieceNodes(dict(ops), dict(aten))


# --- listing --------------------------------------------------------------------------------------------------------


def plan_listing(plan: SplitPlan, groups: Sequence[Sequence[Piece]]) -> str:
    """Per piece: its kind, its program's number, and every custom op with what it takes, writes (``!``) and returns."""
    program = {piece.index: number for number, pieces in enumerate(groups) for piece in pieces}
    symbols = inductor.SymbolNames()
    lines = []
    for piece in plan.pieces:
        suffix = f" program {program[piece.index]}" if piece.index in program else ""
        lines.append(f"{piece.index} {piece.kind}{suffix}")
        lines += [f"    {_op_line(n, symbols)}" for n in piece.module.graph.nodes if custom_op_name(n.target)]
    return "\n".join(lines) + "\n"


def _op_line(node: fx.Node, symbols: inductor.SymbolNames) -> str:
    written = set(inductor.schema_writes(node))
    inputs = [_short(n.meta["example_value"], symbols) + "!" * (n in written) for n in node.all_input_nodes]
    value = node.meta["example_value"]
    outputs = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    returned = f" -> {', '.join(_short(v, symbols) for v in outputs)}" if outputs else ""
    return f"{custom_op_name(node.target)}({', '.join(inputs)}){returned}"


def _short(value: Any, symbols: inductor.SymbolNames) -> str:
    if not isinstance(value, torch.Tensor):
        return symbols.text(value)
    name = str(value.dtype).removeprefix("torch.")
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i")):
        name = name.replace(long, short)
    return f"{name}[{','.join(symbols.text(s) for s in value.shape)}]"
