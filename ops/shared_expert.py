"""Shared expert: one SwiGLU expert that every row goes through, without a routing weight.

Shapes: x ``[T, D]`` e4m3 with x_scale ``[T, ceil(D/128)]`` fp32 for FP8 and FP4 weights, fp32 or bf16 with an empty
x_scale for dense ones; w13 ``[2I, D]`` (gate rows over up rows) and w2 ``[D, I]`` in the formats of ``expert_ffn``
without the expert dimension: FP8 scales ``[2*ceil(I/128), ceil(D/128)]`` and ``[ceil(D/128), ceil(I/128)]``.
Result ``[T, D]`` in ``dtype``. A pad row of zeros gives zeros.
Numerics: as ``expert_ffn`` with one expert: fp32 products; for e4m3 and bf16 x both products and the activation are
rounded to bf16, and e4m3 x quantises the activation to FP8 (1 x 128) before w2. The SwiGLU clamp applies here too.
Errors: ``ValueError`` for dtypes or shapes that do not agree.
Source: Expert of the official inference code, current revision (the first one had no clamp here).
"""

import itertools

import torch

from . import _experts
from ._formats import WEIGHT_BLOCK
from ._registry import Arguments, PrewarmCase, register
from .quant_fp8 import reference as quant_fp8
from .shapes import Shape


def _alloc(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    if w13.dim() != 2:
        raise ValueError(f"shared_expert w13 must have 2 dimensions, got {w13.dim()}")
    if dtype not in _experts.DENSE:
        raise ValueError(f"shared_expert dtype must be float32 or bfloat16, got {dtype}")
    hidden, _ = _experts.check_weights("shared_expert", w13, w13_scale, w2, w2_scale)
    _experts.check_activations("shared_expert", x, x_scale, w13, hidden)
    return torch.empty(x.shape[0], hidden, dtype=dtype, device=x.device)


def reference(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    *,
    limit: float,
    dtype: torch.dtype,
    deterministic: bool,
) -> torch.Tensor:
    """Apply the expert to every row."""
    out = _alloc(x, x_scale, w13, w13_scale, w2, w2_scale, dtype)
    result = _experts.apply_expert(
        _experts.values(x, x_scale),
        None,
        *_experts.weight_values(w13, w13_scale, w2, w2_scale),
        limit=limit,
        act=torch.float32 if x.dtype == torch.float32 else torch.bfloat16,
        quantize=_experts.is_quantized(w13),
        deterministic=deterministic,
    )
    return out.copy_(result)


def fake(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    *,
    limit: float,
    dtype: torch.dtype,
    deterministic: bool,
) -> torch.Tensor:
    return _alloc(x, x_scale, w13, w13_scale, w2, w2_scale, dtype)


def example(shape: Shape, *, num_tokens: int, device: torch.device, dtype: torch.dtype, seed: int) -> Arguments:
    """fp32: a dense expert. bf16: what a bf16 model passes, an FP8 expert and e4m3 activations."""
    g = torch.Generator(device="cpu").manual_seed(seed)
    hidden, inner = shape.hidden, shape.expert_hidden
    x, w1, w3, w2 = (
        torch.randn(size, generator=g) * size[-1] ** -0.5
        for size in ((num_tokens, hidden), (inner, hidden), (inner, hidden), (hidden, inner))
    )
    x = x * hidden**0.5
    if dtype == torch.float32:
        empty = torch.empty(0)
        tensors = (x, empty, torch.cat((w1, w3)), empty, w2, empty)
    else:
        halves = (_fp8(w1), _fp8(w3))
        w13 = tuple(torch.cat(part) for part in zip(*halves, strict=True))
        tensors = (*quant_fp8(x), *w13, *_fp8(w2))
    keywords = {"limit": shape.swiglu_limit, "dtype": dtype, "deterministic": True}
    return tuple(t.to(device, copy=True) for t in tensors), keywords


def _fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes with block scales that differ from block to block."""
    blocks = [-(-size // WEIGHT_BLOCK) for size in weight.shape]
    scale = torch.tensor([2.0 ** -(6 + i % 3) for i in range(blocks[0] * blocks[1])]).view(blocks)
    spread = scale.repeat_interleave(WEIGHT_BLOCK, 0).repeat_interleave(WEIGHT_BLOCK, 1)
    return (weight / spread[: weight.shape[0], : weight.shape[1]]).to(torch.float8_e4m3fn), scale


def cuda(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    *,
    limit: float,
    dtype: torch.dtype,
    deterministic: bool,
) -> torch.Tensor:
    """FP8 and dense weights: products whose rows never depend on each other, see ``fp8_linear`` and ``linear``.

    FP4 weights, which no published checkpoint has here, run as a routed expert of weight 1.
    """
    out = _alloc(x, x_scale, w13, w13_scale, w2, w2_scale, dtype)
    if w13.dtype == _experts.FP4:
        from .expert_ffn import cuda as expert_ffn

        ids = torch.zeros(x.shape[0], 1, dtype=torch.int32, device=x.device)
        weights = torch.ones(x.shape[0], 1, dtype=torch.float32, device=x.device)
        stacked = (weight.unsqueeze(0) for weight in (w13, w13_scale, w2, w2_scale))
        return out.copy_(expert_ffn(x, x_scale, ids, weights, *stacked, limit=limit, deterministic=deterministic))
    from . import shared_expert_kernel

    shared_expert_kernel.run(x, x_scale, w13, w13_scale, w2, w2_scale, out, limit, deterministic=deterministic)
    return out


def cuda_cases(shape: Shape, device: torch.device, max_tokens: int) -> tuple[PrewarmCase, ...]:
    """The launches of FP8 and of bf16 experts, per token tile; most are shared with ``fp8_linear`` and ``linear``."""
    from . import _matmul_tiles, shared_expert_kernel

    def tensors(count: int, kind: torch.dtype, device: torch.device | str) -> tuple[torch.Tensor, ...]:
        hidden, inner = shape.hidden, shape.expert_hidden
        x, w13, w2 = (
            torch.zeros(size, device=device).to(kind)
            for size in ((count, hidden), (2 * inner, hidden), (hidden, inner))
        )
        if kind != _experts.FP8:
            empty = torch.empty(0, device=device)
            return x, empty, w13, empty, w2, empty
        rows, cols = (-(-size // WEIGHT_BLOCK) for size in (inner, hidden))
        sizes = ((count, cols), (2 * rows, cols), (cols, rows))
        scales = [torch.ones(size, device=device) for size in sizes]
        return x, scales[0], w13, scales[1], w2, scales[2]

    cases = {}
    counts = _matmul_tiles.sample_counts(max_tokens)
    for count, kind, deterministic in itertools.product(counts, (_experts.FP8, torch.bfloat16), (False, True)):
        keywords = {"limit": shape.swiglu_limit, "dtype": torch.bfloat16, "deterministic": deterministic}

        def arguments(count: int = count, kind: torch.dtype = kind, keywords=keywords) -> Arguments:
            return tensors(count, kind, device), keywords

        x, _, w13, _, w2, _ = tensors(count, kind, "meta")
        for key in shared_expert_kernel.keys(x, w13, w2, deterministic=deterministic):
            cases.setdefault(key, PrewarmCase(op="shared_expert", key=key, arguments=arguments))
    return tuple(cases.values())


shared_expert = register(
    "shared_expert",
    "(Tensor x, Tensor x_scale, Tensor w13, Tensor w13_scale, Tensor w2, Tensor w2_scale, *, float limit, "
    "ScalarType dtype, bool deterministic) -> Tensor",
    reference=reference,
    fake=fake,
    example=example,
    cuda=cuda,
    cuda_cases=cuda_cases,
)
