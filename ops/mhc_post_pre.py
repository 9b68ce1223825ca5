"""mHC between two sublayers: mhc_post of the last one, then mhc_pre of the next one.

Shapes: y ``[T, D]``, streams ``[T, M, D]``, post ``[T, M]``, comb ``[T, M, M]`` as in mhc_post; fn, scale, base and
norm_weight as in mhc_pre. Returns new streams ``[T, M, D]``, x ``[T, D]``, and the next post and comb.
Numerics: bitwise those of the two ops in sequence: the gates and the collapse see the streams AFTER their rounding.
Errors: ``ValueError`` for wrong shapes or dtypes and for ``sinkhorn_iters < 1``.
Source: hc_post and hc_pre of the official inference code; Xie et al., mHC, 2025.
"""

import torch

from . import _mhc, _mhc_dispatch
from ._registry import Arguments, PrewarmCase, register
from .mhc_post import example as post_example
from .mhc_pre import example as pre_example
from .shapes import Shape

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _alloc(
    y: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    sinkhorn_iters: int,
) -> Outputs:
    return (
        _mhc.alloc_post("mhc_post_pre", y, streams, post, comb),
        *_mhc.alloc_pre("mhc_post_pre", streams, fn, scale, base, norm_weight, sinkhorn_iters),
    )


def reference(
    y: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
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
    """Streams after a sublayer with output ``y``, and the next sublayer's input and mixing weights."""
    outputs = _alloc(y, streams, post, comb, fn, scale, base, norm_weight, sinkhorn_iters)
    new_streams = outputs[0].copy_(_mhc.post(y, streams, post, comb))
    values = _mhc.pre(
        new_streams,
        fn,
        scale,
        base,
        norm_weight,
        eps=eps,
        hc_eps=hc_eps,
        sinkhorn_iters=sinkhorn_iters,
        deterministic=deterministic,
    )
    x, next_post, next_comb = (out.copy_(value) for out, value in zip(outputs[1:], values))
    return new_streams, x, next_post, next_comb


def fake(
    y: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
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
    return _alloc(y, streams, post, comb, fn, scale, base, norm_weight, sinkhorn_iters)


def example(shape: Shape, *, num_tokens: int, device: torch.device, dtype: torch.dtype, seed: int) -> Arguments:
    post_arguments, _ = post_example(shape, num_tokens=num_tokens, device=device, dtype=dtype, seed=seed)
    pre_arguments, keywords = pre_example(shape, num_tokens=num_tokens, device=device, dtype=dtype, seed=seed + 1)
    return (*post_arguments, *pre_arguments[1:]), keywords


def cuda(
    y: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
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
    new_streams, x, next_post, next_comb = _alloc(y, streams, post, comb, fn, scale, base, norm_weight, sinkhorn_iters)
    partials = _mhc.alloc_partials(streams, fn.shape[0], deterministic=deterministic)
    _mhc_dispatch.post_pre(
        y,
        streams,
        post,
        comb,
        fn,
        scale,
        base,
        norm_weight,
        partials,
        new_streams,
        x,
        (next_post, next_comb),
        eps=eps,
        hc_eps=hc_eps,
        sinkhorn_iters=sinkhorn_iters,
    )
    return new_streams, x, next_post, next_comb


def cuda_cases(shape: Shape, device: torch.device, max_tokens: int) -> tuple[PrewarmCase, ...]:
    """The kernels of mhc_post and mhc_pre, or one for the first two launches."""

    def arguments() -> Arguments:
        return example(shape, num_tokens=1, device=device, dtype=torch.bfloat16, seed=0)

    outputs = (2 + shape.num_streams) * shape.num_streams
    return _mhc_dispatch.post_pre_cases("mhc_post_pre", shape, outputs, arguments)


mhc_post_pre = register(
    "mhc_post_pre",
    "(Tensor y, Tensor streams, Tensor post, Tensor comb, Tensor fn, Tensor scale, Tensor base, Tensor norm_weight, *,"
    " float eps, float hc_eps, int sinkhorn_iters, bool deterministic)"
    " -> (Tensor streams, Tensor x, Tensor post, Tensor comb)",
    reference=reference,
    fake=fake,
    example=example,
    cuda=cuda,
    cuda_cases=cuda_cases,
)
