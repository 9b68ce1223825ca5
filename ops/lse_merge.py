"""Merge attention over disjoint sets of keys (one per rank), then apply the attention sink once.

Shapes: outs ``[P, T, H, hd]`` fp32 or bf16, each normalised over its own keys without the sink; lses ``[P, T, H]``
fp32, natural log-sum-exp of its scores, −inf where a part has no keys; sink ``[H]`` fp32, −inf for none.
Returns out ``[T, H, hd]`` in the dtype of outs and lse ``[T, H]`` fp32 over all keys, without the sink.
Numerics: ``L = logsumexp(lses)``, ``out = exp(L - logaddexp(L, sink)) * sum_r exp(lse_r - L) out_r`` in fp32, parts in
order, one rounding. Where every part is empty, out is 0 and lse −inf. What an empty part's out holds is ignored.
Errors: ``ValueError`` for other dtypes or shapes.
Source: softmax over split keys (Milakov and Gimelshein, 2018).
"""

import torch

from . import _rows
from ._registry import Arguments, PrewarmCase, register
from .shapes import Shape

_EXAMPLE_PARTS = 3


def _alloc(outs: torch.Tensor, lses: torch.Tensor, sink: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if outs.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"lse_merge outs must be float32 or bfloat16, got {outs.dtype}")
    if lses.dtype != torch.float32 or sink.dtype != torch.float32:
        raise ValueError(f"lse_merge lses and sink must be float32, got {lses.dtype} and {sink.dtype}")
    num_parts, num_tokens, num_heads, dim = outs.shape
    if lses.shape[0] != num_parts or num_parts < 1:
        raise ValueError(f"lse_merge outs and lses must have the same parts, got {num_parts} and {lses.shape[0]}")
    _rows.check_rows("lse_merge", "outs", num_tokens, dim=1, lses=lses)
    if lses.shape[2] != num_heads or sink.shape != (num_heads,):
        raise ValueError(
            f"lse_merge lses and sink must have {num_heads} heads, got {lses.shape[2]} and {list(sink.shape)}"
        )
    return outs.new_empty((num_tokens, num_heads, dim)), lses.new_empty((num_tokens, num_heads))


def reference(outs: torch.Tensor, lses: torch.Tensor, sink: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine the parts by their softmax mass, then scale by the share that the sink leaves."""
    out, lse = _alloc(outs, lses, sink)
    maximum = lses.amax(0)
    empty = maximum == -torch.inf
    maximum = maximum.masked_fill(empty, 0.0)
    total, weighted = torch.zeros_like(maximum), torch.zeros(out.shape, device=out.device)
    for part, part_lse in zip(outs, lses, strict=True):
        mass = torch.exp(part_lse - maximum)
        total += mass
        weighted += mass.unsqueeze(-1) * part.float().masked_fill((part_lse == -torch.inf).unsqueeze(-1), 0.0)
    share = 1.0 / (total + torch.exp(sink - maximum))
    merged = (weighted * share.unsqueeze(-1)).masked_fill(empty.unsqueeze(-1), 0.0)
    return out.copy_(merged), lse.copy_((maximum + total.log()).masked_fill(empty, -torch.inf))


def fake(outs: torch.Tensor, lses: torch.Tensor, sink: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _alloc(outs, lses, sink)


def example(shape: Shape, *, num_tokens: int, device: torch.device, dtype: torch.dtype, seed: int) -> Arguments:
    g = torch.Generator(device="cpu").manual_seed(seed)
    outs = torch.randn(_EXAMPLE_PARTS, num_tokens, shape.num_heads, shape.head_dim, generator=g).to(device, dtype)
    lses = 3.0 * torch.randn(_EXAMPLE_PARTS, num_tokens, shape.num_heads, generator=g)
    lses[torch.rand(lses.shape, generator=g) < 0.2] = -torch.inf
    sink = torch.randn(shape.num_heads, generator=g)
    return (outs, lses.to(device), sink.to(device)), {}


def cuda(outs: torch.Tensor, lses: torch.Tensor, sink: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge part by part in registers; a row depends on itself alone."""
    from . import lse_merge_kernel

    out, lse = _alloc(outs, lses, sink)
    lse_merge_kernel.run(outs, lses, sink, out, lse)
    return out, lse


def cuda_cases(shape: Shape, device: torch.device, max_tokens: int) -> tuple[PrewarmCase, ...]:
    """One specialisation, whatever the number of parts."""
    from . import lse_merge_kernel

    def arguments() -> Arguments:
        return example(shape, num_tokens=1, device=device, dtype=torch.bfloat16, seed=0)

    outs = torch.empty(1, 1, 1, shape.head_dim, dtype=torch.bfloat16, device="meta")
    return (PrewarmCase(op="lse_merge", key=lse_merge_kernel.key(outs), arguments=arguments),)


lse_merge = register(
    "lse_merge",
    "(Tensor outs, Tensor lses, Tensor sink) -> (Tensor out, Tensor lse)",
    reference=reference,
    fake=fake,
    example=example,
    cuda=cuda,
    cuda_cases=cuda_cases,
    role="parallel",
)
