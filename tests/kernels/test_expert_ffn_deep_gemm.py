"""FP8 experts around DeepGEMM: what the grouped product is given, and what becomes of its result.

A stand-in takes the library's place. It checks the layout that the library documents, multiplies in torch, and leaves
NaN where the library leaves nothing defined.
"""

import importlib
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from dsv4 import ops
from dsv4.ops import _backends, _deep_gemm, _formats, _runtime, _triton, expert_ffn_deep_gemm_kernel as kernel
from dsv4.ops.shapes import flash, nano, tiny

from ..ops import moe_numpy as moe
from . import interpreter

interpreter.repair()
SPEC = ops.spec("expert_ffn")
NUM_SMS = 132
SIZES = (256, 128)  # hidden, inner
BOUND = 1e-3  # as for the other kernels: a sum on the other side of a rounding boundary moves one code
RUN = 128


class Library:
    """Stand-in of ``deep_gemm``."""

    __version__ = _deep_gemm.RELEASE

    def __init__(self) -> None:
        self.rows: list[int] = []

    def get_num_sms(self) -> int:
        return NUM_SMS

    def m_grouped_fp8_gemm_nt_contiguous(self, x, weight, out, groups, *, recipe, compiled_dims) -> None:
        (x, x_scale), (weight, weight_scale) = x, weight
        (rows, cols), (experts, features, _) = x.shape, weight.shape
        assert recipe == (1, 128, 128) and compiled_dims == ""
        assert x.dtype == weight.dtype == torch.float8_e4m3fn and x.is_contiguous() and weight.is_contiguous()
        assert x_scale.shape == (rows, cols // 128) and x_scale.stride() == (1, rows) and rows % RUN == 0
        assert weight.shape == (experts, features, cols)
        assert weight_scale.shape == (experts, -(-features // 128), cols // 128) and weight_scale.is_contiguous()
        assert out.shape == (rows, features) and out.dtype == torch.bfloat16 and out.is_contiguous()
        assert groups.shape == (rows,) and groups.dtype == torch.int32
        runs = groups.view(-1, RUN)
        assert (runs == runs[:, :1]).all(), "a run of 128 rows must have one group"
        owners = runs[:, 0]
        used = int((owners >= 0).sum())
        assert (owners[used:] == -1).all() and (owners[: max(used - 1, 0)] <= owners[1:used]).all()
        assert (owners < experts).all()
        self.rows.append(rows)
        out.fill_(float("nan"))
        values = _formats.dequantize_fp8(x, x_scale)
        for run, owner in enumerate(owners[:used].tolist()):
            span = slice(run * RUN, (run + 1) * RUN)
            matrix = _formats.dequantize_fp8_weight(weight[owner], weight_scale[owner])
            out[span] = (values[span].double() @ matrix.double().T).bfloat16()  # no order of summation shows


@pytest.fixture
def library(monkeypatch):
    """The stand-in serves FP8 products; what ``torch.empty`` gives is NaN."""
    found = Library()
    monkeypatch.setitem(sys.modules, "deep_gemm", found)
    monkeypatch.setattr(_deep_gemm, "library", lambda: found)
    monkeypatch.setattr(_runtime, "_warm", set())
    empty = torch.empty

    def poisoned(*size, **options):
        out = empty(*size, **options)
        if out.device.type == "meta":
            return out
        if out.dtype == torch.float8_e4m3fn:
            out.view(torch.uint8).fill_(0x7F)
        elif out.dtype.is_floating_point:
            out.fill_(float("nan"))
        else:
            out.fill_(2**30)
        return out

    monkeypatch.setattr(torch, "empty", poisoned)
    with _backends.using("gemm", "deep_gemm"):
        yield found


def make(num_tokens, seed, *, num_experts=5, topk=3):
    rng = np.random.default_rng(seed)
    weights = moe.make_experts(rng, "fp8", num_experts, *SIZES)
    x, x_scale, _ = moe.make_rows(rng, "fp8", num_tokens, SIZES[0])
    ids, route = moe.make_routing(rng, num_tokens, topk, num_experts)
    return (x, x_scale, ids, route, *weights.tensors), {"limit": 8.0, "deterministic": False}


@pytest.mark.parametrize("num_tokens", [1, 7, 33, pytest.param(300, marks=pytest.mark.slow)])
def test_matches_reference(library, num_tokens):
    args, kwargs = make(num_tokens, seed=num_tokens)
    got, want = SPEC.cuda(*args, **kwargs), SPEC.reference(*args, **kwargs)
    assert library.rows == [kernel.capacity(num_tokens, 3, 5)] * 2
    assert want.any() and moe.relative_rms(got, want) < BOUND
    assert not got[(args[2] == -1).all(1)].any()


def test_no_rows(library):
    args, kwargs = make(0, seed=0)
    assert SPEC.cuda(*args, **kwargs).shape == (0, SIZES[0]) and library.rows == []


def test_no_experts(library):
    """Rows without an expert, and ids outside the table, are zeros: every run has group −1."""
    (x, x_scale, ids, *rest), kwargs = make(9, seed=1)
    ids = torch.where(torch.arange(9)[:, None] % 2 == 0, -1, 5).int().expand(9, 3)
    got = SPEC.cuda(x, x_scale, ids, *rest, **kwargs)
    assert library.rows and torch.equal(got, torch.zeros_like(got))


def test_one_expert_gets_all_pairs(library):
    """The other end of the capacity: more than one run of one expert, the last one partly filled."""
    (x, x_scale, ids, *rest), kwargs = make(67, seed=2)
    args = (x, x_scale, torch.full_like(ids, 3), *rest)
    got, want = SPEC.cuda(*args, **kwargs), SPEC.reference(*args, **kwargs)
    assert moe.relative_rms(got, want) < BOUND


def test_nan_reaches_its_row_alone(library):
    (x, x_scale, ids, *rest), kwargs = make(7, seed=3)
    ids[:] = torch.arange(3, dtype=torch.int32)
    x.view(torch.uint8)[2, 5] = 0x7F
    got = SPEC.cuda(x, x_scale, ids, *rest, **kwargs)
    assert got[2].isnan().any() and got[[0, 1, 3, 4, 5, 6]].isfinite().all()


def test_row_alone_equals_row_in_batch(library):
    (x, x_scale, ids, route, *weights), kwargs = make(33, seed=4)
    full = SPEC.cuda(x, x_scale, ids, route, *weights, **kwargs)
    for row in (0, 32):
        one = slice(row, row + 1)
        assert torch.equal(SPEC.cuda(x[one], x_scale[one], ids[one], route[one], *weights, **kwargs), full[one])


def launched(args, kwargs, library) -> set:
    """Keys of our launches and of DeepGEMM's kernels in one call; ours do not run."""
    asked = []
    with _triton.recording() as calls, pytest.MonkeyPatch.context() as patch:
        patch.setattr(_runtime, "require_known", asked.append)
        patch.setattr(library, "m_grouped_fp8_gemm_nt_contiguous", lambda *_, **__: None)
        SPEC.cuda(*args, **kwargs)
    return {call.key for call in calls} | set(asked)


def cuda_cases(shape, budget):
    return importlib.import_module("dsv4.ops.expert_ffn").cuda_cases(shape, torch.device("cpu"), budget)


SMALL_FLASH = replace(flash, hidden=512, expert_hidden=256, num_experts=33)


@pytest.mark.parametrize("shape", [replace(nano, num_experts=17), SMALL_FLASH], ids=lambda s: s.name)
def test_cases_cover_every_call(library, shape):
    """For token counts up to the budget: every key that a call needs is enumerated, and every case needs its key."""
    shape, budget = replace(shape, expert_dtype="fp8"), 150
    others = {case.key for case in cuda_cases(replace(shape, expert_dtype="fp4"), budget)}
    cases = {case.key: case for case in cuda_cases(shape, budget) if case.key not in others}
    products = {key for key in cases if key[0] == "deep_gemm"}
    assert len(products) > 1 and all(shape.num_experts in key for key in products)
    assert not any(key[0] == "deep_gemm" for key in others)
    for key, case in cases.items():
        assert case.op == "expert_ffn" and key in launched(*case.arguments(), library)
    needed = set()
    for num_tokens in (1, 2, 3, 7, 16, 31, 32, 33, 64, 97, 128, budget):
        needed |= launched(*kernel.arguments(shape, num_tokens, torch.device("cpu")), library)
    assert needed <= cases.keys() | others


def test_flash_needs_few_products():
    keys = kernel.product_keys(flash.hidden, flash.expert_hidden, 6, 256, 8192, NUM_SMS)
    assert len(keys) == 2 and min(keys.values()) == 1


def test_sizes_that_deep_gemm_does_not_take_stay_with_triton(library):
    assert not kernel.fits(tiny.hidden, tiny.expert_hidden) and not kernel.fits(256, 192)
    assert kernel.fits(nano.hidden, nano.expert_hidden) and kernel.fits(flash.hidden, flash.expert_hidden)
    rng = np.random.default_rng(5)
    weights = moe.make_experts(rng, "fp8", 4, 192, 160)
    rows, routing = moe.make_rows(rng, "fp8", 5, 192)[:2], moe.make_routing(rng, 5, 2, 4)
    args, kwargs = (*rows, *routing, *weights.tensors), {"limit": 8.0, "deterministic": False}
    got, want = SPEC.cuda(*args, **kwargs), SPEC.reference(*args, **kwargs)
    assert library.rows == [] and moe.relative_rms(got, want) < BOUND


def test_a_cold_product_is_refused_once_sealed(library, monkeypatch):
    args, kwargs = make(3, seed=6)
    monkeypatch.setattr(_runtime, "_sealed", True)
    with pytest.raises(_runtime.ColdKernelError, match="cold key .'deep_gemm', .*MGroupedContiguous"):
        SPEC.cuda(*args, **kwargs)


def test_blank_experts_are_shared_while_alive():
    first, _ = kernel.arguments(replace(nano, num_experts=3), 2, torch.device("cpu"))
    second, _ = kernel.arguments(replace(nano, num_experts=3), 5, torch.device("cpu"))
    assert first[4] is second[4] and first[6] is second[6] and first[4].shape == (3, 256, 256)
    assert first[4] is not kernel.arguments(nano, 2, torch.device("cpu"))[0][4]
    alive = len(kernel._blanks)
    del first, second
    assert len(kernel._blanks) < alive
