"""Queries and window keys of one step: per-head RMS of q, RMSNorm of kv, RoPE on both, kv into the paged window cache.

Shapes: q ``[num_tokens, num_heads, head_dim]`` and kv ``[num_tokens, head_dim]`` fp32 or bf16 (one dtype);
kv_norm_weight ``[head_dim]``; rope_table ``[max_positions, rope_dim]`` fp32; positions, window_slots ``[num_tokens]``
int64; window_cache dense or FP8 (docs/ops.md). Returns q in its shape and dtype; rows at position −1 are zero. A row
whose window slot is −1 is not written.
Numerics: q is divided by its root mean square in tensors of its own dtype, as in the official code: in bf16 the
squares, their mean, ``+ eps``, the reciprocal root and the product each round. RMSNorm of kv is fp32 and rounds once,
so does each rotation. With ``quantize`` the dimensions of kv before the last rope_dim are rounded to FP8 in blocks of
64 (the last block may be shorter).
Errors: ``ValueError`` on wrong ranks, sizes or dtypes; ``NotImplementedError`` for other cache dtypes.
Source: ``Attention.forward`` of the official inference code.
"""

import torch

from . import _cases, _formats, _paged, _rope
from ._example_rows import example_rope_table, example_rows
from ._registry import Arguments, PrewarmCase, register
from ._rows import check_rows, rms_normalize
from .shapes import WINDOW_PAGE_TOKENS, Shape

_DTYPES = (torch.float32, torch.bfloat16)


def _alloc(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_norm_weight: torch.Tensor,
    rope_table: torch.Tensor,
    positions: torch.Tensor,
    window_slots: torch.Tensor,
    window_cache: torch.Tensor,
) -> torch.Tensor:
    if q.dim() != 3 or q.dtype not in _DTYPES:
        raise ValueError(
            f"qkv_rope_cache q must be a float32 or bfloat16 [tokens, heads, head_dim], got {q.dim()}-D {q.dtype}"
        )
    head_dim = q.shape[2]
    if kv.dim() != 2 or kv.shape[1] != head_dim or kv.dtype != q.dtype:
        raise ValueError(f"qkv_rope_cache kv must be [tokens, {head_dim}] {q.dtype}, got {list(kv.shape)} {kv.dtype}")
    if kv_norm_weight.shape != (head_dim,):
        raise ValueError(
            f"qkv_rope_cache kv_norm_weight must have shape [{head_dim}], got {list(kv_norm_weight.shape)}"
        )
    for name, tensor in (("positions", positions), ("window_slots", window_slots)):
        if tensor.dim() != 1 or tensor.dtype != torch.int64:
            raise ValueError(f"qkv_rope_cache {name} must be 1-D int64, got {tensor.dim()}-D {tensor.dtype}")
    check_rows("qkv_rope_cache", "q", q.shape[0], kv=kv, positions=positions, window_slots=window_slots)
    _rope.check("qkv_rope_cache", rope_table, head_dim)
    _paged.check("qkv_rope_cache", window_cache, head_dim)
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def reference(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_norm_weight: torch.Tensor,
    rope_table: torch.Tensor,
    positions: torch.Tensor,
    window_slots: torch.Tensor,
    window_cache: torch.Tensor,
    *,
    eps: float,
    quantize: bool,
) -> torch.Tensor:
    """Return the normalised, rotated queries and write the step's keys (which are also its values)."""
    out = _alloc(q, kv, kv_norm_weight, rope_table, positions, window_slots, window_cache)
    angles = _rope.table_rows(rope_table, positions)
    keys = _rope.rotate(rms_normalize(kv, kv_norm_weight, eps), angles)
    if quantize:
        keys = _formats.simulate_kv(keys, rope_table.shape[1])
    _paged.write(window_cache, window_slots, keys)
    out.copy_(_rope.rotate(_unit_rms(q, eps), angles))
    return out.masked_fill_((positions < 0).view(-1, 1, 1), 0.0)


def _unit_rms(q: torch.Tensor, eps: float) -> torch.Tensor:
    """``q * rsqrt(mean(q^2) + eps)`` over the last dimension, every intermediate rounded to ``q.dtype``.

    ``eps`` itself is not: torch rounds a scalar operand to the tensor's dtype on the CPU but not on a GPU.
    """
    mean = q.square().float().mean(-1, keepdim=True).to(q.dtype)
    return q * torch.rsqrt((mean.float() + eps).to(q.dtype).float()).to(q.dtype)


def fake(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_norm_weight: torch.Tensor,
    rope_table: torch.Tensor,
    positions: torch.Tensor,
    window_slots: torch.Tensor,
    window_cache: torch.Tensor,
    *,
    eps: float,
    quantize: bool,
) -> torch.Tensor:
    return _alloc(q, kv, kv_norm_weight, rope_table, positions, window_slots, window_cache)


def example(shape: Shape, *, num_tokens: int, device: torch.device, dtype: torch.dtype, seed: int) -> Arguments:
    rows = example_rows(shape, num_tokens=num_tokens, device=device, seed=seed)
    g = torch.Generator(device="cpu").manual_seed(seed)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=g).to(device, dtype)

    args = (
        randn(num_tokens, shape.num_heads, shape.head_dim),
        randn(num_tokens, shape.head_dim),
        randn(shape.head_dim),
        example_rope_table(rows.max_context, shape.rope_dim, g).to(device),
        rows.positions,
        rows.window_slots,
        randn(rows.num_window_pages, WINDOW_PAGE_TOKENS, shape.head_dim),
    )
    return args, {"eps": shape.eps, "quantize": dtype == torch.bfloat16}


def cuda(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_norm_weight: torch.Tensor,
    rope_table: torch.Tensor,
    positions: torch.Tensor,
    window_slots: torch.Tensor,
    window_cache: torch.Tensor,
    *,
    eps: float,
    quantize: bool,
) -> torch.Tensor:
    from . import qkv_rope_cache_kernel

    out = _alloc(q, kv, kv_norm_weight, rope_table, positions, window_slots, window_cache)
    qkv_rope_cache_kernel.run(
        q, kv, kv_norm_weight, rope_table, positions, window_slots, window_cache, out, eps, quantize
    )
    return out


def cuda_cases(shape: Shape, device: torch.device, max_tokens: int) -> tuple[PrewarmCase, ...]:
    """bf16 rows, for every cache a bf16 model can have."""
    from . import qkv_rope_cache_kernel

    cases = []
    for quantize, dtype in _cases.cache_formats(shape.head_dim):

        def arguments(quantize: bool = quantize, dtype: torch.dtype = dtype) -> Arguments:
            args, kwargs = example(shape, num_tokens=1, device=device, dtype=torch.bfloat16, seed=0)
            cache = _cases.empty_cache(
                args[-1].shape[0], WINDOW_PAGE_TOKENS, shape.head_dim, dtype=dtype, device=device
            )
            return (*args[:-1], cache), kwargs | {"quantize": quantize}

        key = qkv_rope_cache_kernel.key(
            shape.head_dim, shape.rope_dim, WINDOW_PAGE_TOKENS, quantize, torch.bfloat16, dtype
        )
        cases.append(PrewarmCase(op="qkv_rope_cache", key=key, arguments=arguments))
    return tuple(cases)


qkv_rope_cache = register(
    "qkv_rope_cache",
    "(Tensor q, Tensor kv, Tensor kv_norm_weight, Tensor rope_table, Tensor positions, Tensor window_slots, "
    "Tensor(a!) window_cache, *, float eps, bool quantize) -> Tensor",
    reference=reference,
    fake=fake,
    example=example,
    cuda=cuda,
    cuda_cases=cuda_cases,
)
