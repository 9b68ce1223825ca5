"""Every registered op keeps the contract: opcheck, T = 0, odd strides, traced equals eager, documented, tested."""

from pathlib import Path

import pytest
import torch

from dsv4 import ops
from dsv4.ops.shapes import tiny

from . import contract

SPECS = list(ops.specs().values())
DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_opcheck(spec, dtype):
    contract.check_opcheck(spec, tiny, 3, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_zero_tokens(spec, dtype):
    contract.check_zero_tokens(spec, tiny, dtype)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_non_contiguous(spec):
    contract.check_non_contiguous(spec, tiny, torch.float32)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_traced_equals_eager(spec):
    contract.check_compiled(spec, tiny, torch.float32)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_prewarm_cases_run(spec):
    cases = spec.prewarm_cases(tiny, torch.device("cpu"), 8)
    assert cases, f"{spec.name} enumerates no specialisation"
    for case in cases:
        args, kwargs = case.arguments()
        spec.overload(*args, **kwargs)
    if spec.cuda is None:
        with pytest.raises(NotImplementedError, match=spec.name):
            spec.prewarm_cases(tiny, torch.device("cuda"), 8)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_has_test_file_and_docstring(spec):
    module = Path(spec.reference.__code__.co_filename)
    assert (Path(__file__).parent / f"test_{module.stem}.py").is_file()
    assert spec.reference.__doc__
