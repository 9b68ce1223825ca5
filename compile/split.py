"""Cut one Dynamo graph into compiled pieces and eager boundary regions, in the original order.

A *boundary op* is a node whose op is named by the caller (``"namespace::op"``). Consecutive boundary ops form one
region; nodes between two of them that launch no kernel (views that only feed boundary ops, size arithmetic, size
checks) join it. Everything else forms compiled pieces. Values cross pieces as tensors or sizes; size arithmetic is
repeated where it is needed rather than passed.

Errors: ``NotImplementedError`` if a piece would have to pass another kind of value, for a graph with control-flow
sub-graphs, and if a later piece would write a tensor that shares memory with a second output of a compiled piece (a
compiler need not keep two outputs of one piece in one storage).
"""

import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from . import inductor

Kind = Literal["compiled", "boundary"]

SCALARS = (int, float, torch.SymInt, torch.SymBool, torch.SymFloat)
VIEWS = frozenset(
    "getitem view view_as reshape flatten unflatten narrow select slice unsqueeze squeeze transpose permute t "
    "expand detach split chunk unbind as_strided".split()
)


@dataclass(frozen=True)
class Piece:
    """A run of nodes of the trace.

    Attributes:
        kind: ``compiled``, or ``boundary`` for a region that runs eagerly.
        module: takes ``inputs`` in order and returns a tuple of ``outputs``.
        inputs, outputs: names of values in the plan.
        op_names: qualified names of the custom ops called, in order.
    """

    index: int
    kind: Kind
    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    op_names: tuple[str, ...]


@dataclass(frozen=True)
class SplitPlan:
    """Pieces in execution order.

    Attributes:
        inputs: names of the arguments of the graph, in its order.
        constants: tensors that the graph itself holds.
        outputs: what the graph returns: names of values wrapped in :class:`Name`, or constants.
        values: fake tensor or size of every named value.
    """

    pieces: tuple[Piece, ...]
    inputs: tuple[str, ...]
    constants: Mapping[str, torch.Tensor]
    outputs: tuple[Any, ...]
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Name:
    """A value in ``SplitPlan.outputs``."""

    name: str


def op_name(target: Any) -> str | None:
    """``namespace::op`` of an op or one of its overloads; None for anything else."""
    if not isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return None
    namespace, name = str(target).split(".")[:2]
    return f"{namespace}::{name}"


def custom_op_name(target: Any) -> str | None:
    """Like :func:`op_name`, and None for torch's own ops."""
    name = op_name(target)
    return None if name is None or name.split("::")[0] in {"aten", "prims", "prim", "higher_order"} else name


def split(graph_module: fx.GraphModule, recording: inductor.Recording, boundary_ops: Sequence[str]) -> SplitPlan:
    """Cut ``graph_module`` at ``boundary_ops``; ``recording`` holds its fake values."""
    graph, values = graph_module.graph, recording.values
    constants = {n: _constant(graph_module, n) for n in graph.nodes if n.op == "get_attr"}
    groups = _groups(graph, values, frozenset(boundary_ops))
    names = _names(graph, values)
    builder = _Builder(graph, values, names)
    pieces = [builder.piece(kind, nodes) for kind, nodes in groups]
    pieces = [p for p in pieces if p is not None]
    _check_shared_outputs(pieces, builder.node_lists, recording, names)
    (output,) = (n for n in graph.nodes if n.op == "output")
    return SplitPlan(
        pieces=tuple(pieces),
        inputs=tuple(names[n] for n in graph.nodes if n.op == "placeholder"),
        constants={names[n]: t for n, t in constants.items()},
        outputs=tuple(Name(names[a]) if isinstance(a, fx.Node) else a for a in output.args[0]),
        values={name: values[n] for n, name in names.items()},
    )


def _constant(graph_module: fx.GraphModule, node: fx.Node) -> torch.Tensor:
    value = operator.attrgetter(str(node.target))(graph_module)
    if not isinstance(value, torch.Tensor):
        raise NotImplementedError(
            f"a model must not hold control flow, got {node.target} of type {type(value).__name__} in its trace"
        )
    return value


def _names(graph: fx.Graph, values: Mapping[fx.Node, Any]) -> dict[fx.Node, str]:
    """``a`` arguments, ``n`` argument sizes, ``k`` constants, ``v`` intermediates: independent of Dynamo's names."""
    counts = {"a": 0, "n": 0, "k": 0, "v": 0}
    names = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder":
            letter = "a" if isinstance(values[node], torch.Tensor) else "n"
        else:
            letter = "k" if node.op == "get_attr" else "v"
        names[node] = f"{letter}{counts[letter]}"
        counts[letter] += 1
    return names


# --- grouping -------------------------------------------------------------------------------------------------------


def _groups(graph: fx.Graph, values: Mapping[fx.Node, Any], boundary_ops: Set[str]) -> list[tuple[Kind, list[fx.Node]]]:
    """Nodes that compute, in order, as alternating compiled and boundary groups."""
    calls = [n for n in graph.nodes if n.op in {"call_function", "call_method", "call_module"}]
    unpacked = {n: _producer(n, values) for n in calls if _producer(n, values) is not None}
    boundary = {n for n in calls if op_name(n.target) in boundary_ops}
    groups: list[tuple[Kind, list[fx.Node]]] = []
    for is_boundary, run in _runs([n for n in calls if n not in unpacked], boundary):
        last_is_boundary = bool(groups) and groups[-1][0] == "boundary"
        if is_boundary or (boundary and all(_joins_boundary(n, values, boundary) for n in run)):
            if last_is_boundary:
                groups[-1][1].extend(run)
            else:
                groups.append(("boundary", run))
        else:
            groups.append(("compiled", run))
    home = {n: nodes for _, nodes in groups for n in nodes}
    for node, producer in unpacked.items():  # parts of a tuple stay with the op that returns it
        home[node] = home[producer]
        home[producer].append(node)
    order = {n: i for i, n in enumerate(calls)}
    return [(kind, sorted(nodes, key=order.__getitem__)) for kind, nodes in groups]


def _runs(nodes: list[fx.Node], boundary: Set[fx.Node]) -> Iterator[tuple[bool, list[fx.Node]]]:
    run: list[fx.Node] = []
    for node in nodes:
        if run and (node in boundary) != (run[-1] in boundary):
            yield run[-1] in boundary, run
            run = []
        run.append(node)
    if run:
        yield run[-1] in boundary, run


def _producer(node: fx.Node, values: Mapping[fx.Node, Any]) -> fx.Node | None:
    """The op whose tuple ``node`` takes apart, if that is what it does."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        if not isinstance(values[node.args[0]], torch.Tensor):
            return node.args[0]
    return None


def _joins_boundary(node: fx.Node, values: Mapping[fx.Node, Any], boundary: Set[fx.Node]) -> bool:
    """Whether ``node`` launches no kernel and nothing but boundary ops needs it."""
    value = values[node]
    if isinstance(value, SCALARS):
        return custom_op_name(node.target) is None
    if value is None:  # a size check; with a tensor among its inputs it may be a write (setitem)
        return not any(isinstance(values[i], torch.Tensor) for i in node.all_input_nodes)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "").split(".")[0]
    if name not in VIEWS or not _is_alias(node, values):
        return False
    return all(user in boundary or _joins_boundary(user, values, boundary) for user in node.users)


def _is_alias(node: fx.Node, values: Mapping[fx.Node, Any]) -> bool:
    sources = {inductor.storage_id(values[i]) for i in node.all_input_nodes if isinstance(values[i], torch.Tensor)}
    parts = values[node] if isinstance(values[node], (list, tuple)) else [values[node]]
    return all(isinstance(p, torch.Tensor) and inductor.storage_id(p) in sources for p in parts)


# --- building -------------------------------------------------------------------------------------------------------


class _Builder:
    def __init__(self, graph: fx.Graph, values: Mapping[fx.Node, Any], names: Mapping[fx.Node, str]) -> None:
        self.values, self.names = values, names
        self.node_lists: list[list[fx.Node]] = []
        self.order = {n: i for i, n in enumerate(graph.nodes)}
        self.symbols = {
            name: n
            for n in graph.nodes
            if n.op == "placeholder" and inductor.is_symbol(values[n])
            for name in inductor.symbols_of(values[n])
        }

    def piece(self, kind: Kind, nodes: list[fx.Node]) -> Piece | None:
        """The piece of ``nodes``, or None if nothing would be left of it."""
        members = set(nodes)
        outputs = [n for n in nodes if any(u not in members for u in n.users) and not self._is_size(n)]
        kept = [n for n in nodes if not self._is_size(n)]
        if not kept:
            return None
        needed, inputs = self._needs(kept)
        if kind == "compiled":
            symbols = self._symbol_inputs(inputs, [*inputs, *kept])
            inputs = symbols + [n for n in inputs if n not in symbols]
        for node in outputs:
            if not isinstance(self.values[node], (torch.Tensor, torch.SymInt, int)):
                raise NotImplementedError(
                    f"values that cross pieces must be tensors or sizes, got {type(self.values[node]).__name__} "
                    f"from {node.target}"
                )
        self.node_lists.append(kept)
        module = self._module(inputs, sorted({*needed, *kept}, key=self.order.__getitem__), outputs)
        return Piece(
            index=len(self.node_lists) - 1,
            kind=kind,
            module=module,
            inputs=tuple(self.names[n] for n in inputs),
            outputs=tuple(self.names[n] for n in outputs),
            op_names=tuple(name for n in kept if (name := custom_op_name(n.target)) is not None),
        )

    def _is_plain_size(self, node: fx.Node) -> bool:
        return node.op == "placeholder" and inductor.is_symbol(self.values[node])

    def _is_size(self, node: fx.Node) -> bool:
        """Arithmetic on sizes alone: repeated in every piece that needs it."""
        value = self.values[node]
        if node.op != "call_function" or not isinstance(value, SCALARS) or any(u.op == "output" for u in node.users):
            return False
        return all(self._is_plain_size(i) or self._is_size(i) for i in node.all_input_nodes)

    def _needs(self, kept: list[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
        """Size arithmetic to repeat, and values to take as inputs, in order of first use."""
        repeated: dict[fx.Node, None] = {}
        inputs: dict[fx.Node, None] = {}
        members = set(kept)

        def visit(node: fx.Node) -> None:
            for source in node.all_input_nodes:
                if source in members or source in repeated or source in inputs:
                    continue
                if self._is_size(source):
                    repeated[source] = None
                    visit(source)
                else:
                    inputs[source] = None

        for node in kept:
            visit(node)
        return list(repeated), list(inputs)

    def _symbol_inputs(self, inputs: list[fx.Node], nodes: list[fx.Node]) -> list[fx.Node]:
        """The arguments that carry the size symbols of ``nodes``: a piece may see a symbol only inside ``u0 - 1``."""
        symbols: dict[fx.Node, None] = {}
        for node in nodes:
            names = inductor.symbols_of(self.values[node])
            symbols.update(dict.fromkeys(self.symbols[s] for s in names if s in self.symbols))
        symbols.update(dict.fromkeys(n for n in inputs if self._is_plain_size(n)))
        return list(symbols)

    def _module(self, inputs: list[fx.Node], body: list[fx.Node], outputs: list[fx.Node]) -> fx.GraphModule:
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for i, node in enumerate(inputs):
            copies[node] = graph.placeholder(f"i{i}")
        for node in body:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        for node, copy in copies.items():
            copy.meta = {"example_value": self.values[node]}
        graph.output(tuple(copies[n] for n in outputs))
        return fx.GraphModule(torch.nn.Module(), graph)


# --- memory ---------------------------------------------------------------------------------------------------------


def _check_shared_outputs(
    pieces: Sequence[Piece],
    node_lists: Sequence[list[fx.Node]],
    recording: inductor.Recording,
    names: Mapping[fx.Node, str],
) -> None:
    by_name = {name: recording.values[n] for n, name in names.items()}
    owners: dict[int, Piece] = {}  # storages made in a compiled piece of which several outputs are views
    for piece, nodes in zip(pieces, node_lists, strict=True):
        for node in nodes:
            for written in recording.writes[node]:
                owner = owners.get(inductor.storage_id(recording.values[written]))
                if owner is not None and owner is not piece:
                    raise NotImplementedError(
                        f"a tensor that {op_name(node.target) or node.target} writes must not share memory with "
                        f"another value that leaves piece {owner.index}: clone one, or take the view after the write"
                    )
        if piece.kind == "compiled":
            given = {inductor.storage_id(by_name[i]) for i in piece.inputs if isinstance(by_name[i], torch.Tensor)}
            made = [inductor.storage_id(by_name[o]) for o in piece.outputs if isinstance(by_name[o], torch.Tensor)]
            owners.update({s: piece for s in made if made.count(s) > 1 and s not in given})
