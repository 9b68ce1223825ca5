"""The compilation ahead of time notices what it is there for; and kernels of other dtypes than the listed ones."""

from dataclasses import replace

import pytest
import torch

from dsv4 import ops
from dsv4.ops import _triton
from dsv4.ops.shapes import nano, tiny

from . import aot
from .ops import contract

NORM = ops.spec("rms_norm")


def listing(spec: ops.OpSpec, change) -> ops.OpSpec:
    """``spec`` whose list of cases is changed."""
    return replace(spec, cuda_cases=lambda *arguments: change(list(spec.cuda_cases(*arguments))))


def test_a_key_that_nothing_launches_is_named():
    spec = listing(NORM, lambda cases: [*cases, replace(cases[0], key=("rms_norm", "planted"))])
    with pytest.raises(AssertionError, match="rms_norm lists .*planted"):
        aot.compile_op(spec, tiny, 90)


def test_a_launch_that_is_not_listed_is_named():
    spec = listing(ops.spec("mhc_head"), lambda cases: cases[:1])  # every call launches both kernels
    with pytest.raises(AssertionError, match="mhc_head lists set.. and launches .*'mhc_finish'"):
        aot.compile_op(spec, tiny, 90)


def test_an_op_that_is_left_out_is_named(monkeypatch):
    """The count does not hang on the tests that compile."""
    monkeypatch.setattr(aot, "SPECS", [spec for spec in aot.SPECS if spec is not NORM][:1])
    monkeypatch.setattr(aot, "_compiled", {})
    with pytest.raises(AssertionError, match="keys are not compiled: .*rms_norm"):
        aot.check_all_compiled(tiny, 90)


def test_a_key_of_two_binaries_is_named(monkeypatch):
    monkeypatch.setattr(aot, "_compiled", {})
    calls = aot.launches(aot.cases(NORM, tiny))
    same = [_triton.Launch(("planted",), call.kernel, call.grid, call.args, call.meta) for call in calls]
    with aot.architecture(90), pytest.raises(AssertionError, match="planted.* names two binaries"):
        aot.compiled(same, 90)


def test_shared_memory_is_bounded(monkeypatch):
    ((key, kernel), *_) = aot.compile_op(NORM, tiny, 90).items()
    aot.check(key, kernel, tiny, 90)
    monkeypatch.setattr(aot, "SHARED_MEMORY", -1)
    with pytest.raises(AssertionError, match="bytes of shared memory"):
        aot.check(key, kernel, tiny, 90)


def check_call(spec: ops.OpSpec, args: tuple, kwargs: dict, arch: int) -> None:
    with aot.architecture(arch), _triton.recording() as calls:
        spec.cuda(*args, **kwargs)
        found = aot.compiled(calls, arch)
    assert found, f"{spec.name} launches nothing"
    for key, kernel in found.items():
        aot.check(key, kernel, nano, arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("spec", aot.SPECS, ids=lambda s: s.name)
def test_float32(spec, arch):
    """Exact numerics in fp32, which no prewarm lists."""
    check_call(spec, *contract.example(spec, nano, 5, torch.float32), arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_indexer_logits_of_fp8_queries(dtype, deterministic, arch):
    args, kwargs = contract.example(ops.spec("indexer_logits"), nano, 5, torch.bfloat16)
    kwargs |= {"dtype": dtype, "deterministic": deterministic}
    check_call(ops.spec("indexer_logits"), (args[0].to(torch.float8_e4m3fn), *args[1:]), kwargs, arch)
