"""FP4 quantisation of expert weights in blocks of 32; writes FP4 checkpoints.

Shapes: x ``[..., size]`` fp32 or bf16 with size a multiple of 32; packed uint8 ``[..., size / 2]`` (even element in
the low nibble) and E8M0 scale bytes uint8 ``[..., size / 32]``, both contiguous.
Numerics: ``amax = max(|x|, 6 * 2^-126)`` of the block, ``scale = 2^ceil(log2(amax / 6))`` exactly, codes
``e2m1(clamp(x / scale, ±6))`` rounded to nearest, ties to even. Inputs must be finite: e2m1 has no NaN.
Errors: ``ValueError`` on a scalar, another dtype, or a size that is not a multiple of 32.
Source: ``fp4_act_quant`` of the official inference code; packing of its ``convert.py``.
"""

import torch

from . import _formats
from ._registry import Arguments, PrewarmCase, register
from .shapes import Shape


def _alloc(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if x.dim() < 1 or x.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"quant_fp4 x must be a float32 or bfloat16 [..., size], got {x.dim()}-D {x.dtype}")
    size = x.shape[-1]
    if size % _formats.FP4_BLOCK:
        raise ValueError(f"quant_fp4 size must be a multiple of {_formats.FP4_BLOCK}, got {size}")
    packed = torch.empty(*x.shape[:-1], size // 2, dtype=torch.uint8, device=x.device)
    return packed, torch.empty(*x.shape[:-1], size // _formats.FP4_BLOCK, dtype=torch.uint8, device=x.device)


def reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed e2m1 codes and E8M0 scale bytes of ``x``."""
    packed, scale = _alloc(x)
    codes, factors = _formats.quantize_fp4(x)
    return packed.copy_(_formats.pack_fp4(codes)), scale.copy_(_formats.encode_e8m0(factors))


def fake(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _alloc(x)


def example(shape: Shape, *, num_tokens: int, device: torch.device, dtype: torch.dtype, seed: int) -> Arguments:
    g = torch.Generator(device="cpu").manual_seed(seed)
    return (torch.randn(num_tokens, shape.expert_hidden, generator=g).to(device, dtype),), {}


def cuda(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bitwise the reference; blocks are independent of each other."""
    from . import quant_fp4_kernel

    packed, scale = _alloc(x)
    quant_fp4_kernel.run(x, packed, scale)
    return packed, scale


def cuda_cases(shape: Shape, device: torch.device, max_tokens: int) -> tuple[PrewarmCase, ...]:
    """One specialisation per dtype; its width does not matter."""
    from . import quant_fp4_kernel

    cases = []
    for dtype in (torch.float32, torch.bfloat16):

        def arguments(dtype: torch.dtype = dtype) -> Arguments:
            return (torch.ones(1, _formats.FP4_BLOCK, dtype=dtype, device=device),), {}

        key = quant_fp4_kernel.key(torch.empty(1, _formats.FP4_BLOCK, dtype=dtype, device="meta"))
        cases.append(PrewarmCase(op="quant_fp4", key=key, arguments=arguments))
    return tuple(cases)


quant_fp4 = register(
    "quant_fp4",
    "(Tensor x) -> (Tensor packed, Tensor scale)",
    reference=reference,
    fake=fake,
    example=example,
    cuda=cuda,
    cuda_cases=cuda_cases,
    role="tool",
)
