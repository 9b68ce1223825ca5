"""RMSNorm, one program per row: a row is read once into registers, so the cost is its bytes."""

import torch
import triton
import triton.language as tl

from ._triton import dtype_key, launch


@triton.jit(do_not_specialize=["eps"])
def _rms_norm(x_ptr, weight_ptr, out_ptr, eps, hidden: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # rows times hidden passes 2^31 for long prefills
    column = tl.arange(0, block)
    inside = column < hidden
    x = tl.load(x_ptr + row * hidden + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / hidden + eps)
    tl.store(out_ptr + row * hidden + column, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


def key(x: torch.Tensor, weight: torch.Tensor) -> tuple[str | int, ...]:
    """What the launch for these tensors is specialised on."""
    return ("rms_norm", x.shape[-1], *dtype_key(x, weight))


def run(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float) -> None:
    """Write the normalised rows of ``x [..., hidden]`` to ``out``."""
    hidden = x.shape[-1]
    rows = out.numel() // hidden
    block = triton.next_power_of_2(hidden)
    warps = min(max(block // 256, 1), 8)
    launch(
        key(x, weight), _rms_norm, (rows,), x.contiguous(), weight.contiguous(), out, eps,
        hidden=hidden, block=block, num_warps=warps,
    )  # fmt: skip
