"""DeepGEMM on a GPU: keys against kernels, results against references, rows against their batch, the guard."""

import pytest

from dsv4.graphs import deep_gemm_cache
from dsv4.graphs.deep_gemm_cache import KeyModelError
from dsv4.ops import _runtime
from dsv4.ops.fp8_linear import deep_gemm_calls, matrices
from dsv4.ops.shapes import flash, nano

from . import deep_gemm_checks as checks

pytestmark = pytest.mark.gpu


def test_keys_name_the_kernels(tmp_path):
    first = checks.observe(tmp_path)
    found = deep_gemm_cache.confirm(first)
    assert len(found) == len(first.compiled) == len(deep_gemm_cache.snapshot(tmp_path)) == 6
    again = checks.observe(tmp_path)  # a new process loads
    assert deep_gemm_cache.confirm(again) == found and not again.compiled
    with pytest.raises(KeyModelError, match="must name what was built|must stand for 1 kernel"):
        deep_gemm_cache.confirm(checks.observe(tmp_path, wrong=True))


def test_results_are_the_references():
    """bf16 rounding of the result is 1.66e-3 RMS; FP8 accumulation adds a few parts in 1e4."""
    errors = checks.linear_errors(list(matrices(flash)), [1, 7, 33, 64, 129])
    assert all(error < 2e-3 for error in errors.values()), errors


@pytest.mark.parametrize("size", matrices(nano)[:2], ids=str)
def test_rows_do_not_depend_on_their_batch(size):
    counts = [rows for rows, *other in deep_gemm_calls(nano, 700).values() if tuple(other) == size]
    assert checks.dependent_rows(*size, [*counts, 1, 65, 129, 700]) == []


def test_replays_equal_eager_calls():
    assert checks.replay_equals_eager(33, 512, 256)


def test_a_cold_key_is_refused_inside_a_capture(monkeypatch):
    monkeypatch.setattr(_runtime, "_warm", set())
    assert "must be warm before stream capture, got cold key" in checks.cold_call_during_capture(3, 512, 384)


@pytest.mark.parametrize("rows, tokens, num_requests", [(480, 3000, 5), (300, 40_000, 1)])
def test_index_scores(rows, tokens, num_requests):
    """FP8 tensor cores add 128 products in about 14 bits: a few parts in 1e3 of a score's spread at most."""
    error, same_entries, independent = checks.index_distance(rows, tokens, num_requests)
    assert error < 5e-3 and same_entries and independent
