"""Maths of one SwiGLU expert, shared by the routed and the shared experts.

``a = silu(min(gate, limit)) * clamp(up, -limit, limit)`` in fp32, times the routing weight if there is one, then
``w2 a``. The routing weight comes BEFORE w2, where it changes what the FP8 quantiser of ``a`` sees.

Weight formats, told apart by dtype: uint8 (packed FP4, E8M0 scale bytes), float8_e4m3fn (fp32 scales of 128 x 128
blocks), float32 or bfloat16 (empty scales). w13 stacks the gate rows w1 over the up rows w3; each half has its own
FP8 blocks, so the halves are decoded apart. FP4 and FP8 weights take e4m3 activations with 1 x 128 scales, dense
weights take fp32 or bf16 activations.
"""

import torch
from torch.nn.functional import silu

from ._formats import (
    ACTIVATION_BLOCK,
    FP4_BLOCK,
    WEIGHT_BLOCK,
    dequantize_fp4,
    dequantize_fp8,
    dequantize_fp8_weight,
    quantize_fp8,
)
from ._rows import check_rows, product

FP8, FP4 = torch.float8_e4m3fn, torch.uint8
DENSE = (torch.float32, torch.bfloat16)


def is_quantized(weight: torch.Tensor) -> bool:
    """Whether a weight of this dtype takes e4m3 activations."""
    return weight.dtype in (FP8, FP4)


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


def _expect_shape(op: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{op} {name} must have shape {list(shape)}, got {list(tensor.shape)}")


def _expect_dtype(op: str, name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes:
        raise ValueError(f"{op} {name} must have dtype {' or '.join(map(str, dtypes))}, got {tensor.dtype}")


def check_weights(
    op: str, w13: torch.Tensor, w13_scale: torch.Tensor, w2: torch.Tensor, w2_scale: torch.Tensor
) -> tuple[int, int]:
    """Raise ``ValueError`` unless dtypes and shapes agree; returns (hidden, expert_hidden)."""
    _expect_dtype(op, "w13", w13, (FP4, FP8, *DENSE))
    _expect_dtype(op, "w2", w2, (w13.dtype,))
    per_byte = 2 if w13.dtype == FP4 else 1
    lead, hidden, inner = tuple(w2.shape[:-2]), w2.shape[-2], w2.shape[-1] * per_byte
    if w13.dtype == FP4 and (hidden % FP4_BLOCK or inner % FP4_BLOCK):
        raise ValueError(f"{op} FP4 sizes must be multiples of {FP4_BLOCK}, got {hidden} and {inner}")
    _expect_shape(op, "w13", w13, (*lead, 2 * inner, hidden // per_byte))
    if w13.dtype in DENSE:
        for name, scale in (("w13_scale", w13_scale), ("w2_scale", w2_scale)):
            if scale.numel():
                raise ValueError(f"{op} {name} must be empty for dense weights, got shape {list(scale.shape)}")
        return hidden, inner
    if w13.dtype == FP4:
        dtype, rows13, cols13 = torch.uint8, 2 * inner, hidden // FP4_BLOCK
        rows2, cols2 = hidden, inner // FP4_BLOCK
    else:
        dtype, rows13, cols13 = torch.float32, 2 * _blocks(inner, WEIGHT_BLOCK), _blocks(hidden, WEIGHT_BLOCK)
        rows2, cols2 = _blocks(hidden, WEIGHT_BLOCK), _blocks(inner, WEIGHT_BLOCK)
    for name, scale, rows, cols in (("w13_scale", w13_scale, rows13, cols13), ("w2_scale", w2_scale, rows2, cols2)):
        _expect_dtype(op, name, scale, (dtype,))
        _expect_shape(op, name, scale, (*lead, rows, cols))
    return hidden, inner


def check_activations(op: str, x: torch.Tensor, x_scale: torch.Tensor, w13: torch.Tensor, hidden: int) -> None:
    """Raise ``ValueError`` unless ``x [T, hidden]`` and its scale are what ``w13`` takes."""
    _expect_dtype(op, f"x for {w13.dtype} weights", x, (FP8,) if is_quantized(w13) else DENSE)
    if x.dim() != 2 or x.shape[1] != hidden:
        raise ValueError(f"{op} x must have shape [T, {hidden}], got {list(x.shape)}")
    if not is_quantized(w13):
        if x_scale.shape[-1] != 0:
            raise ValueError(f"{op} x_scale must be empty for {x.dtype} x, got shape {list(x_scale.shape)}")
        return
    _expect_dtype(op, "x_scale", x_scale, (torch.float32,))
    blocks = _blocks(hidden, ACTIVATION_BLOCK)
    if x_scale.dim() != 2 or x_scale.shape[1] != blocks:
        raise ValueError(f"{op} x_scale must have shape [T, {blocks}], got {list(x_scale.shape)}")
    check_rows(op, "x", x.shape[0], x_scale=x_scale)


def values(x: torch.Tensor, x_scale: torch.Tensor) -> torch.Tensor:
    """fp32 values of the activations."""
    return dequantize_fp8(x, x_scale) if x.dtype == FP8 else x.float()


def weight_values(
    w13: torch.Tensor, w13_scale: torch.Tensor, w2: torch.Tensor, w2_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 values ``[2I, D]`` and ``[D, I]`` of one expert's weights."""
    if w13.dtype == FP4:
        return dequantize_fp4(w13, w13_scale), dequantize_fp4(w2, w2_scale)
    if w13.dtype == FP8:
        halves = zip(w13.chunk(2), w13_scale.chunk(2), strict=True)
        return torch.cat([dequantize_fp8_weight(*half) for half in halves]), dequantize_fp8_weight(w2, w2_scale)
    return w13.float().contiguous(), w2.float().contiguous()


def _silu(x: torch.Tensor, deterministic: bool) -> torch.Tensor:
    """silu; with ``deterministic`` row by row, because the last elements of a call go through another exp."""
    if not deterministic:
        return silu(x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for row, target in zip(x.contiguous(), out, strict=True):
        target.copy_(silu(row))
    return out


def apply_expert(
    x: torch.Tensor,
    weights: torch.Tensor | None,
    w13: torch.Tensor,
    w2: torch.Tensor,
    *,
    limit: float,
    act: torch.dtype,
    quantize: bool,
    deterministic: bool,
) -> torch.Tensor:
    """One expert on fp32 rows.

    Args:
        x: ``[n, D]`` fp32 values.
        weights: ``[n]`` fp32 routing weights; ``None`` leaves the rows unweighted.
        w13, w2: ``[2I, D]`` and ``[D, I]`` fp32 values.
        limit: SwiGLU clamp.
        act: dtype to which both products and ``a`` are rounded.
        quantize: whether ``a`` is rounded to FP8 in 1 x 128 blocks before w2.
        deterministic: a row's result does not depend on the other rows.

    Returns:
        ``[n, D]`` fp32, holding values of ``act``.
    """
    gate, up = product(x, w13, deterministic=deterministic).to(act).float().chunk(2, dim=-1)
    hidden = _silu(gate.clamp(max=limit), deterministic) * up.clamp(-limit, limit)
    if weights is not None:
        hidden = hidden * weights.unsqueeze(-1)
    hidden = hidden.to(act)
    if quantize:
        hidden = dequantize_fp8(*quantize_fp8(hidden))
    return product(hidden, w2, deterministic=deterministic).to(act).float()
