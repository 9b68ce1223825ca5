"""RMSNorm over the last dimension.

Shapes: x ``[..., hidden]`` fp32 or bf16, contiguous or not; weight ``[hidden]`` fp32 or bf16; result has x's shape
and dtype, contiguous.
Numerics: the mean of squares, the scaling and the multiplication by the weight are fp32; one rounding at the end.
Errors: ``ValueError`` for another dtype, or if the weight does not have ``hidden`` elements.
Source: RMSNorm of the official inference code (Zhang and Sennrich, 2019).
"""

import torch

from ._registry import Arguments, PrewarmCase, register
from ._rows import rms_normalize
from .shapes import Shape


def _alloc(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"rms_norm x must be float32 or bfloat16, got {x.dtype}")
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm weight must have shape {list(x.shape[-1:])}, got {list(weight.shape)}")
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def reference(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Normalise every row of ``x`` to unit root mean square and scale it by ``weight``."""
    return _alloc(x, weight).copy_(rms_normalize(x, weight, eps))


def fake(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    return _alloc(x, weight)


def example(shape: Shape, *, num_tokens: int, device: torch.device, dtype: torch.dtype, seed: int) -> Arguments:
    g = torch.Generator(device="cpu").manual_seed(seed)
    x = torch.randn(num_tokens, shape.q_lora_rank, generator=g).to(device, dtype)
    weight = torch.randn(shape.q_lora_rank, generator=g).to(device)
    return (x, weight), {"eps": shape.eps}


def cuda(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    from . import rms_norm_kernel

    out = _alloc(x, weight)
    rms_norm_kernel.run(x, weight, out, eps)
    return out


def cuda_cases(shape: Shape, device: torch.device, max_tokens: int) -> tuple[PrewarmCase, ...]:
    """One specialisation per width that the model normalises: query latents, MTP's hidden rows (fp32 weights)."""
    from . import rms_norm_kernel

    cases = []
    for width in dict.fromkeys((shape.q_lora_rank, shape.hidden)):

        def arguments(width: int = width) -> Arguments:
            x = torch.ones(1, width, dtype=torch.bfloat16, device=device)
            return (x, torch.ones(width, device=device)), {"eps": shape.eps}

        x = torch.empty(1, width, dtype=torch.bfloat16, device="meta")
        key = rms_norm_kernel.key(x, torch.empty(width, device="meta"))
        cases.append(PrewarmCase(op="rms_norm", key=key, arguments=arguments))
    return tuple(cases)


rms_norm = register(
    "rms_norm",
    "(Tensor x, Tensor weight, *, float eps) -> Tensor",
    reference=reference,
    fake=fake,
    example=example,
    cuda=cuda,
    cuda_cases=cuda_cases,
)
