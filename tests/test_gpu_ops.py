"""How the GPU report compares ops: planted faults of every kind are found, and libraries get what they serve."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dsv4 import ops
from dsv4.ops import _backends, _deep_gemm, _indexer_deep_gemm, _triton
from dsv4.ops.shapes import flash, nano, tiny
from tools.gpu_check import op_calls, op_errors, op_libraries, op_rows
from tools.gpu_check.place import Place

CPU, BF16 = torch.device("cpu"), torch.bfloat16
DRY = Place(dry=True)


def example(name: str, shape=nano, rows: int = 9, dtype: torch.dtype = BF16):
    return ops.spec(name).example(shape, num_tokens=rows, device=CPU, dtype=dtype, seed=1)


def planted(name: str, function) -> SimpleNamespace:
    """The op ``name`` with ``function`` in place of its kernels."""
    real = ops.spec(name).overload

    def overload(*args, **kwargs):
        return function(real, *args, **kwargs)

    overload._schema = real._schema
    return SimpleNamespace(name=name, overload=overload)


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_one_wrong_element_of_many_shows():
    want = torch.randn(1000, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    got = want.clone()
    assert op_errors.distance(got, want) == {"rms": 0.0, "max": 0.0, "peak": 0.0}
    got[500, 500] += 1.0
    found = op_errors.distance(got, want)
    assert found["rms"] < 2.0**-9 and found["peak"] > 0.3 and found["max"] == pytest.approx(1.0, rel=0.01)


def test_errors_of_a_large_row_are_those_of_its_size():
    """An element of it that happens to be small has cancelled; in a row of usual size the same error is a fault."""
    want = torch.ones(100, 64)
    want[7] *= 1000
    want[7, 3] = 0.0
    for row, least, most in ((7, 0.0, 2e-3), (8, 0.01, 0.02)):
        got = want.clone()
        got[row, 3] += 1.0
        assert least <= op_errors.distance(got, want)["peak"] <= most


def test_undefined_elements_are_counted():
    scores = torch.tensor([[1.0, -torch.inf], [torch.inf, torch.nan]])
    assert op_errors.undefined(scores, holes=False) == 3 and op_errors.undefined(scores, holes=True) == 2
    assert op_errors.undefined(torch.tensor([-1, 7]), holes=False) == 0


def test_both_modes_are_compared():
    """A fault that only shows in one of them, against one call of the reference."""

    def faulty(real, *args, deterministic, **kwargs):
        return real(*args, deterministic=deterministic, **kwargs) * (1.25 if deterministic else 1)

    args, kwargs = example("linear")
    modes = op_errors.modes_of(kwargs)
    assert [options["deterministic"] for options in modes.values()] == [False, True]
    found = {}
    for mode, options in modes.items():
        got = op_errors.outputs(planted("linear", faulty), args, options)
        found[mode] = op_errors.errors_between(got, op_errors.outputs(ops.spec("linear"), args, options))
    assert found[""]["0.rms"] == 0 and found["deterministic"]["0.rms"] == pytest.approx(0.25)
    assert op_errors.modes_of({"eps": 1e-6}) == {"": {"eps": 1e-6}}


# ---- layouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["route_topk", "indexer_logits", "fp8_linear", "qkv_rope_cache", "expert_ffn"])
def test_layouts_of_the_references(name):
    args, kwargs = example(name, tiny)
    spec = ops.spec(name)
    found = op_errors.layout_faults(spec, args, kwargs, op_errors.outputs(spec, args, kwargs))
    assert found == dict.fromkeys(("strided", "strided_buffers", "pitched", "pitched_buffers"), 0)


def test_an_input_that_is_read_as_contiguous_is_found():
    """Activations called ``weights`` too, in either layout."""

    def blind(real, q, weights, *rest, **kwargs):
        flat = weights.as_strided(weights.shape, (weights.shape[1], 1)).nan_to_num(0.0, 1.0, 1.0)
        return real(q, flat, *rest, **kwargs)

    args, kwargs = example("indexer_logits", tiny)
    spec = planted("indexer_logits", blind)
    found = op_errors.layout_faults(spec, args, kwargs, op_errors.outputs(spec, args, kwargs))
    assert found["strided"] == found["pitched"] == 1


def test_a_buffer_that_is_copied_in_secret_is_found():
    """What the op writes must reach the caller, or the caller an error that names the op."""

    def copying(real, q, kv, weight, table, positions, slots, cache, **kwargs):
        return real(q, kv, weight, table, positions, slots, cache.contiguous(), **kwargs)

    def refusing(real, *args, **kwargs):
        if not args[-1].is_contiguous():
            raise ValueError("qkv_rope_cache buffers that are written must be contiguous, got strides [1, 2]")
        return real(*args, **kwargs)

    def mumbling(real, *args, **kwargs):
        if not args[-1].is_contiguous():
            raise RuntimeError("view size is not compatible")
        return real(*args, **kwargs)

    args, kwargs = example("qkv_rope_cache", tiny)
    for function, faults in ((copying, 1), (refusing, 0), (mumbling, 1)):
        spec = planted("qkv_rope_cache", function)
        found = op_errors.layout_faults(spec, args, kwargs, op_errors.outputs(spec, args, kwargs))
        assert found["strided_buffers"] == found["pitched_buffers"] == faults and not found["strided"]


# ---- libraries -------------------------------------------------------------------------------------------------------


def call_for_libraries(name: str):
    """A call with few experts and rows that a library serves, as the report makes it."""
    shape = replace(flash, hidden=256, q_lora_rank=128, expert_hidden=128, num_experts=8)
    (rows, *_) = op_libraries.row_counts(name, shape.index_heads, (33,))
    return op_libraries.by_mode(ops.spec(name), example(name, shape, rows), "libraries")


@pytest.fixture
def deep_gemm(monkeypatch):
    """A library that computes nothing."""
    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace())
    monkeypatch.setattr(_deep_gemm, "num_sms", lambda: 132)
    scores = lambda q, *_, **given: torch.zeros(len(q), given["max_seqlen_k"])  # noqa: E731
    monkeypatch.setattr(
        _deep_gemm, "_call", lambda key, device, name, *a, **k: scores(*a, **k) if name == "fp8_mqa_logits" else None
    )


@pytest.mark.parametrize("name", op_libraries.DEEP_GEMM)
def test_what_libraries_get_reaches_deep_gemm(deep_gemm, name):
    args, modes = call_for_libraries(name)
    for kwargs in modes.values():
        with _backends.using("gemm", "deep_gemm"), _triton.recording(), op_libraries.reaching(name):
            ops.spec(name).cuda(*args, **kwargs)
    with pytest.raises(RuntimeError, match=f"{name} must be served by deep_gemm, got no launch of it"):
        with _triton.recording(), op_libraries.reaching(name):
            ops.spec(name).cuda(*args, **modes[""])


@pytest.mark.parametrize("name", op_libraries.TILELANG)
def test_what_libraries_get_reaches_tilelang(name):
    from dsv4.ops import _tilelang

    args, modes = op_libraries.by_mode(ops.spec(name), example(name, tiny), "libraries")
    for kwargs in modes.values():
        with _backends.using("mhc", "tilelang"), _tilelang.recording(), op_libraries.reaching(name):
            ops.spec(name).cuda(*args, **kwargs)
    with pytest.raises(RuntimeError, match=f"{name} must be served by tilelang, got no launch of it"):
        with _triton.recording(), op_libraries.reaching(name):
            ops.spec(name).cuda(*args, **modes[""])


def test_formats_of_libraries():
    """FP8 experts have the values of the FP4 ones; index scores in FP8 are those of their decoded inputs."""
    args, kwargs = example("expert_ffn")
    fp8, _ = op_libraries.served("expert_ffn", args, kwargs)
    assert fp8[4].dtype == fp8[6].dtype == torch.float8_e4m3fn
    assert torch.equal(*(ops.expert_ffn(*a, **kwargs) for a in (args, fp8)))
    args, kwargs = example("indexer_logits", nano, 33)
    (q, weights, cache, *places), options = op_libraries.served("indexer_logits", args, kwargs)
    assert (q.dtype, cache.dtype, options["dtype"]) == (torch.float8_e4m3fn, torch.uint8, torch.float32)
    exact = ops.indexer_logits(*(t.float() for t in args[:3]), *places, **options)
    coded = ops.indexer_logits(q, weights, cache, *places, **options)
    seen = exact.isfinite()
    assert torch.equal(seen, coded.isfinite()) and seen.any()
    assert (coded[seen] - exact[seen]).square().mean().sqrt() < 0.1 * exact[seen].square().mean().sqrt()
    assert op_libraries.row_counts("indexer_logits", nano.index_heads, (1, 9)) == ()


def test_kinds_of_cases():
    def named(op: str, backend: str) -> str:
        return op_libraries.case_name("pro", 1, "", "deterministic", spec=ops.spec(op), dtype=BF16, backend=backend)

    assert named("expert_ffn", "triton") == "pro.1.deterministic.bfloat16" == named("mhc_pre", "libraries")
    assert named("expert_ffn", "libraries") == "pro.1.deterministic.fp8_sums" == named("indexer_logits", "libraries")


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_rows_on_both_sides_of_every_border_are_compared():
    picked = set(op_rows._picked(40_000, 65_536, 2).tolist())
    borders = (2**31 // 65_536, 2**30 // 65_536)
    assert {0, 39_999, *(b + side for b in borders for side in (-1, 0))} <= picked
    assert 500 < len(picked) <= 4 * 128 + 256


def test_a_fault_beyond_some_element_is_found(monkeypatch):
    """Whole calls are compared with references that see some rows, whatever earlier calls left in the tensors."""

    def run(name: str, function=None) -> tuple[dict, dict]:
        found, last = {}, {}
        if function is not None:
            monkeypatch.setattr(ops, "spec", lambda _, one=planted(name, function): one)
        op_rows._compare(name, op_calls.CALLS[name], tiny, 300, DRY, "triton", found, last, "")
        monkeypatch.undo()
        return found, last

    def late(real, *args, **kwargs):
        out = real(*args, **kwargs)
        if len(out) == 300:
            out[290:] = 0
        return out

    def hole(real, *args, **kwargs):
        real(*args, **kwargs)
        if len(args[0]) == 300:
            args[9][7, 1, 3] = torch.nan

    for name in ("qkv_rope_cache", "sparse_attention", "fp8_linear", "mhc_pre", "expert_ffn"):
        found, last = run(name)
        for case, errors in found.items():
            assert case.startswith("pro.300") and all(n < 1e-2 for n in errors.values()), (name, errors)
        assert max(last.values()) <= 1
    found, last = run("fp8_linear", late)
    assert all(errors["0.peak"] >= 1 for errors in found.values()) and min(last.values()) > 1
    found, _ = run("sparse_attention", hole)
    assert all(errors["0.not_finite"] >= 1 for errors in found.values())


def test_sizes_beyond_the_border():
    """At Pro, the largest tensor of every such call has more than 2^31 elements."""
    for name, (call, rows) in op_calls.BEYOND.items():
        shape = op_rows.SHAPE
        wide = {
            "indexer_logits": rows * shape.max_context // 4, "indexer_topk": rows * shape.max_context // 4,
            "lse_merge": 2 * rows * shape.num_heads * shape.head_dim,
        }.get(name, rows * shape.num_heads * shape.head_dim)  # fmt: skip
        assert callable(call) and 2**31 < wide < 1.02 * 2**31, name


def test_deep_gemm_serves_the_largest_scores(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace())
    shape, rows = op_rows.SHAPE, op_calls.BEYOND["indexer_logits"][1]
    q = torch.empty(rows, shape.index_heads, shape.index_dim, dtype=torch.float8_e4m3fn, device="meta")
    cache = torch.empty(shape.max_context // 256, 64 * 132, dtype=torch.uint8, device="meta")
    table = torch.empty(1, shape.max_context // 256, dtype=torch.int32, device="meta")
    with _backends.using("gemm", "deep_gemm"):
        limit = sys.modules["dsv4.ops.indexer_logits"].TEMPORARY_BYTES
        assert _indexer_deep_gemm.serves(q, cache, table, torch.float32, deterministic=False, max_bytes=limit)
