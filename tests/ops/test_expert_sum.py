import pytest
import torch

from dsv4 import ops


def test_adds_in_fp32_and_rounds_once():
    """1 + 2^-8 + 2^-17 lies above the middle of two bf16 numbers; with routed rounded first it would be the middle."""
    routed, shared = torch.tensor([[2**-8 + 2**-17]]), torch.tensor([[1.0]], dtype=torch.bfloat16)
    total = ops.expert_sum(routed, shared, dtype=torch.bfloat16)
    assert total.dtype == torch.bfloat16 and total.item() == 1 + 2**-7
    assert ops.expert_sum(routed, shared, dtype=torch.float32).item() == 1 + 2**-8 + 2**-17


def test_refusals():
    routed = torch.zeros(2, 4)
    with pytest.raises(ValueError, match="routed must be float32, .* got torch.bfloat16, torch.float32 and torch"):
        ops.expert_sum(routed.bfloat16(), routed, dtype=torch.float32)
    with pytest.raises(ValueError, match="float32 or bfloat16, got torch.float32, torch.float16 and torch.float32"):
        ops.expert_sum(routed, routed.half(), dtype=torch.float32)
    with pytest.raises(ValueError, match=r"rows of one width, got \[2, 4\] and \[2, 3\]"):
        ops.expert_sum(routed, routed[:, :3], dtype=torch.float32)
