"""Inline assembly under Triton's interpreter: the few PTX instructions that kernels here use, on arrays of registers.

An unknown instruction or layout is an error, so that assembly never passes a test without having run.
"""

import re
from collections.abc import Callable

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_Registers = np.ndarray  # uint32, one element per instance of the assembly


def _bf16x2(a: _Registers, b: _Registers) -> _Registers:
    """Products of both halves, rounded to nearest even; subnormals kept."""
    left, right = (torch.from_numpy(r.view(np.int16).copy()).view(torch.bfloat16).float() for r in (a, b))
    product = (left * right).bfloat16()  # the product of two bf16 numbers is exact in fp32, but for its range
    return product.view(torch.int16).numpy().view(np.uint32)


_BINARY: dict[str, Callable[[_Registers, _Registers], _Registers]] = {
    "shl.b32": lambda a, b: a << b,
    "shr.b32": lambda a, b: a >> b,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
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
            registers[target] = _BINARY[name](*map(value, sources))
    return [registers[f"${i}"] for i in range(num_outputs)]


class _Results:
    def __init__(self, handles: list[interpreter.TensorHandle]) -> None:
        self.handles = handles

    def get_result(self, index: int) -> interpreter.TensorHandle:
        return self.handles[index]


def create_inline_asm(self, assembly, constraints, values, types, is_pure, pack) -> _Results:
    """For 16-bit elements, two to a register, in and out."""
    kinds = constraints.split(",")
    num_outputs = kinds.count("=r")
    assert pack == 2 and kinds == ["=r"] * num_outputs + ["r"] * len(values) and len(types) == num_outputs
    shape = values[0].data.shape
    assert all(v.data.shape == shape and v.data.itemsize == 2 for v in values) and all(
        t.scalar == tl.bfloat16 for t in types
    )
    packed = [np.ascontiguousarray(v.data).reshape(-1).view(np.uint32) for v in values]
    results = run(assembly, packed, num_outputs)
    handles = [interpreter.TensorHandle(r.view(np.uint16).reshape(shape), tl.bfloat16) for r in results]
    return _Results(handles)


def install() -> None:
    interpreter.InterpreterBuilder.create_inline_asm = create_inline_asm
