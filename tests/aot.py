"""Every Triton specialisation that the ops enumerate, compiled ahead of time for GPUs that are not there.

The call of every prewarm case is made on tensors without memory, at the model's own widths. Its launches are recorded
and each is given, with the arguments and constants that it has, to its kernel's ``warmup``, under a driver that only
names an architecture: types, alignment and constants are what Triton itself reads off the launch, and so is the binary.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from dsv4 import ops
from dsv4.ops import _backends, _deep_gemm, _triton, expert_ffn_kernel
from dsv4.ops._registry import PrewarmCase
from dsv4.ops._runtime import Key
from dsv4.ops.shapes import Shape, flash, nano, pro, tiny

MAX_TOKENS = 8192
SHARED_MEMORY = 227 << 10  # bytes that one program may use on sm_90 and sm_100; exceeding it only shows at the launch
SHAPES = [flash, *(pytest.param(shape, marks=pytest.mark.slow) for shape in (pro, nano, tiny))]
SPECS = [s for s in ops.specs().values() if s.cuda is not None and s.name != "pcp_moe_shard"]  # launches other ops
_READS_VALUES = ("sparse_attention",)  # its example picks entries by their scores

Kernel = Any  # what Triton compiled
Kernels = dict[Key, Kernel]
_compiled: dict[int, Kernels] = {}  # of this process, by architecture


class _Driver:
    """What Triton asks of a driver before it compiles; it keeps kernels by device, so every architecture is one."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)


@contextmanager
def architecture(arch: int) -> Iterator[None]:
    """Dispatch and compile as on a GPU of compute capability ``arch``."""
    blackwell = patch.object(expert_ffn_kernel, "_tensor_memory", lambda _: arch >= 100)
    with patch.object(driver, "_active", _Driver(arch)), blackwell:
        yield


@contextmanager
def _by_deep_gemm() -> Iterator[None]:
    """Dispatch to DeepGEMM, whose own products do nothing here."""
    product = patch.multiple(_deep_gemm, num_sms=lambda: 132, m_grouped_gemm_nt_contiguous=lambda *_: None)
    with patch.dict(_backends._chosen, {"gemm": "deep_gemm"}), product:
        yield


def cases(spec: ops.OpSpec, shape: Shape) -> list[PrewarmCase]:
    """What ``spec`` lists for our own kernels."""
    device = torch.device("cpu" if spec.name in _READS_VALUES else "meta")
    return list(spec.cuda_cases(shape, device, MAX_TOKENS))


def launches(listed: Iterable[PrewarmCase]) -> list[_triton.Launch]:
    """Everything that the calls of the cases launch."""
    with _triton.recording() as calls:
        for case in listed:
            args, kwargs = case.arguments()
            ops.spec(case.op).cuda(*args, **kwargs)
    return calls


def compiled(calls: Iterable[_triton.Launch], arch: int) -> Kernels:
    """Kernels of the launches; those of one key must be one binary, whichever op and case they come from."""
    known, found = _compiled.setdefault(arch, {}), {}
    for call in calls:
        assert 0 not in call.grid, f"{call.key} would launch nothing"
        kernel = call.kernel.warmup(*call.args, grid=call.grid, **call.meta)
        assert known.setdefault(call.key, kernel) is kernel, f"{call.key} names two binaries"
        found[call.key] = kernel
    return found


def compile_op(spec: ops.OpSpec, shape: Shape, arch: int) -> Kernels:
    """Compile all that ``spec`` enumerates; fails where a key is not launched, or a launch not listed."""
    with architecture(arch):
        return _compile_cases(spec, cases(spec, shape), arch)


def compile_beside_deep_gemm(spec: ops.OpSpec, shape: Shape, arch: int) -> Kernels:
    """The same of models with FP8 experts, all products of which DeepGEMM serves; its own keys are left out."""
    with architecture(arch), _by_deep_gemm():
        listed = cases(spec, replace(shape, expert_dtype="fp8"))
        return _compile_cases(spec, [case for case in listed if case.key[0] != "deep_gemm"], arch)


def _compile_cases(spec: ops.OpSpec, listed: list[PrewarmCase], arch: int) -> Kernels:
    found, keys = compiled(launches(listed), arch), {case.key for case in listed}
    assert keys == found.keys(), f"{spec.name} lists {keys - found.keys()} and launches {found.keys() - keys} besides"
    return found


def check_all_compiled(shape: Shape, arch: int) -> None:
    """Every key that the registry's ops enumerate has a kernel, by whatever test; compiles what no test has so far."""
    with architecture(arch):
        keys = {case.key for spec in ops.specs().values() if spec.cuda for case in cases(spec, shape)}
    for spec in SPECS:
        compile_op(spec, shape, arch)
    missing = keys - _compiled[arch].keys()
    assert len(keys) > 100 and not missing, f"{len(missing)} of {len(keys)} keys are not compiled: {missing}"


def check(key: Key, kernel: Kernel, shape: Shape, arch: int) -> None:
    """The kernel assembles and fits, and at the widths of the published models uses the hardware as intended."""
    assert kernel.asm["cubin"], key
    assert kernel.metadata.shared <= SHARED_MEMORY, f"{key} takes {kernel.metadata.shared} bytes of shared memory"
    if shape.hidden < flash.hidden:
        return
    ptx, products = kernel.asm["ptx"], "wgmma.mma_async" if arch == 90 else "tcgen05.mma"
    if key[0] in ("linear", "fp8_linear", "grouped_o_proj"):  # tiles of rows: 16 bytes at a time, on the tensor cores
        assert products in ptx and "mma.sync" not in ptx.replace("wgmma.mma_async.sync", ""), key
        assert "cp.async.cg.shared.global" in ptx and "st.global.v4" in ptx, key
    if key[0].startswith("one_row"):  # every thread's loads at once, no staging
        assert "ld.global.L1::evict_first.L2::cache_hint.v4.b32" in ptx, key
        assert "cp.async" not in ptx and "mma" not in ptx.split(".entry")[1], key
        assert kernel.metadata.shared <= 2 * 1024, key
    if key[0].startswith("few_rows"):  # 16 rows of weight are too few for wgmma; two programs per multiprocessor
        assert "mma.sync.aligned.m16n8k16" in ptx and "cp.async.cg.shared.global" in ptx, key
        assert kernel.metadata.shared <= 113 * 1024, key
    if key[0] == "expert_ffn":
        assert ".ftz" not in ptx, key
        _check_experts(key, ptx, kernel.metadata.shared, products)


def _check_experts(key: Key, ptx: str, shared: int, products: str) -> None:
    if key[1] in ("gate_up", "down"):  # small FP4 blocks leave room for two programs
        assert products in ptx and "cp.async" in ptx, key
        assert shared <= (100 if "uint8" in key and key[-1] < 128 else 220) * 1024, key
    if key[1] in ("few_gate_up", "few_down"):
        # decoded weights stay in registers: weights come to shared memory on their own, and nothing but a few scales
        # is written there between products
        between = ptx.split("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32")
        assert len(between) > 16 and "cp.async" in between[0], key
        assert sum(part.count("st.shared") for part in between[1:-1]) <= 8, key
        assert shared <= 48 * 1024, key
