import pytest
import torch

from dsv4 import ops
from dsv4.ops.shapes import nano, tiny

from ..ops import contract
from . import interpreter
from .against_reference import compare

interpreter.repair()
SPEC = ops.spec("expert_sum")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
@pytest.mark.parametrize("shape", [tiny, nano], ids=lambda s: s.name)
def test_equals_reference(shape, num_tokens, dtype):
    compare(SPEC, *contract.example(SPEC, shape, num_tokens, dtype, seed=num_tokens), rtol=0, atol=0)


@pytest.mark.parametrize("hidden", [1, 40, 1025])
def test_odd_widths_slices_and_poisoned_outputs(monkeypatch, hidden):
    """Nothing beyond a row is read or left unwritten."""
    monkeypatch.setattr(torch, "empty", lambda *a, **k: torch.full(a[0], torch.nan, **k))
    g = torch.Generator().manual_seed(hidden)
    routed, shared = (torch.randn(3, hidden, 2, generator=g)[..., 0] for _ in range(2))
    got = SPEC.cuda(routed, shared.bfloat16(), dtype=torch.bfloat16)
    assert torch.equal(got, (routed + shared.bfloat16()).bfloat16())


def test_refuses_missing_rows():
    with pytest.raises(ValueError, match="shared must have the 3 rows of routed, got 2"):
        SPEC.cuda(torch.zeros(3, 8), torch.zeros(2, 8), dtype=torch.float32)
