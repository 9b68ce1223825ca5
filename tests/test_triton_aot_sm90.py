"""Every Triton kernel of every op compiles ahead of time for sm_90, and uses its instructions."""

import pytest

from . import aot

ARCH = 90


@pytest.mark.parametrize("shape", aot.SHAPES, ids=lambda s: s.name)
@pytest.mark.parametrize("spec", aot.SPECS, ids=lambda s: s.name)
def test_compiles(spec, shape):
    for key, kernel in aot.compile_op(spec, shape, ARCH).items():
        aot.check(key, kernel, shape, ARCH)


@pytest.mark.parametrize("shape", aot.SHAPES, ids=lambda s: s.name)
def test_kernels_around_deep_gemm(shape):
    """Of FP8 experts, whose products DeepGEMM serves where their sizes are whole scale blocks."""
    around = {"count", "place", "gather", "activate", "sum_places"}
    found = aot.compile_beside_deep_gemm(aot.ops.spec("expert_ffn"), shape, ARCH)
    assert shape.expert_hidden % 128 or around <= {key[1] for key in found}
    for key, kernel in found.items():
        aot.check(key, kernel, shape, ARCH)


@pytest.mark.parametrize("shape", aot.SHAPES, ids=lambda s: s.name)
def test_nothing_is_left_out(shape):
    aot.check_all_compiled(shape, ARCH)
