"""DeepGEMM's wrapper around a module that computes the same on the CPU: layouts, guard, dispatch, refusals."""

import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dsv4 import ops
from dsv4.ops import _backends, _deep_gemm, _deep_gemm_compile, _indexer_deep_gemm, _runtime
from dsv4.ops.fp8_linear import deep_gemm_calls, matrices
from dsv4.ops.shapes import flash, nano, tiny

ROOT = Path(__file__).resolve().parents[2]
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
keys = _deep_gemm.keys


class FakeLibrary(SimpleNamespace):
    """Checks what DeepGEMM would check or silently copy, and computes in fp32."""

    def __init__(self) -> None:
        super().__init__(__version__=_deep_gemm.RELEASE, calls=[], get_num_sms=lambda: 132)

    def fp8_gemm_nt(self, a, b, d, *, recipe, compiled_dims):
        self._check(a, b, d, recipe, compiled_dims)
        self.calls.append("gemm")
        d.copy_(dequantize(*a) @ dequantize(*b).t())

    def m_grouped_fp8_gemm_nt_contiguous(self, a, b, d, groups, *, recipe, compiled_dims):
        self._check(a, (b[0][0], b[1][0]), d, recipe, compiled_dims)
        assert groups.dtype == torch.int32 and groups.shape == (a[0].shape[0],)
        self.calls.append("grouped")
        for first in range(0, len(groups), 128):
            rows, group = slice(first, first + 128), int(groups[first])
            if group >= 0:
                d[rows] = (dequantize(a[0][rows], a[1][rows]) @ dequantize(b[0][group], b[1][group]).t()).to(BF16)

    def fp8_mqa_logits(self, q, kv, weights, starts, ends, *, clean_logits, max_seqlen_k):
        assert not clean_logits and max_seqlen_k > 0
        self.calls.append("logits")
        scores = (torch.einsum("thd,ed->the", q.float(), kv[0].float()).relu() * weights[..., None]).sum(1) * kv[1]
        out = torch.full((len(q), max_seqlen_k), float("nan"))
        for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            out[row, : end - start] = scores[row, start:end]
        return out

    def tf32_hc_prenorm_gemm(self, a, b, d, squares, num_splits):
        self.calls.append("prenorm")
        for split, (x, w) in enumerate(zip(a.float().chunk(num_splits, 1), b.chunk(num_splits, 1), strict=True)):
            d[split], squares[split] = x @ w.t(), x.square().sum(1)

    @staticmethod
    def _check(a, b, d, recipe, compiled_dims):
        assert recipe == (1, 128, 128) and compiled_dims == ""
        rows = a[0].shape[0]
        assert a[0].is_contiguous() and b[0].is_contiguous() and b[1].is_contiguous() and d.is_contiguous()
        assert a[0].data_ptr() % 16 == b[0].data_ptr() % 16 == 0
        assert a[1].stride() == (1, -(-rows // 4) * 4)  # anything else makes DeepGEMM compile a transposition


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    rows = codes.shape[0] // scales.shape[0] if codes.shape[0] != scales.shape[0] else 1
    wide = scales.repeat_interleave(128, 1)[:, : codes.shape[1]]
    return codes.float() * (wide if rows == 1 else wide.repeat_interleave(128, 0)[: codes.shape[0]])


@pytest.fixture
def library(monkeypatch):
    fake = FakeLibrary()
    monkeypatch.setitem(sys.modules, "deep_gemm", fake)
    monkeypatch.setattr(_runtime, "_warm", set())
    monkeypatch.setattr(_runtime, "_sealed", False)
    _deep_gemm.library.cache_clear()
    yield fake
    _deep_gemm.library.cache_clear()


def operands(rows: int, outs: int = 256, width: int = 384):
    g = torch.Generator().manual_seed(rows + outs + width)
    x, x_scale = ops.quant_fp8(torch.randn(rows, width, generator=g))
    weight = torch.randn(outs, width, generator=g).to(FP8)
    return x, x_scale, weight, torch.rand(-(-outs // 128), width // 128, generator=g) + 0.1


def linear(rows: int, outs: int = 256, width: int = 384, *, dtype=BF16, deterministic=False, args=None):
    args = args or operands(rows, outs, width)
    return ops.spec("fp8_linear").cuda(*args, dtype=dtype, deterministic=deterministic)


@pytest.mark.parametrize("rows", [1, 3, 4, 130])
def test_the_call_has_the_layouts_that_compile_nothing_else(library, rows):
    with _backends.using("gemm", "deep_gemm"):
        got = linear(rows)
    want = ops.fp8_linear(*operands(rows), dtype=BF16, deterministic=True)
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-3)  # one rounding; sums in another order
    assert library.calls == ["gemm"]
    assert _runtime.warm_keys() == {keys.gemm(rows, 256, 384, 132)}


def test_strided_and_unaligned_operands_are_copied(library):
    x, x_scale, weight, weight_scale = operands(6)
    wide = torch.zeros(6, 400).to(FP8)
    wide[:, :384] = x
    odd = torch.empty(256 * 384 + 1, dtype=FP8)[1:].view(256, 384)
    odd.copy_(weight)
    with _backends.using("gemm", "deep_gemm"):
        got = linear(6, args=(wide[:, :384], x_scale.t().contiguous().t(), odd, weight_scale.t().contiguous().t()))
        assert torch.equal(got, linear(6))


def test_scales_that_are_already_right_are_not_copied(library):
    scales = _deep_gemm.column_major(torch.rand(6, 3))
    assert scales.stride() == (1, 8) and _deep_gemm.column_major(scales) is scales


def test_no_rows_no_call(library):
    with _backends.using("gemm", "deep_gemm"):
        assert linear(0).shape == (0, 256)
    assert library.calls == [] and not _runtime.warm_keys()


def test_a_cold_key_of_a_ready_process_is_refused_before_the_call(library):
    with _backends.using("gemm", "deep_gemm"):
        linear(5)
        _runtime.seal()
        linear(16)  # the same kernel
        with pytest.raises(_runtime.ColdKernelError, match=r"once the process is ready, got cold key .*1d2d_impl"):
            linear(33)
        assert library.calls == ["gemm", "gemm"]
        with _runtime.in_prewarm():  # a prewarm, of another model for instance
            linear(33)
        linear(64)
    assert library.calls == ["gemm"] * 4


@pytest.mark.parametrize("switch, sealed", [("1", True), ("0", False)])
def test_a_model_that_is_warm_makes_the_process_ready(library, monkeypatch, switch, sealed):
    """Unless the kernels were switched off, when they must compile at their first use."""
    from dsv4 import prewarming
    from dsv4.config import ModelConfig
    from dsv4.engine_config import EngineConfig

    monkeypatch.setenv("DSV4_PREWARM", switch)
    monkeypatch.setattr(prewarming, "prewarm", lambda cases, **rest: cases)
    monkeypatch.setattr(prewarming, "prewarm_cases", lambda *rest: [])
    monkeypatch.setattr(prewarming, "_warm", set())
    prewarming.warm_kernels(ModelConfig.from_json(ROOT / "assets" / "nano"), EngineConfig())
    assert _runtime._sealed is sealed


def test_a_prewarm_of_one_thread_opens_no_door_for_another(library):
    _runtime.seal()
    failures = []

    def serve() -> None:
        try:
            linear(40)
        except _runtime.ColdKernelError as error:
            failures.append(error)

    with _backends.using("gemm", "deep_gemm"), _runtime.in_prewarm():
        thread = threading.Thread(target=serve)
        thread.start()
        thread.join()
    assert len(failures) == 1 and library.calls == []


def test_a_cold_key_during_capture_is_refused_even_in_a_prewarm(library, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with _backends.using("gemm", "deep_gemm"), _runtime.in_prewarm():
        with pytest.raises(_runtime.ColdKernelError, match="before stream capture"):
            linear(5)
        _runtime.mark_warm(keys.gemm(5, 256, 384, 132))
        linear(5)
    assert library.calls == ["gemm"]


def test_a_call_that_fails_warms_nothing(library, monkeypatch):
    monkeypatch.setattr(library, "fp8_gemm_nt", lambda *args, **kwargs: 1 / 0, raising=False)
    with _backends.using("gemm", "deep_gemm"), pytest.raises(ZeroDivisionError):
        linear(5)
    assert not _runtime.warm_keys()


def test_groups(library):
    g = torch.Generator().manual_seed(0)
    x, x_scale = ops.quant_fp8(torch.randn(384, 256, generator=g))
    weight, scale = torch.randn(3, 128, 256, generator=g).to(FP8), torch.rand(3, 1, 2, generator=g)
    groups = torch.tensor([2, -1, 0]).repeat_interleave(128).int()
    out = torch.full((384, 128), float("nan"), dtype=BF16)
    _deep_gemm.m_grouped_gemm_nt_contiguous(x, x_scale, weight, scale, out, groups)
    want = dequantize(x[:128], x_scale[:128]) @ dequantize(weight[2], scale[2]).t()
    torch.testing.assert_close(out[:128].float(), want, rtol=2**-8, atol=0)
    assert out[128:256].isnan().all() and out[256:].isfinite().all()
    assert _runtime.warm_keys() == {keys.grouped_gemm(384, 128, 256, 3, 132)}
    with pytest.raises(ValueError, match="grouped rows must be a multiple of 128, got 130"):
        _deep_gemm.m_grouped_gemm_nt_contiguous(x[:130], x_scale[:130], weight, scale, out[:130], groups[:130])


def test_logits_and_the_product_of_mhc(library):
    g = torch.Generator().manual_seed(0)
    q, entries = torch.randn(3, 64, 128, generator=g).to(FP8), torch.randn(12, 128, generator=g).to(FP8)
    ranges = torch.tensor([0, 4, 2]).int(), torch.tensor([0, 12, 7]).int()
    arguments = q, entries, torch.rand(12, generator=g), torch.rand(3, 64, generator=g), *ranges
    scores = _deep_gemm.mqa_logits(*arguments, 8)
    assert scores.isfinite().sum(1).tolist() == [0, 8, 5]
    with pytest.raises(ValueError, match="must have 32 or 64 heads, got 8"):
        _deep_gemm.mqa_logits(q[:, :8], *arguments[1:], 8)
    out, squares = torch.empty(4, 5, 24), torch.empty(4, 5)
    streams, fn = torch.randn(5, 256, generator=g).bfloat16(), torch.randn(24, 256, generator=g)
    _deep_gemm.hc_prenorm_gemm(streams, fn, out, squares)
    torch.testing.assert_close(out.sum(0), streams.float() @ fn.t(), rtol=1e-5, atol=1e-4)
    assert _runtime.warm_keys() == {keys.mqa_logits(64, 128, 132), keys.hc_prenorm_gemm(24, 256, 4)}


def index_case(seed=0, heads=32):
    """Rows of four requests with pads between them, absent and shared pages, lengths 0, and a cache with NaNs."""
    g = torch.Generator().manual_seed(seed)
    entries = torch.randn(6 * 64, 128, generator=g)
    codes = entries.to(FP8).view(torch.uint8).view(6, 64 * 128)
    scales = torch.exp2(torch.randint(-3, 3, (6, 64), generator=g).float()).view(torch.uint8)
    cache = torch.cat([codes, scales], 1)
    cache[5] = 0x7F  # unowned
    tables = torch.tensor([[0, 1, -1], [2, -1, -1], [-1, -1, -1], [3, 4, 0]], dtype=torch.int32)
    requests = torch.tensor([0, 0, -1, 1, 1, 3, 3, 3, 2, -1], dtype=torch.int32)
    positions = torch.tensor([3, 500, -1, 0, 255, 765, 766, 767, 40, -1])
    q = torch.randn(10, heads, 128, generator=g).to(FP8)
    return q, torch.rand(10, heads, generator=g), cache, positions, requests, tables


INDEX_OPTIONS = {"ratio": 4, "dtype": torch.float32, "deterministic": False}


@pytest.fixture
def few_rows_are_enough(monkeypatch):
    monkeypatch.setattr(_indexer_deep_gemm, "ROWS_PER_REQUEST", 2)


@pytest.mark.parametrize("max_bytes, calls", [(64 << 20, 1), (132_096, 1), (132_095, 2), (101_376, 10)])
def test_index_scores(library, monkeypatch, few_rows_are_enough, max_bytes, calls):
    """101,376 bytes are exactly the pages of four requests of three pages, and ten rows take 30,720."""
    monkeypatch.setattr(sys.modules["dsv4.ops.indexer_logits"], "TEMPORARY_BYTES", max_bytes)
    args = index_case()
    with _backends.using("gemm", "deep_gemm"):
        got = ops.spec("indexer_logits").cuda(*args, **INDEX_OPTIONS)
    want = ops.indexer_logits(*args, **INDEX_OPTIONS)
    assert torch.equal(got.isinf(), want.isinf()) and want.isfinite().any(1).tolist() == [1, 1, 0, 0, 1, 1, 1, 1, 0, 0]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)  # fp32 sums of 32 heads in another order
    assert library.calls == ["logits"] * calls
    assert _runtime.warm_keys() == {keys.mqa_logits(32, 128, 132)}


def test_index_scores_in_passes(library):
    args = index_case()
    whole, parts = torch.full((2, 10, 192), float("nan"))
    _indexer_deep_gemm.run(*args, whole, ratio=4, max_bytes=1 << 20)
    _indexer_deep_gemm.run(*args, parts, ratio=4, max_bytes=101_376 + 3 * 12 * 256)  # three rows a pass
    assert torch.equal(whole, parts) and library.calls == ["logits"] * 5


def test_index_scores_without_rows_requests_or_pages(library):
    q, weights, cache, positions, requests, tables = index_case()
    nothing = torch.full((10, 192), float("nan"))
    _indexer_deep_gemm.run(
        q[:0], weights[:0], cache, positions[:0], requests[:0], tables, nothing[:0], ratio=4, max_bytes=1
    )
    _indexer_deep_gemm.run(q, weights, cache, positions, requests, tables[:, :0], nothing[:, :0], ratio=4, max_bytes=1)
    assert nothing.isnan().all()
    _indexer_deep_gemm.run(q, weights, cache, positions, requests.fill_(-1), tables[:0], nothing, ratio=4, max_bytes=1)
    assert nothing.isneginf().all() and library.calls == []


def test_which_index_scores_are_sent_there(library, few_rows_are_enough):
    q, _, cache, _, _, tables = index_case()
    usual = {"deterministic": False, "max_bytes": 64 << 20}

    def serves(q=q, cache=cache, tables=tables, dtype=torch.float32, **rest):
        return _indexer_deep_gemm.serves(q, cache, tables, dtype, **usual | rest)

    assert not serves()
    with _backends.using("gemm", "deep_gemm"):
        assert serves()
        assert not serves(dtype=BF16) and not serves(q=q.to(BF16))  # what the model passes
        assert not serves(deterministic=True)
        assert not serves(max_bytes=101_375)
        assert not serves(q=q[:, :8]) and not serves(cache=cache[:, : 3 * 132])
        assert not serves(q=q[:7]) and serves(q=q[:8])  # rows a request


def test_index_cases(library):
    cpu = torch.device("cpu")

    def found(shape):
        return [case for case in ops.spec("indexer_logits").cuda_cases(shape, cpu, 300) if case.key[0] == "deep_gemm"]

    assert found(flash) == []
    with _backends.using("gemm", "deep_gemm"):
        (case,) = found(flash)
        args, kwargs = case.arguments()
        ops.spec("indexer_logits").cuda(*args, **kwargs)
        assert _runtime.warm_keys() == {case.key}
        assert found(nano) == found(tiny) == []  # 8 heads of 128 and 4 of 64


@pytest.mark.parametrize("outs, width, dtype", [(256, 200, BF16), (9, 384, BF16), (256, 384, torch.float32)])
def test_what_does_not_suit_is_not_sent_there(library, outs, width, dtype):
    from dsv4.ops import _triton

    g = torch.Generator().manual_seed(0)
    x, x_scale = ops.quant_fp8(torch.randn(4, width, generator=g))
    weight, scale = torch.randn(outs, width, generator=g).to(FP8), torch.ones(-(-outs // 128), -(-width // 128))
    with _backends.using("gemm", "deep_gemm"), _triton.recording() as launches:
        linear(4, dtype=dtype, args=(x, x_scale, weight, scale))
    assert library.calls == [] and len(launches) == 1


def test_by_default_nothing_is_sent_there(library):
    from dsv4.ops import _triton

    with _triton.recording() as launches:
        linear(4)
    assert library.calls == [] and len(launches) == 1


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("rows", [1, 16, 17, 300])
def test_what_decides_is_never_sent_there(library, rows, deterministic):
    """``fp8_linear_decoded`` launches our kernel under the key that ``fp8_linear`` launches by default."""
    from dsv4.ops import _triton

    def launched(name: str) -> list:
        with _triton.recording() as launches:
            ops.spec(name).cuda(*operands(rows), dtype=BF16, deterministic=deterministic)
        return [launch.key for launch in launches]

    by_default = launched("fp8_linear")
    with _backends.using("gemm", "deep_gemm"):
        assert launched("fp8_linear_decoded") == by_default
    assert len(by_default) == 1 and library.calls == []


@pytest.mark.parametrize("shape", [tiny, nano, flash], ids=lambda shape: shape.name)
def test_prewarm_cases_are_what_calls_use(library, shape):
    """Every key of a step of up to 300 rows is a case; running the small model's cases warms exactly them."""
    cuda = torch.device("cpu")  # where the fake library computes
    with _backends.using("gemm", "deep_gemm"):
        cases = ops.spec("fp8_linear").cuda_cases(shape, cuda, 300)
        found = {case.key for case in cases if case.key[0] == "deep_gemm"}
        sizes = [size for size in matrices(shape) if _deep_gemm.fits(*size)]
        wanted = {keys.gemm(m, *size, 132) for size in sizes for m in (1, 17, 33, *range(64, 301))}
        if _deep_gemm.fits(shape.hidden, shape.hidden):  # a projection of the MTP block multiplies every stream
            wanted |= {keys.gemm(m, shape.hidden, shape.hidden, 132) for m in range(300, 1201)}
        assert found == wanted
        if shape is nano:
            for case in cases:
                if case.key in found:
                    args, kwargs = case.arguments()
                    ops.spec(case.op).cuda(*args, **kwargs)
            assert _runtime.warm_keys() == found
        decoded = ops.spec("fp8_linear_decoded").cuda_cases(shape, cuda, 300)
        assert not any(case.key[0] == "deep_gemm" for case in decoded)
    assert not any(case.key[0] == "deep_gemm" for case in ops.spec("fp8_linear").cuda_cases(shape, cuda, 300))


def test_other_processes_compile_what_the_cases_need(library):
    cpu = torch.device("cpu")
    calls = deep_gemm_calls(nano, 300)
    with _backends.using("gemm", "deep_gemm"):
        cases = ops.spec("fp8_linear").cuda_cases(nano, cpu, 300)
    assert set(calls) == {case.key for case in cases}
    _deep_gemm_compile.compile_all(list(calls.values()), cpu)
    assert _runtime.warm_keys() == set(calls)


def test_another_release_or_none_is_refused(library, monkeypatch):
    _deep_gemm.library.cache_clear()
    monkeypatch.setattr(library, "__version__", "2.6.0", raising=False)
    with pytest.raises(NotImplementedError, match="deep_gemm must be 2.5.0.post20260604, .* got 2.6.0"):
        _deep_gemm.library()
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    with pytest.raises(NotImplementedError, match="deep_gemm must be installed"):
        _deep_gemm.library()


def test_wrong_arguments(library):
    x, x_scale, weight, scale = operands(4)
    with pytest.raises(ValueError, match="gemm_nt result must be bfloat16, got torch.float32"):
        _deep_gemm.gemm_nt(x, x_scale, weight, scale, torch.empty(4, 256))
    with pytest.raises(ValueError, match=r"must be \[multiple of 8, multiple of 128\], got \[255, 384\]"):
        _deep_gemm.gemm_nt(x, x_scale, weight[:255], scale, torch.empty(4, 255, dtype=BF16))
