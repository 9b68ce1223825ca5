"""Expert choice by score: the K largest of ``sqrt(softplus(logits)) + bias``.

Shapes: logits ``[T, E]`` fp32; bias ``[E]`` fp32; num_valid ``[1]`` int32. Returns ids ``[T, K]`` int32 in descending
order of biased score, and weights ``[T, K]`` fp32. Rows from num_valid on give ids −1 and weights 0.
Numerics: fp32. Ties go to the smallest expert index. Weights are the scores WITHOUT bias at the ids, divided by their
sum, times ``scale``; if that sum is exactly 0, the weights are 0. Bitwise independent of the other rows.
Errors: ``ValueError`` for wrong shapes or dtypes and for topk outside [1, E].
Source: Gate of the official inference code (tie rule of this library; the official one leaves ties open).
"""

import torch

from . import _routing
from ._registry import Arguments, PrewarmCase, register
from .shapes import Shape


def _alloc(
    logits: torch.Tensor, bias: torch.Tensor, num_valid: torch.Tensor, topk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    num_experts = _routing.check_logits("route_topk", logits)
    if bias.dim() != 1 or bias.shape[0] != num_experts or bias.dtype != torch.float32:
        expected = f"[{num_experts}] {torch.float32}"
        raise ValueError(f"route_topk bias must be {expected}, got {list(bias.shape)} {bias.dtype}")
    _routing.check_counter("route_topk", "num_valid", num_valid)
    if not 1 <= topk <= num_experts:
        raise ValueError(f"route_topk topk must be in [1, {num_experts}], got {topk}")
    return _routing.alloc(logits, topk)


def reference(
    logits: torch.Tensor, bias: torch.Tensor, num_valid: torch.Tensor, *, topk: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the ``topk`` experts of every row by biased score, weighted by their scores."""
    ids, weights = _alloc(logits, bias, num_valid, topk)
    score = _routing.scores(logits)
    order = torch.sort(score + bias, dim=1, descending=True, stable=True).indices
    chosen, chosen_weights = _routing.finish(score, order[:, :topk], _routing.in_step(logits, num_valid), scale)
    return ids.copy_(chosen), weights.copy_(chosen_weights)


def fake(
    logits: torch.Tensor, bias: torch.Tensor, num_valid: torch.Tensor, *, topk: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return _alloc(logits, bias, num_valid, topk)


def example(shape: Shape, *, num_tokens: int, device: torch.device, dtype: torch.dtype, seed: int) -> Arguments:
    g = torch.Generator(device="cpu").manual_seed(seed)
    logits = 2 * torch.randn(num_tokens, shape.num_experts, generator=g)
    bias = torch.randn(shape.num_experts, generator=g)
    num_valid = torch.tensor([num_tokens - num_tokens // 3], dtype=torch.int32)
    keywords = {"topk": shape.experts_per_token, "scale": shape.route_scale}
    return (logits.to(device), bias.to(device), num_valid.to(device)), keywords


def cuda(
    logits: torch.Tensor, bias: torch.Tensor, num_valid: torch.Tensor, *, topk: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    from . import _routing_kernel

    ids, weights = _alloc(logits, bias, num_valid, topk)
    _routing_kernel.route_topk(logits, bias, num_valid, ids, weights, scale)
    return ids, weights


def cuda_cases(shape: Shape, device: torch.device, max_tokens: int) -> tuple[PrewarmCase, ...]:
    from . import _routing_kernel

    def arguments() -> Arguments:
        return example(shape, num_tokens=1, device=device, dtype=torch.bfloat16, seed=0)

    key = _routing_kernel.topk_key(shape.num_experts, shape.experts_per_token)
    return (PrewarmCase(op="route_topk", key=key, arguments=arguments),)


route_topk = register(
    "route_topk",
    "(Tensor logits, Tensor bias, Tensor num_valid, *, int topk, float scale) -> (Tensor ids, Tensor weights)",
    reference=reference,
    fake=fake,
    example=example,
    cuda=cuda,
    cuda_cases=cuda_cases,
)
