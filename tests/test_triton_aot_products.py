"""Every specialisation that the prewarm of the products and quantisers names compiles, with aligned pointers."""

import importlib

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dsv4 import ops
from dsv4.ops import _triton
from dsv4.ops.shapes import Shape, flash, tiny

from .test_triton_aot import source

OPS = ("quant_fp8", "linear", "fp8_linear", "fp8_linear_decoded", "grouped_o_proj", "quant_fp4", "shared_expert")
META = torch.device("meta")


def launches(shape: Shape) -> dict[tuple, _triton.Launch]:
    """The launch of every prewarm key of the ops above."""
    found = {}
    for name in OPS:
        for case in importlib.import_module(f"dsv4.ops.{name}").cuda_cases(shape, META, 300):
            args, kwargs = case.arguments()
            with _triton.recording() as calls:
                ops.spec(name).cuda(*args, **kwargs)
            found |= {call.key: call for call in calls}
            assert case.key in found
    return found


def compiled(call: _triton.Launch, arch: int):
    plain = source(call)
    pointers = [i for i, value in enumerate(call.args) if isinstance(value, torch.Tensor)]
    attributes = {(i,): [["tt.divisibility", 16]] for i in pointers}
    aligned = ASTSource(fn=plain.fn, signature=plain.signature, constexprs=plain.constants, attrs=attributes)
    options = {k: v for k, v in call.meta.items() if k in ("num_warps", "num_stages")}
    return triton.compile(aligned, target=GPUTarget("cuda", arch, 32), options=options)


@pytest.mark.parametrize("arch", [90, pytest.param(100, marks=pytest.mark.slow)])
def test_flash(arch):
    """Products of several rows run on the tensor cores, and all of them load 16 bytes at a time."""
    seen = launches(flash)
    assert len(seen) < 50
    for key, call in seen.items():
        kernel = compiled(call, arch)
        assert kernel.asm["cubin"]
        if key[0] in ("linear", "fp8_linear", "grouped_o_proj"):
            assert ("wgmma.mma_async" if arch == 90 else "tcgen05.mma") in kernel.asm["ptx"]
            assert "mma.sync" not in kernel.asm["ptx"].replace("wgmma.mma_async.sync", "")
            assert "cp.async.cg.shared.global" in kernel.asm["ptx"] and "st.global.v4" in kernel.asm["ptx"]
            assert kernel.metadata.shared <= 227 * 1024
        if key[0].startswith("one_row"):  # every thread's loads at once, no staging
            assert "ld.global.L1::evict_first.L2::cache_hint.v4.b32" in kernel.asm["ptx"]
            assert "cp.async" not in kernel.asm["ptx"] and "mma" not in kernel.asm["ptx"].split(".entry")[1]
            assert kernel.metadata.shared <= 2 * 1024
        if key[0].startswith("few_rows"):  # 16 rows of weight are too few for wgmma
            assert "mma.sync.aligned.m16n8k16" in kernel.asm["ptx"]
            assert "cp.async.cg.shared.global" in kernel.asm["ptx"]
            assert kernel.metadata.shared <= 113 * 1024  # two programs per multiprocessor


@pytest.mark.slow
@pytest.mark.parametrize("arch", [90, 100])
def test_odd_sizes(arch):
    for call in launches(tiny).values():
        assert compiled(call, arch).asm["cubin"]
