"""Every Triton kernel of every op compiles ahead of time for sm_100, and uses its instructions."""

import pytest

from . import aot

ARCH = 100


@pytest.mark.parametrize("shape", aot.SHAPES, ids=lambda s: s.name)
@pytest.mark.parametrize("spec", aot.SPECS, ids=lambda s: s.name)
def test_compiles(spec, shape):
    for key, kernel in aot.compile_op(spec, shape, ARCH).items():
        aot.check(key, kernel, shape, ARCH)


@pytest.mark.parametrize("shape", aot.SHAPES, ids=lambda s: s.name)
def test_nothing_is_left_out(shape):
    aot.check_all_compiled(shape, ARCH)
