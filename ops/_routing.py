"""Finishing maths of expert routing, shared by route_topk and route_hash."""

from functools import reduce

import torch


def check_logits(op: str, logits: torch.Tensor) -> int:
    """Number of experts of ``logits [T, E]`` fp32."""
    if logits.dim() != 2:
        raise ValueError(f"{op} logits must have 2 dimensions, got {logits.dim()}")
    if logits.dtype != torch.float32:
        raise ValueError(f"{op} logits must have dtype {torch.float32}, got {logits.dtype}")
    return logits.shape[1]


def check_counter(op: str, name: str, tensor: torch.Tensor) -> None:
    """Refuse anything but a ``[1]`` int32 tensor."""
    if tensor.dim() != 1 or tensor.shape[0] != 1 or tensor.dtype != torch.int32:
        raise ValueError(f"{op} {name} must be [1] {torch.int32}, got {list(tensor.shape)} {tensor.dtype}")


def alloc(logits: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``(ids [T, K] int32, weights [T, K] fp32)``."""
    num_tokens = logits.shape[0]
    return logits.new_empty(num_tokens, topk, dtype=torch.int32), logits.new_empty(num_tokens, topk)


def scores(logits: torch.Tensor) -> torch.Tensor:
    """``sqrt(softplus(logits))``, accurate at both ends and bitwise independent of the other rows.

    ``torch.nn.functional.softplus`` rounds differently in the tail of its vectorised loop; ``exp`` and ``log1p`` don't.
    """
    return torch.sqrt(logits.clamp_min(0.0) + torch.log1p(torch.exp(-logits.abs())))


def in_step(logits: torch.Tensor, num_valid: torch.Tensor) -> torch.Tensor:
    """``[T]`` bool: rows before the pads."""
    return torch.arange(logits.shape[0], device=logits.device) < num_valid


def finish(
    score: torch.Tensor, ids: torch.Tensor, valid: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights of the chosen experts.

    Args:
        score: ``[T, E]`` fp32, without bias.
        ids: ``[T, K]`` int64 in [0, E).
        valid: ``[T]`` bool; other rows give ids −1 and weights 0.
        scale: factor on the weights after their sum is normalised to 1.

    A row whose chosen scores are all exactly 0 (logits below about −104) has no expert to prefer: its weights are 0.
    """
    weights = score.gather(1, ids)
    total = reduce(torch.add, weights.split(1, 1))
    # The smallest positive score is 3.7e-23, so the clamp only replaces a total of 0.
    weights = weights / total.clamp_min(torch.finfo(torch.float32).tiny) * scale
    valid = valid.unsqueeze(1)
    return torch.where(valid, ids, -1).int(), torch.where(valid, weights, 0.0)
