"""Inline assembly under Triton's interpreter: the few PTX instructions that kernels here use, on arrays of registers.

An unknown instruction or layout is an error, so that assembly never passes a test without having run.
"""

import re
from collections.abc import Callable

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_OUTPUTS = (tl.float16, tl.bfloat16)
_Registers = np.ndarray  # uint32, one element per instance of the assembly


def _bf16x2(a: _Registers, b: _Registers) -> _Registers:
    """Products of both halves, rounded to nearest even; subnormals kept."""
    left, right = (torch.from_numpy(r.view(np.int16).copy()).view(torch.bfloat16).float() for r in (a, b))
    product = (left * right).bfloat16()  # the product of two bf16 numbers is exact in fp32, but for its range
    return product.view(torch.int16).numpy().view(np.uint32)


def _prmt(a: _Registers, b: _Registers, selector: _Registers) -> _Registers:
    """Four bytes of ``a`` and ``b``, each chosen by a digit of ``selector``; digits from 8 on would spread signs."""
    assert not (selector & 0x8888).any()
    pool = np.stack([(word >> shift) & 0xFF for word in (a, b) for shift in np.uint32([0, 8, 16, 24])])
    chosen = [np.take_along_axis(pool, ((selector >> (4 * i)) & 7)[None].astype(np.int64), 0)[0] for i in range(4)]
    return sum((byte << np.uint32(8 * i) for i, byte in enumerate(chosen)), np.zeros_like(a))


def _lop3(a: _Registers, b: _Registers, c: _Registers, table: _Registers) -> _Registers:
    """The function of three bits whose value is bit ``4a + 2b + c`` of ``table``, on every bit."""
    result = np.zeros_like(a)
    for row in range(8):
        match = (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        result |= match * ((table >> np.uint32(row)) & 1)
    return result


_OPERATIONS: dict[str, Callable[..., _Registers]] = {
    "shl.b32": lambda a, b: a << b,
    "shr.b32": lambda a, b: a >> b,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "mul.rn.bf16x2": _bf16x2,
}


def run(assembly: str, inputs: list[_Registers], num_outputs: int) -> list[_Registers]:
    """Registers ``$0`` … of the outputs, given those of the inputs, which follow them."""
    registers = {f"${num_outputs + i}": value for i, value in enumerate(inputs)}
    count = inputs[0].shape[0]

    def value(operand: str) -> _Registers:
        if re.fullmatch(r"\d+|0x[0-9A-Fa-f]+", operand):
            return np.full(count, int(operand, 0), np.uint32)
        return registers[operand]

    for line in assembly.replace("{", "").replace("}", "").split(";"):
        name, _, operands = line.strip().partition(" ")
        target, *sources = (operand.strip() for operand in operands.split(","))
        if not name or name == ".reg":
            continue
        if name == "mov.b32":
            registers[target] = value(sources[0])
        else:
            registers[target] = _OPERATIONS[name](*map(value, sources))
    return [registers[f"${i}"] for i in range(num_outputs)]


class _Results:
    def __init__(self, handles: list[interpreter.TensorHandle]) -> None:
        self.handles = handles

    def get_result(self, index: int) -> interpreter.TensorHandle:
        return self.handles[index]


def create_inline_asm(self, assembly, constraints, values, types, is_pure, pack) -> _Results:
    """For elements of 8 and 16 bits that fill whole registers, in and out."""
    kinds = constraints.split(",")
    out_width = [pack * t.scalar.primitive_bitwidth // 32 for t in types]
    in_width = [pack * v.data.itemsize // 4 for v in values]
    shape = values[0].data.shape
    assert kinds == ["=r"] * sum(out_width) + ["r"] * sum(in_width) and min(*out_width, *in_width) > 0
    assert all(v.data.shape == shape for v in values) and all(t.scalar in _OUTPUTS for t in types)
    packed = [np.ascontiguousarray(v.data).reshape(-1).view(np.uint32).reshape(-1, n) for v, n in zip(values, in_width)]
    results = run(assembly, [np.ascontiguousarray(r) for p in packed for r in p.T], sum(out_width))
    handles = []
    for kind, width in zip(types, out_width):
        registers, results = np.stack(results[:width], axis=1), results[width:]
        handles.append(interpreter.TensorHandle(registers.view(np.uint16).reshape(shape), kind.scalar))
    return _Results(handles)


def install() -> None:
    interpreter.InterpreterBuilder.create_inline_asm = create_inline_asm
