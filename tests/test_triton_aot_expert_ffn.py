"""Every specialisation of the routed experts compiles ahead of time: all weight formats, small and large blocks."""

import importlib
from dataclasses import replace

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from dsv4 import ops
from dsv4.ops import _triton
from dsv4.ops.shapes import flash

from .test_triton_aot import source

OPTIONS = ("num_warps", "num_stages", "maxnreg")
SMALL_FLASH = replace(flash, hidden=512, expert_hidden=256)  # the tiles and formats of flash, in fewer steps
UNALIGNED = ("ids_ptr", "route_ptr", "scale_ptr")


def launches(shape, device="cpu"):
    """One launch of every key of the prewarm cases."""
    spec = ops.spec("expert_ffn")
    found = {}
    for case in importlib.import_module("dsv4.ops.expert_ffn").cuda_cases(shape, torch.device(device), 64):
        args, kwargs = case.arguments()
        with _triton.recording() as calls:
            spec.cuda(*args, **kwargs)
        assert case.key in {call.key for call in calls}
        found |= {call.key: call for call in calls}
    return found


def compile_for(call, arch):
    """Compile with the pointer alignment of a real launch: without it, loads are neither wide nor asynchronous."""
    code = source(call)
    names = [n for n in call.kernel.arg_names if n.endswith("_ptr") and n not in UNALIGNED]
    code.attrs = {(call.kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in names}
    options = {k: v for k, v in call.meta.items() if k in OPTIONS}
    return triton.compile(code, target=GPUTarget("cuda", arch, 32), options=options)


@pytest.mark.parametrize("arch", [90, 100])
def test_compiles(arch, monkeypatch):
    """Products use the matrix instructions of the architecture; small FP4 blocks leave room for two programs."""
    monkeypatch.setattr("dsv4.ops.expert_ffn_kernel._tensor_memory", lambda _: arch == 100)
    for key, call in launches(SMALL_FLASH).items():
        compiled = compile_for(call, arch)
        assert compiled.asm["cubin"]
        if key[1] in ("gate_up", "down"):
            assert ("wgmma.mma_async" if arch == 90 else "tcgen05.mma") in compiled.asm["ptx"], key
            assert "cp.async" in compiled.asm["ptx"] and ".ftz" not in compiled.asm["ptx"], key
            assert compiled.metadata.shared <= (100 if "uint8" in key and key[-1] < 128 else 220) * 1024, key


@pytest.mark.parametrize("arch", [90, 100])
def test_decoded_weights_of_few_rows_stay_in_registers(arch):
    """Weights come to shared memory on their own, and nothing but a few scales is written there between products."""
    products = {key: call for key, call in launches(flash, "meta").items() if key[1] in ("few_gate_up", "few_down")}
    assert len(products) == 2
    for key, call in products.items():
        compiled = compile_for(call, arch)
        between = compiled.asm["ptx"].split("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32")
        assert len(between) > 16 and "cp.async" in between[0], key
        assert sum(part.count("st.shared") for part in between[1:-1]) <= 8, key
        assert compiled.metadata.shared <= 48 * 1024 and ".ftz" not in compiled.asm["ptx"], key


@pytest.mark.parametrize("arch", [90, 100])
def test_kernels_around_deep_gemm_compile(arch, monkeypatch):
    kernel = importlib.import_module("dsv4.ops.expert_ffn_deep_gemm_kernel")
    monkeypatch.setattr(kernel._deep_gemm, "m_grouped_gemm_nt_contiguous", lambda *_: None)
    args, kwargs = kernel.arguments(replace(SMALL_FLASH, num_experts=3), 2, torch.device("cpu"))
    out = torch.empty(2, SMALL_FLASH.hidden)
    with _triton.recording() as calls:
        kernel.run(*args, out, kwargs["limit"])
    found = {call.key[1]: call for call in calls}
    assert found.keys() == {"count", "place", "gather", "activate", "sum_places"}
    for call in calls:
        compiled = compile_for(call, arch)
        assert compiled.asm["cubin"] and ".ftz" not in compiled.asm["ptx"]
