"""Count how often every expert was chosen, while recording is on.

Shapes: ids ``[T, K]`` int32; enabled ``[1]`` int32; counts ``[E]`` int64, mutated.
Numerics: exact. Adds to ``counts[e]`` the number of ids equal to e; ids outside [0, E), such as the −1 of pad rows, are
ignored. Nothing changes while ``enabled[0]`` is 0: the switch is a tensor, so a captured graph obeys it.
Errors: ``ValueError`` for wrong shapes or dtypes.
"""

import torch

from . import _routing
from ._registry import Arguments, PrewarmCase, register
from .shapes import Shape


def _check(ids: torch.Tensor, enabled: torch.Tensor, counts: torch.Tensor) -> None:
    if ids.dim() != 2 or ids.dtype != torch.int32:
        got = f"{ids.dim()} dimensions, {ids.dtype}"
        raise ValueError(f"record_expert_load ids must have 2 dimensions, {torch.int32}, got {got}")
    _routing.check_counter("record_expert_load", "enabled", enabled)
    if counts.dim() != 1 or counts.dtype != torch.int64 or counts.shape[0] < 1:
        got = f"{list(counts.shape)} {counts.dtype}"
        raise ValueError(f"record_expert_load counts must be [num_experts] {torch.int64}, got {got}")


def reference(ids: torch.Tensor, enabled: torch.Tensor, counts: torch.Tensor) -> None:
    """Add the occurrences of every expert in ``ids`` to ``counts`` if ``enabled`` is not 0."""
    _check(ids, enabled, counts)
    num_experts = counts.shape[0]
    flat = ids.flatten()
    counted = (flat >= 0) & (flat < num_experts) & (enabled != 0)
    counts.scatter_add_(0, flat.clamp(0, num_experts - 1).long(), counted.long())


def fake(ids: torch.Tensor, enabled: torch.Tensor, counts: torch.Tensor) -> None:
    _check(ids, enabled, counts)


def example(shape: Shape, *, num_tokens: int, device: torch.device, dtype: torch.dtype, seed: int) -> Arguments:
    g = torch.Generator(device="cpu").manual_seed(seed)
    ids = torch.randint(-1, shape.num_experts, (num_tokens, shape.experts_per_token), generator=g, dtype=torch.int32)
    counts = torch.randint(0, 1000, (shape.num_experts,), generator=g)
    return (ids.to(device), torch.ones(1, dtype=torch.int32, device=device), counts.to(device)), {}


def cuda(ids: torch.Tensor, enabled: torch.Tensor, counts: torch.Tensor) -> None:
    from . import record_expert_load_kernel

    _check(ids, enabled, counts)
    record_expert_load_kernel.run(ids, enabled, counts)


def cuda_cases(shape: Shape, device: torch.device, max_tokens: int) -> tuple[PrewarmCase, ...]:
    from . import record_expert_load_kernel

    def arguments() -> Arguments:
        return example(shape, num_tokens=1, device=device, dtype=torch.bfloat16, seed=0)

    key = record_expert_load_kernel.key(shape.num_experts)
    return (PrewarmCase(op="record_expert_load", key=key, arguments=arguments),)


record_expert_load = register(
    "record_expert_load",
    "(Tensor ids, Tensor enabled, Tensor(a!) counts) -> ()",
    reference=reference,
    fake=fake,
    example=example,
    cuda=cuda,
    cuda_cases=cuda_cases,
)
