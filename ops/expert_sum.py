"""Sum of the routed and the shared experts of every row.

Shapes: routed ``[T, D]`` fp32; shared ``[T, D]`` fp32 or bf16. Returns ``routed + shared``
``[T, D]`` in ``dtype`` (fp32 or bf16).
Numerics: one fp32 addition, rounded once.
Errors: ``ValueError`` for other dtypes or shapes.
Source: MoE of the official inference code.
"""

import torch

from . import _rows
from ._registry import Arguments, PrewarmCase, register
from .shapes import Shape

_DTYPES = (torch.float32, torch.bfloat16)


def _alloc(routed: torch.Tensor, shared: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if routed.dtype != torch.float32 or shared.dtype not in _DTYPES or dtype not in _DTYPES:
        raise ValueError(
            "expert_sum routed must be float32, shared and dtype float32 or bfloat16, "
            f"got {routed.dtype}, {shared.dtype} and {dtype}"
        )
    if routed.dim() != 2 or shared.dim() != 2 or shared.shape[1] != routed.shape[1]:
        raise ValueError(
            f"expert_sum routed and shared must be rows of one width, got {list(routed.shape)} and {list(shared.shape)}"
        )
    _rows.check_rows("expert_sum", "routed", routed.shape[0], shared=shared)
    return torch.empty(routed.shape, dtype=dtype, device=routed.device)


def reference(routed: torch.Tensor, shared: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """``routed + shared`` in ``dtype``."""
    return _alloc(routed, shared, dtype).copy_(routed + shared)


def fake(routed: torch.Tensor, shared: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    return _alloc(routed, shared, dtype)


def example(shape: Shape, *, num_tokens: int, device: torch.device, dtype: torch.dtype, seed: int) -> Arguments:
    g = torch.Generator(device="cpu").manual_seed(seed)
    routed, shared = (torch.randn(num_tokens, shape.hidden, generator=g) for _ in range(2))
    return (routed.to(device), shared.to(device, dtype)), {"dtype": dtype}


def cuda(routed: torch.Tensor, shared: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    from . import expert_sum_kernel

    out = _alloc(routed, shared, dtype)
    expert_sum_kernel.run(routed, shared, out)
    return out


def cuda_cases(shape: Shape, device: torch.device, max_tokens: int) -> tuple[PrewarmCase, ...]:
    from . import expert_sum_kernel

    def arguments() -> Arguments:
        return example(shape, num_tokens=1, device=device, dtype=torch.bfloat16, seed=0)

    row = torch.empty(1, shape.hidden, dtype=torch.bfloat16, device="meta")
    return (PrewarmCase(op="expert_sum", key=expert_sum_kernel.key(row, row), arguments=arguments),)


expert_sum = register(
    "expert_sum",
    "(Tensor routed, Tensor shared, *, ScalarType dtype) -> Tensor",
    reference=reference,
    fake=fake,
    example=example,
    cuda=cuda,
    cuda_cases=cuda_cases,
)
