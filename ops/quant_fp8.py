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
from ._registry import Arguments, register
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


quant_fp8 = register("quant_fp8", "(Tensor x) -> (Tensor, Tensor)", reference=reference, fake=fake, example=example)
