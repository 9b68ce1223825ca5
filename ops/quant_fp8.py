"""FP8 activation quantisation in blocks of 1x128, the first half of every FP8 product.

Shapes: x ``[..., size]`` fp32 or bf16; codes e4m3 ``[..., size]`` and scales fp32 ``[..., ceil(size / 128)]``, both
contiguous. The last block may be partial.
Numerics: ``amax = max(|x|, 1e-4)`` of the block, ``scale = 2^ceil(log2(amax / 448))`` exactly, codes
``e4m3(clamp(x / scale, ±448))`` rounded to nearest, ties to even. Every scale is at least ``2^-22``. A NaN stays NaN;
an infinity makes its whole block NaN.
Errors: ``ValueError`` on a scalar or another dtype.
Source: ``act_quant`` of the official inference code, current revision.
"""

import torch

from . import _formats
from ._registry import Arguments, PrewarmCase, register
from .shapes import Shape


def _alloc(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if x.dim() < 1 or x.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"quant_fp8 x must be a float32 or bfloat16 [..., size], got {x.dim()}-D {x.dtype}")
    num_blocks = -(-x.shape[-1] // _formats.ACTIVATION_BLOCK)
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    return codes, torch.empty(*x.shape[:-1], num_blocks, dtype=torch.float32, device=x.device)


def reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes and power-of-two scales of ``x``."""
    codes, scale = _alloc(x)
    values, factors = _formats.quantize_fp8(x, _formats.ACTIVATION_BLOCK)
    return codes.copy_(values), scale.copy_(factors)


def fake(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _alloc(x)


def example(shape: Shape, *, num_tokens: int, device: torch.device, dtype: torch.dtype, seed: int) -> Arguments:
    g = torch.Generator(device="cpu").manual_seed(seed)
    return (torch.randn(num_tokens, shape.hidden, generator=g).to(device, dtype),), {}


def cuda(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bitwise the reference; blocks are independent of each other, so every call is deterministic."""
    from . import quant_fp8_kernel

    codes, scale = _alloc(x)
    quant_fp8_kernel.run(x, codes, scale)
    return codes, scale


def cuda_cases(shape: Shape, device: torch.device, max_tokens: int) -> tuple[PrewarmCase, ...]:
    """One specialisation per kind of width that the model quantises: whole blocks, or a partial last one."""
    from . import quant_fp8_kernel

    cases = {}
    for width in (shape.hidden, shape.q_lora_rank, shape.o_groups * shape.o_lora_rank, shape.expert_hidden):

        def arguments(width: int = width) -> Arguments:
            return (torch.ones(1, width, dtype=torch.bfloat16, device=device),), {}

        key = quant_fp8_kernel.key(torch.empty(1, width, dtype=torch.bfloat16, device="meta"))
        cases.setdefault(key, PrewarmCase(op="quant_fp8", key=key, arguments=arguments))
    return tuple(cases.values())


quant_fp8 = register(
    "quant_fp8",
    "(Tensor x) -> (Tensor, Tensor)",
    reference=reference,
    fake=fake,
    example=example,
    cuda=cuda,
    cuda_cases=cuda_cases,
)
