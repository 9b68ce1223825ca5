"""Prewarm cases of ops with several specialisations name every launch, and every launch compiles ahead of time."""

from importlib import import_module

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from dsv4 import ops
from dsv4.ops import _triton
from dsv4.ops.shapes import nano, tiny

from .test_triton_aot import SMALL_FLASH, source

OPS = [
    name
    for name in (
        "qkv_rope_cache", "compressor_update", "compressor_partials", "compressor_merge", "indexer_query",
        "indexer_topk", "route_topk", "route_hash", "record_expert_load",
    )
    if ops.spec(name).cuda is not None
]  # fmt: skip


def launches(name, shape):
    """One recorded launch per key, and the keys of the cases; on the CPU, where nothing runs."""
    cases = import_module(f"dsv4.ops.{name}").cuda_cases(shape, torch.device("cpu"), 64)
    with _triton.recording() as calls:
        for case in cases:
            args, kwargs = case.arguments()
            ops.spec(name).cuda(*args, **kwargs)
    return {call.key: call for call in calls}, [case.key for case in cases]


@pytest.mark.parametrize("shape", [tiny, nano, SMALL_FLASH], ids=lambda s: s.name)
@pytest.mark.parametrize("name", OPS)
def test_cases_name_every_launch(name, shape):
    calls, keys = launches(name, shape)
    assert set(calls) == set(keys)
    assert len(keys) == len(set(keys))
    assert all(0 not in call.grid for call in calls.values())
    # the same key must mean the same binary
    with _triton.recording() as again:
        for case in import_module(f"dsv4.ops.{name}").cuda_cases(shape, torch.device("cpu"), 64):
            args, kwargs = case.arguments()
            ops.spec(name).cuda(*args, **kwargs)
    for call in again:
        assert binary(call) == binary(calls[call.key])


def binary(call):
    """What makes Triton compile another binary, alignment aside."""
    types = [str(a.dtype) if isinstance(a, torch.Tensor) else type(a).__name__ for a in call.args]
    return call.kernel, types, sorted(call.meta.items())


@pytest.mark.slow
@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("shape", [nano, SMALL_FLASH], ids=lambda s: s.name)
@pytest.mark.parametrize("name", OPS)
def test_cases_compile(name, shape, arch):
    for call in launches(name, shape)[0].values():
        options = {k: v for k, v in call.meta.items() if k in ("num_warps", "num_stages", "maxnreg")}
        compiled = triton.compile(source(call), target=GPUTarget("cuda", arch, 32), options=options)
        assert compiled.asm["cubin"]
