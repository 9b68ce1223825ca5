"""mHC before a sublayer: gates from all streams, collapse to one vector, RMSNorm.

Shapes: streams ``[T, M, D]`` fp32 or bf16; fn ``[(2+M)*M, M*D]``, scale ``[3]``, base ``[(2+M)*M]``, all fp32 (rows of
fn and base: M of the collapse, M of post, M*M of comb, row-major); norm_weight ``[D]``. Returns x ``[T, D]`` in the
dtype of streams, post ``[T, M]`` and comb ``[T, M, M]`` fp32.
Numerics: ``m = fn @ flat * rsqrt(mean(flat^2) + eps)`` over all M*D values; collapse weight ``sigmoid(m*scale[0] +
base) + hc_eps``; post ``2 * sigmoid(m*scale[1] + base)``; comb: softmax over the last index, plus hc_eps, then
``sinkhorn_iters`` column and ``sinkhorn_iters - 1`` row normalisations, columns (first index summed) last, hc_eps in
every denominator. All fp32; x is rounded to the stream dtype after the collapse and again after the norm.
With ``deterministic`` the result of a row is bitwise independent of the other rows: on CUDA the products are divided
into as many parts as M*D alone decides, without it into as many as the number of rows leaves room for.
Errors: ``ValueError`` for wrong shapes or dtypes and for ``sinkhorn_iters < 1``.
Source: hc_pre and the block norms of the official inference code; Xie et al., mHC, 2025.
"""

import torch

from . import _mhc, _mhc_dispatch
from ._registry import Arguments, PrewarmCase, register
from .shapes import Shape

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def reference(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    *,
    eps: float,
    hc_eps: float,
    sinkhorn_iters: int,
    deterministic: bool,
) -> Outputs:
    """Collapse the streams of every row to the normalised sublayer input, with the weights that mix its output back."""
    outputs = _mhc.alloc_pre("mhc_pre", streams, fn, scale, base, norm_weight, sinkhorn_iters)
    values = _mhc.pre(
        streams,
        fn,
        scale,
        base,
        norm_weight,
        eps=eps,
        hc_eps=hc_eps,
        sinkhorn_iters=sinkhorn_iters,
        deterministic=deterministic,
    )
    x, post, comb = (out.copy_(value) for out, value in zip(outputs, values))
    return x, post, comb


def fake(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    *,
    eps: float,
    hc_eps: float,
    sinkhorn_iters: int,
    deterministic: bool,
) -> Outputs:
    return _mhc.alloc_pre("mhc_pre", streams, fn, scale, base, norm_weight, sinkhorn_iters)


def example(shape: Shape, *, num_tokens: int, device: torch.device, dtype: torch.dtype, seed: int) -> Arguments:
    g = torch.Generator(device="cpu").manual_seed(seed)
    num_streams, hidden = shape.num_streams, shape.hidden
    streams = torch.randn(num_tokens, num_streams, hidden, generator=g).to(device, dtype)
    parameters = _mhc.example_parameters(num_streams, hidden, (2 + num_streams) * num_streams, 3, g)
    fn, scale, base, norm_weight = (p.to(device) for p in parameters)
    keywords = {"eps": shape.eps, "hc_eps": 1e-6, "sinkhorn_iters": shape.sinkhorn_iters, "deterministic": True}
    return (streams, fn, scale, base, norm_weight.to(dtype)), keywords


def cuda(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    *,
    eps: float,
    hc_eps: float,
    sinkhorn_iters: int,
    deterministic: bool,
) -> Outputs:
    x, post, comb = _mhc.alloc_pre("mhc_pre", streams, fn, scale, base, norm_weight, sinkhorn_iters)
    partials = _mhc.alloc_partials(streams, fn.shape[0], deterministic=deterministic)
    _mhc_dispatch.pre(
        streams,
        fn,
        scale,
        base,
        norm_weight,
        partials,
        x,
        (post, comb),
        eps=eps,
        hc_eps=hc_eps,
        sinkhorn_iters=sinkhorn_iters,
    )
    return x, post, comb


def cuda_cases(shape: Shape, device: torch.device, max_tokens: int) -> tuple[PrewarmCase, ...]:
    """One specialisation of each of two kernels serves every number of rows and of parts."""

    def arguments() -> Arguments:
        return example(shape, num_tokens=1, device=device, dtype=torch.bfloat16, seed=0)

    return _mhc_dispatch.pre_cases("mhc_pre", shape, (2 + shape.num_streams) * shape.num_streams, arguments)


mhc_pre = register(
    "mhc_pre",
    "(Tensor streams, Tensor fn, Tensor scale, Tensor base, Tensor norm_weight, *, float eps, float hc_eps,"
    " int sinkhorn_iters, bool deterministic) -> (Tensor x, Tensor post, Tensor comb)",
    reference=reference,
    fake=fake,
    example=example,
    cuda=cuda,
    cuda_cases=cuda_cases,
)
