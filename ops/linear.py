"""Dense linear layer without bias: router, compressor, indexer weights, LM head, and every layer in exact numerics.

Shapes: x ``[num_tokens, in]`` and weight ``[out, in]``, each fp32 or bf16; result ``[num_tokens, out]`` in ``dtype``.
Numerics: operands are widened to fp32, products accumulate in fp32 (no TF32), one rounding to ``dtype``. With
``deterministic`` a row's result does not depend on the other rows.
Errors: ``ValueError`` on wrong ranks, dtypes or inner sizes.
Source: ``linear`` of the official inference code for unquantised weights.
"""

import itertools

import torch

from ._registry import Arguments, PrewarmCase, register
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
    weight = torch.randn(shape.num_experts, shape.hidden, generator=g) * shape.hidden**-0.5
    return (x, weight.to(device, dtype)), {"dtype": torch.float32, "deterministic": True}


def cuda(x: torch.Tensor, weight: torch.Tensor, *, dtype: torch.dtype, deterministic: bool) -> torch.Tensor:
    """Rows never depend on each other; with ``deterministic`` every number of rows also sums in one order."""
    from . import linear_kernel

    out = _alloc(x, weight, dtype)
    linear_kernel.run(x, weight, out, deterministic=deterministic)
    return out


def cuda_cases(shape: Shape, device: torch.device, max_tokens: int) -> tuple[PrewarmCase, ...]:
    """Per token tile, bf16 weights: an fp32 result (router, compressor, head) or a bf16 one.

    Sizes only matter by what divides them, so a case's weight has the fewest rows of its kind. A projection of the MTP
    block multiplies every stream of a token.
    """
    from . import _matmul_tiles, linear_kernel

    latent = (shape.q_lora_rank, shape.o_groups * shape.o_lora_rank, shape.expert_hidden)
    kinds = {
        torch.float32: ((shape.hidden,), (shape.num_experts, shape.head_dim, shape.vocab)),
        torch.bfloat16: ((shape.hidden, *latent), (shape.hidden, shape.index_heads, shape.q_lora_rank)),
    }
    cases = {}
    counts = _matmul_tiles.sample_counts(max_tokens * shape.num_streams)
    for count, deterministic in itertools.product(counts, (False, True)):
        for dtype, (widths, outs) in kinds.items():
            for width, rows in itertools.product(widths, [_matmul_tiles.width_unit(n, 16) for n in outs]):
                keywords = {"dtype": dtype, "deterministic": deterministic}

                def arguments(count: int = count, width: int = width, rows: int = rows, keywords=keywords) -> Arguments:
                    x, weight = (torch.ones(n, width, dtype=torch.bfloat16, device=device) for n in (count, rows))
                    return (x, weight), keywords

                x, weight = (torch.empty(n, width, dtype=torch.bfloat16, device="meta") for n in (count, rows))
                key = linear_kernel.key(x, weight, dtype, deterministic=deterministic)
                cases.setdefault(key, PrewarmCase(op="linear", key=key, arguments=arguments))
    return tuple(cases.values())


linear = register(
    "linear",
    "(Tensor x, Tensor weight, *, ScalarType dtype, bool deterministic) -> Tensor",
    reference=reference,
    fake=fake,
    example=example,
    cuda=cuda,
    cuda_cases=cuda_cases,
)
