"""Cases of other implementations, and the second trigger, on a GPU: see ``gpu_cases`` and ``graphs/gpu_processes``."""

from typing import Any

import pytest
import torch

from tools.gpu_check.points import POINTS

from . import gpu_cases
from .graphs import gpu_processes


def numbers(samples: Any) -> list[float]:
    if isinstance(samples, dict):
        return [n for value in samples.values() for n in numbers(value)]
    return [samples]


@pytest.mark.gpu
@pytest.mark.parametrize("case", [gpu_processes.c1, gpu_cases.c3, gpu_cases.c5, gpu_cases.c6, gpu_cases.c8,
                                  gpu_processes.c12, gpu_cases.first_use], ids=lambda case: case.__name__)  # fmt: skip
def test_case(case):
    found = case()
    assert numbers(found["samples"]) and not any(numbers(found["samples"])), found


@pytest.mark.gpu
def test_c11():
    found = gpu_cases.c11()["samples"]
    assert POINTS["case_C11"].judge(found) == (0, True), found


def test_the_cases_tell_a_wrong_kernel():
    """What the comparisons would say of an output that is not the reference's, shown without a GPU."""
    want = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert gpu_cases.close(want, want) and gpu_cases.same(want, want)
    assert not gpu_cases.close(want * 1.01, want) and not gpu_cases.same(want * 1.01, want)
    hole = want.clone()
    hole[2, 3] = torch.nan
    assert not gpu_cases.close(hole, want) and not gpu_cases.close(want, hole) and gpu_cases.close(hole, hole)
    assert not gpu_cases.close(want[:3], want) and not gpu_cases.close(want.float(), want)


@pytest.mark.slow
@pytest.mark.parametrize("case", [gpu_cases.c5, gpu_cases.c6, gpu_cases.c8], ids=lambda case: case.__name__)
def test_the_cases_run(case):
    """With references in place of the kernels; shows that the calls are legal."""
    assert not any(numbers(case("cpu")["samples"]))
