"""Every TileLang kernel is lowered to CUDA, and compiled where nvcc is there; neither needs a GPU."""

import shutil
from dataclasses import dataclass

import pytest
import tilelang
import torch

from dsv4 import ops
from dsv4.ops import _backends, _mhc, _tilelang, _triton
from dsv4.ops.shapes import Shape, flash, nano, pro, tiny

from .ops import contract

CPU = torch.device("cpu")
NAMES = ("mhc_pre", "mhc_post", "mhc_post_pre", "mhc_head")
# how many of each, with fn of a block and of the head
KERNELS = {"mhc_post": 1, "mhc_products": 2, "mhc_post_products": 1, "mhc_finish": 2}
BF16, FP32 = torch.bfloat16, torch.float32


def launches(name: str, shape: Shape, num_tokens: int, dtype: torch.dtype = BF16, **changes) -> list[_tilelang.Launch]:
    spec = ops.spec(name)
    args, kwargs = contract.example(spec, shape, num_tokens, dtype)
    with _backends.using("mhc", "tilelang"), _tilelang.recording() as calls:
        spec.cuda(*args, **{**kwargs, **changes})
    return calls


def kernels(shape: Shape, dtype: torch.dtype) -> dict[tuple, _tilelang.Launch]:
    return {call.key: call for name in NAMES for call in launches(name, shape, 2, dtype)}


def listed(shape: Shape) -> set[tuple]:
    """Keys of the prewarm cases, which are those of bf16 models."""
    with _backends.using("mhc", "tilelang"):
        cases = [c for name in NAMES for c in ops.spec(name).prewarm_cases(shape, torch.device("cuda"), 8192)]
    return {case.key for case in cases}


def lower(call: _tilelang.Launch, arch: str) -> str:
    """CUDA source of the device code."""
    program, target = call.build(), tilelang.tvm.target.Target({"kind": "cuda", "arch": arch})
    with target, tilelang.tvm.transform.PassContext(opt_level=3, config=dict(program.options)):
        return tilelang.lower(program.function, target=target).kernel_source


@dataclass(frozen=True)
class Row:
    shape: Shape
    dtype: torch.dtype
    arch: str

    def __str__(self) -> str:
        return f"{self.shape.name}-{str(self.dtype)[6:]}-{self.arch}"


ROWS = [Row(s, d, a) for s in (nano, flash, pro) for d in (BF16, FP32) for a in ("sm_90a", "sm_100a")]
QUICK = [Row(flash, BF16, arch) for arch in ("sm_90a", "sm_100a")]
COMPILED = [r for r in ROWS if r.shape is nano or r.dtype == BF16]


def marked(rows: list[Row], quick: list[Row] = QUICK) -> list:
    return [row if row in quick else pytest.param(row, marks=pytest.mark.slow) for row in rows]


@pytest.mark.parametrize("row", marked(ROWS), ids=str)
def test_lowers(row):
    calls = kernels(row.shape, row.dtype)
    found = [key[1] for key in calls]
    assert row.dtype == FP32 or calls.keys() == listed(row.shape)
    expected = {k: n for k, n in KERNELS.items() if row.dtype == BF16 or k != "mhc_post_products"}
    assert {kernel: found.count(kernel) for kernel in found} == expected
    for key, call in calls.items():
        source = lower(call, row.arch)
        assert "int64_t num_tokens" in source and "int num_tokens" not in source.replace("(int)num_tokens", "")
        if "products" in key[1] and row.arch == "sm_90a":
            assert "wgmma_ss" in source and "tma_load" in source


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("row", marked(COMPILED, QUICK[:1]), ids=str)
def test_compiles(row, tmp_path, monkeypatch):
    """nvcc accepts what is lowered: TileLang lets names pass that are words of C++."""
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    for call in kernels(row.shape, row.dtype).values():
        assert "__global__" in _tilelang.compile_program(call.build, row.arch).get_kernel_source()


@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_parts_select_nothing(name):
    """Calls of other sizes ask for the same keys, and a key for the same program."""
    texts: dict[tuple, set[str]] = {}
    for num_tokens in (1, 4225):
        for deterministic in (True, False):
            changes = {} if name == "mhc_post" else {"deterministic": deterministic}
            for call in launches(name, tiny, num_tokens, **changes):
                texts.setdefault(call.key, set()).add(str(call.build().function))
    assert len(texts) == len(launches(name, tiny, 1))
    assert all(len(programs) == 1 for programs in texts.values())


@pytest.mark.parametrize("shape", [tiny, nano, flash, pro], ids=lambda s: s.name)
def test_prewarm_lists_what_runs(shape):
    keys = set()
    for name in NAMES:
        spec = ops.spec(name)
        with _backends.using("mhc", "tilelang"):
            cases = spec.prewarm_cases(shape, torch.device("cuda"), 8192)
        assert {case.key for case in cases} == {call.key for call in launches(name, shape, 2)}
        keys |= {case.key for case in cases}
        with _triton.recording() as calls:
            args, kwargs = contract.example(spec, tiny, 2, BF16)
            spec.cuda(*args, **kwargs)
        assert calls and not {call.key for call in calls} & keys
    assert len(keys) == 6  # of at most eight for one hidden size


@pytest.mark.parametrize("wrong", [lambda w: w[1:], lambda w: w[:, 1:], lambda w: w[..., :-1], lambda w: w[..., ::2]])
@pytest.mark.parametrize("name", ["mhc_pre", "mhc_post_pre", "mhc_head"])
def test_workspace_is_checked(name, wrong, monkeypatch):
    original = _mhc.alloc_partials
    monkeypatch.setattr(_mhc, "alloc_partials", lambda *a, **k: wrong(original(*a, **k)))
    with pytest.raises(ValueError, match="mHC workspace must be contiguous, .* parts of .*, got"):
        launches(name, tiny, 3)


def test_empty_batch_launches_nothing():
    """The grid names the empty dimension, at which a launch returns before it builds."""
    for name in NAMES:
        for call in launches(name, tiny, 0):
            assert 0 in call.grid


def test_other_widths_are_refused():
    spec = ops.spec("mhc_post")
    y, streams = torch.randn(2, 72), torch.randn(2, 4, 72)
    with _backends.using("mhc", "tilelang"):
        with pytest.raises(NotImplementedError, match="hidden a multiple of 64 up to 8192, got 4 and 72"):
            spec.cuda(y, streams, torch.rand(2, 4), torch.rand(2, 4, 4))
