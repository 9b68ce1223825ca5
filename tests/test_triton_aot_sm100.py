"""Every Triton kernel of every op compiles ahead of time for sm_100, and uses its instructions.

Quick are the ops with tensor-core products, which compile to other instructions there; the rest is slow.
"""

import pytest

from . import aot

ARCH = 100
PRODUCTS = ("expert_ffn", "fp8_linear", "grouped_o_proj", "indexer_logits", "linear", "mhc_pre", "shared_expert")
SPECS = [s if s.name in PRODUCTS else pytest.param(s, marks=pytest.mark.slow) for s in aot.SPECS]


@pytest.mark.parametrize("shape", aot.SHAPES, ids=lambda s: s.name)
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_compiles(spec, shape):
    for key, kernel in aot.compile_op(spec, shape, ARCH).items():
        aot.check(key, kernel, shape, ARCH)


@pytest.mark.slow
@pytest.mark.parametrize("shape", aot.SHAPES, ids=lambda s: s.name)
def test_nothing_is_left_out(shape):
    aot.check_all_compiled(shape, ARCH)
