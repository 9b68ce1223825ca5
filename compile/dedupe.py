"""Which pieces are the same program: a structural key of every compiled piece.

Two pieces share a key when a program compiled for one computes the other from the other's inputs: the same ops (with
overloads) on the same arguments in the same order, scalars equal in type and value, inputs and outputs equal in dtype,
device, sizes, strides, alignment and in which of them share memory. Size symbols are renamed by first appearance, since
Dynamo may number the symbol of the same role differently; what is known of them (range, checks) is part of the key.
Parameters are inputs, so layers that differ in weights alone are the same program.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from . import inductor
from .split import Piece

CHECK = torch.ops.aten._assert_scalar.default  # its message quotes names that differ between equal programs
ALIGNMENT = 16  # bytes; a compiler may assume this much of an input that had it


def structural_key(piece: Piece, values: Mapping[str, Any]) -> str:
    """The key of ``piece`` as text: equal in every process for equal programs."""
    symbols = inductor.SymbolNames()
    lines = [piece.kind, *_input_lines([values[name] for name in piece.inputs], symbols)]
    indices: dict[fx.Node, int] = {}
    for node in piece.module.graph.nodes:
        indices[node] = len(indices)
        if node.op != "placeholder":
            args = node.args[:1] if node.target is CHECK else node.args
            arguments = [_argument(a, indices, symbols) for a in (args, node.kwargs)]
            lines.append(f"{node.op} {_target(node)} {arguments[0]} {arguments[1]} -> {_value(node, symbols)}")
    return "\n".join([*lines, *symbols.facts()])


def key_hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def distinct(pieces: Sequence[Piece], values: Mapping[str, Any]) -> dict[str, list[Piece]]:
    """Compiled pieces by structural key, in order of first appearance."""
    groups: dict[str, list[Piece]] = {}
    for piece in pieces:
        if piece.kind == "compiled":
            groups.setdefault(structural_key(piece, values), []).append(piece)
    return groups


def _input_lines(inputs: Sequence[Any], symbols: inductor.SymbolNames) -> list[str]:
    storages: dict[int, int] = {}
    tensors = [v for v in inputs if isinstance(v, torch.Tensor)]
    sharing = [inductor.storage_id(v) for v in tensors]
    lines = []
    for value in inputs:
        line = f"input {tensor_text(value, symbols)}"
        if isinstance(value, torch.Tensor):
            storage = inductor.storage_id(value)
            line += f" memory {storages.setdefault(storage, len(storages))} {_alignment(value)}"
            if sharing.count(storage) > 1:  # views of one memory: their distance matters too
                line += f" offset {symbols.text(value.storage_offset())}"
        lines.append(line)
    return lines


def _alignment(value: torch.Tensor) -> str:
    offset = value.storage_offset()
    return str(offset * value.element_size() % ALIGNMENT) if isinstance(offset, int) else "any"


def tensor_text(value: Any, symbols: inductor.SymbolNames) -> str:
    """Dtype, device, sizes, strides and gradient flag of a tensor; the text of a scalar."""
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {symbols.text(value)}"
    sizes, strides = ([symbols.text(s) for s in part] for part in (value.shape, value.stride()))
    flags = f"{value.layout} grad={value.requires_grad} conj={value.is_conj()} neg={value.is_neg()}"
    return f"{value.dtype} {value.device} [{', '.join(sizes)}] strides [{', '.join(strides)}] {flags}"


def _target(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, str):
        return target
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return f"{type(target).__name__} {target}"
    return f"{getattr(target, '__module__', None)}.{getattr(target, '__qualname__', repr(target))}"


def _argument(value: Any, indices: Mapping[fx.Node, int], symbols: inductor.SymbolNames) -> str:
    if isinstance(value, fx.Node):
        return f"%{indices[value]}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(_argument(v, indices, symbols) for v in value)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k!r}: {_argument(v, indices, symbols)}' for k, v in sorted(value.items()))}}}"
    if isinstance(value, slice):
        return f"slice{_argument((value.start, value.stop, value.step), indices, symbols)}"
    return f"{type(value).__name__} {symbols.text(value)}"


def _value(node: fx.Node, symbols: inductor.SymbolNames) -> str:
    value = node.meta.get("example_value")
    parts = value if isinstance(value, (list, tuple)) else [value]
    return "; ".join(tensor_text(p, symbols) for p in parts)
