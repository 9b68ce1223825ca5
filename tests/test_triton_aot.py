"""Every Triton launch of every op compiles ahead of time for sm_90 and sm_100; no GPU is needed."""

from dataclasses import replace

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dsv4 import ops
from dsv4.ops import _triton
from dsv4.ops.shapes import flash, nano

from .ops import contract

SMALL_FLASH = replace(flash, num_experts=8, vocab=1024)  # widths decide what is compiled, counts only cost memory
SPECS = [s for s in ops.specs().values() if s.cuda is not None and s.name != "pcp_moe_shard"]  # launches other ops
_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


def source(call: _triton.Launch) -> ASTSource:
    names = list(call.kernel.arg_names)
    values = dict(zip(names, call.args, strict=False))
    options = {k: v for k, v in call.meta.items() if k not in ("num_warps", "num_stages", "maxnreg")}
    constants = {k: v for k, v in options.items()}
    signature = {name: "constexpr" if name in constants else _type(values[name]) for name in names}
    return ASTSource(
        fn=call.kernel, signature=signature, constexprs={(names.index(k),): v for k, v in constants.items()}
    )


def _type(value) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("shape", [nano, pytest.param(SMALL_FLASH, marks=pytest.mark.slow)], ids=lambda s: s.name)
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_compiles(spec, shape, arch):
    with _triton.recording() as calls:
        for dtype in (torch.bfloat16,):
            args, kwargs = contract.example(spec, shape, 5, dtype)
            spec.cuda(*args, **kwargs)
    distinct = {call.key: call for call in calls}
    for call in distinct.values():
        options = {k: v for k, v in call.meta.items() if k in ("num_warps", "num_stages", "maxnreg")}
        compiled = triton.compile(source(call), target=GPUTarget("cuda", arch, 32), options=options)
        assert compiled.asm["cubin"]
