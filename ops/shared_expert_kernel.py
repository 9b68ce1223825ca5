"""The shared expert as two products with the SwiGLU kernel between them.

The first product is rounded to bf16 (fp32 for fp32 rows) in memory, which is where the official code rounds it; SwiGLU
reads it once and writes the operand of the second product.
"""

import torch

from . import _swiglu_kernel, fp8_linear_kernel, linear_kernel
from ._formats import ACTIVATION_BLOCK
from ._runtime import Key

FP8 = torch.float8_e4m3fn


def _act(x: torch.Tensor) -> torch.dtype:
    """Dtype to which both products are rounded."""
    return torch.float32 if x.dtype == torch.float32 else torch.bfloat16


def _middle(x: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gate and up ``[T, 2I]``, the activation ``[T, I]`` and its scales (empty for dense weights)."""
    rows, inner = x.shape[0], w2.shape[1]
    fp8 = w2.dtype == FP8
    gate_up = torch.empty(rows, 2 * inner, dtype=_act(x), device=x.device)
    hidden = torch.empty(rows, inner, dtype=FP8 if fp8 else _act(x), device=x.device)
    scale = torch.empty((rows, -(-inner // ACTIVATION_BLOCK)) if fp8 else 0, dtype=torch.float32, device=x.device)
    return gate_up, hidden, scale


def keys(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, *, deterministic: bool) -> tuple[Key, ...]:
    """What the three launches for these tensors are specialised on; they may be meta tensors."""
    gate_up, hidden, _ = _middle(x, w2)
    middle = _swiglu_kernel.key(gate_up, hidden, x.new_empty(0))
    if w2.dtype == FP8:
        first = fp8_linear_kernel.key(x, w13, gate_up.dtype, w2.shape[1], deterministic=deterministic)
        return first, middle, fp8_linear_kernel.key(hidden, w2, gate_up.dtype, deterministic=deterministic)
    first, second = (
        linear_kernel.key(a, w, gate_up.dtype, deterministic=deterministic) for a, w in ((x, w13), (hidden, w2))
    )
    return first, middle, second


def run(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    out: torch.Tensor,
    limit: float,
    *,
    deterministic: bool,
) -> None:
    """Apply the FP8 or dense expert to every row of ``x [T, D]``; ``out [T, D]`` fp32 or bf16."""
    gate_up, hidden, scale = _middle(x, w2)
    unweighted = torch.empty(0, dtype=torch.float32, device=x.device)
    result = out if out.dtype == gate_up.dtype else torch.empty(out.shape, dtype=gate_up.dtype, device=out.device)
    if w2.dtype == FP8:
        fp8_linear_kernel.run(x, x_scale, w13, w13_scale, gate_up, half=w2.shape[1], deterministic=deterministic)
        _swiglu_kernel.run(gate_up, hidden, scale, limit, unweighted)
        fp8_linear_kernel.run(hidden, scale, w2, w2_scale, result, deterministic=deterministic)
    else:
        linear_kernel.run(x, w13, gate_up, deterministic=deterministic)
        _swiglu_kernel.run(gate_up, hidden, scale, limit, unweighted)
        linear_kernel.run(hidden, w2, result, deterministic=deterministic)
    if result is not out:
        out.copy_(result)
