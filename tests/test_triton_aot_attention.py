"""Attention and indexer launches beyond one example call: storages, entry modes, fp32; the shared memory they take."""

from dataclasses import replace

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from dsv4 import ops
from dsv4.ops import _paged, _triton
from dsv4.ops.shapes import flash, nano

from .ops import contract
from .test_triton_aot import source

SMALL_FLASH = replace(flash, num_experts=4, vocab=1024)
SHARED_MEMORY = 227 << 10  # bytes that one program may use on sm_90 and sm_100; exceeding it only shows at the launch
ARCHS = [90, pytest.param(100, marks=pytest.mark.slow)]


def check_launch(name: str, args: tuple, kwargs: dict, arch: int) -> None:
    with _triton.recording() as calls:
        ops.spec(name).cuda(*args, **kwargs)
    assert calls
    for call in calls:
        options = {k: v for k, v in call.meta.items() if k in ("num_warps", "num_stages")}
        compiled = triton.compile(source(call), target=GPUTarget("cuda", arch, 32), options=options)
        assert compiled.asm["cubin"] and compiled.metadata.shared <= SHARED_MEMORY


def fp8_like(cache: torch.Tensor) -> torch.Tensor:
    pages, rows, dim = cache.shape
    return torch.zeros(pages, _paged.fp8_page_bytes(rows, dim), dtype=torch.uint8)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("entries", ["all", "picked"])
@pytest.mark.parametrize("fp8", [pytest.param(False, marks=pytest.mark.slow), True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("shape", [pytest.param(nano, marks=pytest.mark.slow), SMALL_FLASH], ids=lambda s: s.name)
def test_sparse_attention(shape, deterministic, fp8, entries, arch):
    args, options = contract.example(ops.spec("sparse_attention"), shape, 5, torch.bfloat16)
    if fp8:
        args = (args[0], fp8_like(args[1]), fp8_like(args[2]), *args[3:])
    check_launch("sparse_attention", args, {**options, "entries": entries, "deterministic": deterministic}, arch)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("query", [torch.bfloat16, pytest.param(torch.float8_e4m3fn, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("fp8", [pytest.param(False, marks=pytest.mark.slow), True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [pytest.param(nano, marks=pytest.mark.slow), SMALL_FLASH], ids=lambda s: s.name)
@pytest.mark.parametrize("deterministic", [True, False])
def test_indexer_logits(shape, deterministic, dtype, fp8, query, arch):
    args, options = contract.example(ops.spec("indexer_logits"), shape, 5, torch.bfloat16)
    args = (args[0].to(query), args[1], fp8_like(args[2]) if fp8 else args[2], *args[3:])
    check_launch("indexer_logits", args, {**options, "dtype": dtype, "deterministic": deterministic}, arch)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sparse_attention", "indexer_logits"])
def test_fp32(name):
    check_launch(name, *contract.example(ops.spec(name), nano, 5, torch.float32), 90)
