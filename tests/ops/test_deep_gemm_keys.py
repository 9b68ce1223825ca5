"""The model of DeepGEMM's kernel choice: against the library's own answers, and what the enumeration rests on."""

import pytest
from hypothesis import given, settings, strategies as st

from dsv4.ops import _deep_gemm_keys as keys
from dsv4.ops.fp8_linear import matrices
from dsv4.ops.shapes import flash

# Answers of the library's own choice (release 2.5.0.post20260604, SM90), asked by calling the function inside its
# shared object: (rows, out, in, multiprocessors) -> rows and columns of a tile, swizzle of the result, stages,
# threads that multiply, cluster over rows, cluster over columns.
NORMAL = {
    (1, 1024, 4096, 132): (16, 16, 32, 16, 128, 1, 1),
    (17, 1024, 4096, 132): (32, 16, 32, 16, 128, 1, 1),
    (65, 1024, 4096, 132): (64, 16, 32, 16, 128, 1, 1),
    (512, 1024, 4096, 132): (64, 64, 128, 13, 128, 1, 1),
    (2049, 1024, 4096, 132): (64, 128, 128, 8, 128, 2, 1),
    (4225, 1024, 4096, 132): (128, 160, 64, 5, 256, 2, 1),
    (8192, 1024, 4096, 132): (256, 128, 128, 3, 256, 1, 2),
    (4225, 512, 4096, 132): (128, 80, 32, 7, 256, 1, 2),
    (8192, 512, 4096, 132): (256, 128, 128, 3, 256, 1, 1),
    (1, 32768, 1024, 132): (16, 128, 128, 12, 128, 2, 1),
    (17, 32768, 1024, 132): (32, 128, 128, 10, 128, 2, 1),
    (65, 32768, 1024, 132): (128, 128, 128, 5, 256, 1, 2),
    (129, 32768, 1024, 132): (256, 128, 128, 3, 256, 1, 2),
    (1, 4096, 8192, 132): (16, 32, 64, 16, 128, 1, 1),
    (129, 4096, 8192, 132): (64, 96, 64, 10, 128, 1, 1),
    (2049, 4096, 8192, 132): (128, 192, 128, 4, 256, 2, 1),
    (4225, 4096, 8192, 132): (256, 112, 32, 3, 256, 1, 2),
    (129, 8192, 1024, 132): (64, 96, 64, 10, 128, 2, 1),
    (4225, 128, 256, 132): (64, 48, 32, 15, 128, 1, 2),
    (65, 7168, 16384, 132): (64, 112, 32, 9, 128, 1, 1),
    (8192, 24, 128, 132): (64, 32, 64, 16, 128, 1, 1),
    (300, 4096, 4096, 78): (128, 160, 64, 5, 256, 1, 1),
    (4000, 4096, 4096, 114): (256, 128, 128, 3, 256, 1, 2),
}
GROUPED = {
    (128, 4096, 4096, 132): (128, 32, 64, 10, 256, 1, 1),
    (1024, 4096, 2048, 132): (128, 128, 128, 5, 256, 1, 2),
    (6912, 1024, 3712, 132): (128, 160, 64, 5, 256, 2, 1),
    (49152, 4096, 4096, 132): (128, 192, 128, 4, 256, 2, 1),
}
SMS = 132


def text(kind, groups, sms, rows, cols, swizzle, stages, threads, cluster_rows, cluster_cols):
    on_a = "true" if cluster_cols > 1 else "false"
    return (
        "deep_gemm", "sm90_fp8_gemm_1d2d_impl", "K", 0, 0, 0, groups, rows, cols, 128, 128, 128, swizzle, stages, 128,
        threads, cluster_rows * cluster_cols, on_a, sms, kind, "bfloat16_t", "EpilogueIdentity",
    )  # fmt: skip


@pytest.mark.parametrize("call", NORMAL, ids=str)
def test_answers_of_the_library(call):
    assert keys.gemm(*call) == text("Normal", 1, call[3], *NORMAL[call])


@pytest.mark.parametrize("call", GROUPED, ids=str)
def test_answers_of_the_library_for_groups(call):
    m, n, k, sms = call
    assert keys.grouped_gemm(m, n, k, 8, sms) == text("MGroupedContiguous", 8, sms, *GROUPED[call])


SIZES = st.tuples(st.integers(1, 1024).map(lambda n: 8 * n), st.integers(1, 128).map(lambda k: 128 * k))


@settings(max_examples=150, deadline=None)
@given(SIZES, st.integers(1, 40_000), st.sampled_from([78, 114, 132, 148]))
def test_the_key_depends_on_the_class_of_rows_alone(size, rows, sms):
    stands_for = next(m for m in reversed(keys.row_classes(rows)) if m <= rows)
    assert keys.gemm(rows, *size, sms) == keys.gemm(stands_for, *size, sms)


@settings(max_examples=100, deadline=None)
@given(SIZES, st.integers(1, 40_000))
def test_a_tile_fits_and_is_legal(size, rows):
    key = keys.gemm(rows, *size, SMS)
    tile_rows, cols, stages = key[7], key[8], key[13]
    scales = -(-size[1] // 128) * 4 * (1 if 128 % cols == 0 else 2)
    used = tile_rows * cols * 2 + stages * ((tile_rows + cols) * 128 + tile_rows * 4) + scales
    assert used <= keys.SMEM_BYTES and 3 <= stages <= 16 and (tile_rows <= 128 or cols <= 128)
    assert tile_rows > rows or tile_rows >= 64 or tile_rows == 32 >= rows or tile_rows == 16 >= rows


@pytest.mark.parametrize("size", [(1024, 4096), (32768, 1024), (128, 256), (200, 128)], ids=str)
def test_the_enumeration_covers_every_row_count(size):
    found = keys.keys_for(*size, 1500, SMS)
    assert {keys.gemm(m, *size, SMS) for m in range(1, 1501)} == set(found)
    assert all(keys.gemm(m, *size, SMS) == key for key, m in found.items())
    fewer = keys.keys_for(*size, 700, SMS)
    assert fewer.items() <= found.items()
    assert keys.keys_for(*size, 0, SMS) == {}


def test_the_number_of_keys_of_flash():
    """Sizes are run-time arguments, so matrices share keys: far fewer than the sum."""
    each = [keys.keys_for(*size, 8192, SMS) for size in matrices(flash)]
    assert (len(set().union(*each)), sum(map(len, each))) == (36, 93)


def test_the_kernels_of_mhc_and_of_the_indexer():
    """12 stages for Flash: 64 x 64 bf16 and 32 x 64 fp32 a stage beside the result; the number of splits is a key."""
    expected = ("deep_gemm", "sm90_tf32_hc_prenorm_gemm_impl", 24, 16384, 64, 32, 64, 4, 128, 12, 128, 128)
    assert keys.hc_prenorm_gemm(24, 16384, 4) == expected
    assert len({keys.hc_prenorm_gemm(24, 16384, splits) for splits in (1, 4, 16)}) == 3
    assert keys.mqa_logits(64, 128, SMS)[2:7] == (64, 128, "true", 2, 256)
    assert keys.mqa_logits(32, 128, SMS)[5] == 4
