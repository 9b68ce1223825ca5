"""Dense linear layer without bias: router, compressor, indexer weights, LM head, and every layer in exact numerics.

Shapes: x ``[num_tokens, in]`` and weight ``[out, in]``, each fp32 or bf16; result ``[num_tokens, out]`` in ``dtype``.
Numerics: operands are widened to fp32, products accumulate in fp32 (no TF32), one rounding to ``dtype``. With
``deterministic`` a row's result does not depend on the other rows.
Errors: ``ValueError`` on wrong ranks, dtypes or inner sizes.
Source: ``linear`` of the official inference code for unquantised weights.
"""

import torch

from ._registry import Arguments, register
from ._rows import product
from .shapes import Shape

_DTYPES = (torch.float32, torch.bfloat16)


def _alloc(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if weight.dim() != 2:
        raise ValueError(f"linear weight must be [out, in], got {list(weight.shape)}")
    if x.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"linear x must be [num_tokens, {weight.shape[1]}], got {list(x.shape)}")
    for subject, got in (("x", x.dtype), ("weight", weight.dtype), ("result", dtype)):
        if got not in _DTYPES:
            raise ValueError(f"linear {subject} must be float32 or bfloat16, got {got}")
    return torch.empty(x.shape[0], weight.shape[0], dtype=dtype, device=x.device)


def reference(x: torch.Tensor, weight: torch.Tensor, *, dtype: torch.dtype, deterministic: bool) -> torch.Tensor:
    """``x @ weight.T``, accumulated in fp32 and rounded once."""
    return _alloc(x, weight, dtype).copy_(product(x, weight, deterministic=deterministic))


def fake(x: torch.Tensor, weight: torch.Tensor, *, dtype: torch.dtype, deterministic: bool) -> torch.Tensor:
    return _alloc(x, weight, dtype)


def example(shape: Shape, *, num_tokens: int, device: torch.device, dtype: torch.dtype, seed: int) -> Arguments:
    g = torch.Generator(device="cpu").manual_seed(seed)
    x = torch.randn(num_tokens, shape.hidden, generator=g).to(device, dtype)
    weight = (torch.randn(shape.num_experts, shape.hidden, generator=g) * shape.hidden**-0.5).to(device, dtype)
    return (x, weight), {"dtype": torch.float32, "deterministic": True}


linear = register(
    "linear",
    "(Tensor x, Tensor weight, *, ScalarType dtype, bool deterministic) -> Tensor",
    reference=reference,
    fake=fake,
    example=example,
)
