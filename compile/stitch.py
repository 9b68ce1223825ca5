"""One flat Python function that calls the pieces of a plan in order.

Nested modules would cost a frame and an attribute look-up per piece and keep every intermediate alive until the end;
the generated function names each value once and deletes it after its last use.
"""

import linecache
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .split import Name, Piece, SplitPlan

WIDTH = 110


@dataclass(frozen=True)
class Stitched:
    """The flat function and its text.

    Attributes:
        call: takes the arguments of the graph in its order, returns its outputs as a tuple.
        source: what ``call`` executes.
    """

    call: Callable[..., tuple[Any, ...]]
    source: str


def stitch(plan: SplitPlan, calls: Sequence[Callable[..., Any]]) -> Stitched:
    """Generate the flat function of ``plan``; ``calls[i]`` executes ``plan.pieces[i]``."""
    if len(calls) != len(plan.pieces):
        raise ValueError(f"calls must have one entry per piece ({len(plan.pieces)}), got {len(calls)}")
    source = _source(plan)
    namespace: dict[str, Any] = {_call_name(p): call for p, call in zip(plan.pieces, calls, strict=True)}
    namespace.update(plan.constants)
    filename = f"<dsv4 stitched {id(namespace):x}>"
    exec(compile(source, filename, "exec"), namespace)
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)  # for tracebacks
    return Stitched(namespace["step"], source)


def _call_name(piece: Piece) -> str:
    return f"{'piece' if piece.kind == 'compiled' else 'boundary'}_{piece.index}"


def _source(plan: SplitPlan) -> str:
    last_use = _last_uses(plan)
    lines = [_wrapped("def step(", plan.inputs, "):", indent=0)]
    for piece in plan.pieces:
        if piece.kind == "boundary":
            lines.append(f"    # {', '.join(piece.op_names)}")
        assigned = ""
        if piece.outputs:
            assigned = f"({piece.outputs[0]},) = " if len(piece.outputs) == 1 else f"{', '.join(piece.outputs)} = "
        lines.append(_wrapped(f"{assigned}{_call_name(piece)}(", piece.inputs, ")", indent=4))
        dead = [n for n in dict.fromkeys((*piece.inputs, *piece.outputs)) if last_use.get(n) == piece.index]
        if dead:
            lines.append(f"    del {', '.join(dead)}")
    returned = ", ".join(o.name if isinstance(o, Name) else repr(o) for o in plan.outputs)
    lines.append(f"    return ({returned}{',' if returned else ''})")
    return "\n".join(lines) + "\n"


def _wrapped(head: str, names: Sequence[str], tail: str, *, indent: int) -> str:
    """``head name, name tail`` on one line, or the names on lines of their own."""
    margin = " " * indent
    line = f"{margin}{head}{', '.join(names)}{tail}"
    if len(line) <= WIDTH:
        return line
    inner = margin + "    "
    body = textwrap.fill(", ".join(names), WIDTH, initial_indent=inner, subsequent_indent=inner)
    return f"{margin}{head}\n{body}\n{margin}{tail}"


def _last_uses(plan: SplitPlan) -> Mapping[str, int]:
    """Index of the last piece that uses each intermediate value that the graph does not return."""
    made = {name for piece in plan.pieces for name in piece.outputs}
    returned = {o.name for o in plan.outputs if isinstance(o, Name)}
    return {
        name: piece.index
        for piece in plan.pieces
        for name in (*piece.inputs, *piece.outputs)
        if name in made and name not in returned
    }
