"""mHC after the last block: gated collapse of the streams and the final RMSNorm.

Shapes: streams ``[T, M, D]`` fp32 or bf16; fn ``[M, M*D]``, scale ``[1]``, base ``[M]``, all fp32; norm_weight ``[D]``.
Returns ``[T, D]`` in the dtype of streams.
Numerics: ``m = fn @ flat * rsqrt(mean(flat^2) + eps)`` over all M*D values; weights ``sigmoid(m*scale + base) +
hc_eps``, no Sinkhorn. fp32; rounded to the stream dtype after the collapse and again after the norm.
With ``deterministic`` the result of a row is bitwise independent of the other rows (on CUDA as in mhc_pre).
Errors: ``ValueError`` for wrong shapes or dtypes.
Source: hc_head and the final norm of the official inference code; Xie et al., mHC, 2025.
"""

import torch

from . import _mhc, _mhc_dispatch, _rows
from ._registry import Arguments, PrewarmCase, register
from .shapes import Shape


def _alloc(
    streams: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, norm_weight: torch.Tensor
) -> torch.Tensor:
    num_streams, hidden = _mhc.check_streams("mhc_head", streams)
    _mhc.check_tensor("mhc_head", "fn", fn, (num_streams, num_streams * hidden), torch.float32)
    _mhc.check_tensor("mhc_head", "scale", scale, (1,), torch.float32)
    _mhc.check_tensor("mhc_head", "base", base, (num_streams,), torch.float32)
    _mhc.check_norm_weight("mhc_head", norm_weight, hidden)
    return streams.new_empty(streams.shape[0], hidden)


def reference(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    *,
    eps: float,
    hc_eps: float,
    deterministic: bool,
) -> torch.Tensor:
    """Collapse the streams of every row to the normalised input of the LM head."""
    out = _alloc(streams, fn, scale, base, norm_weight)
    weights = _mhc.sigmoid(_mhc.mixes(streams, fn, eps, deterministic=deterministic) * scale + base) + hc_eps
    return out.copy_(_rows.rms_normalize(_mhc.collapse(streams, weights), norm_weight, eps))


def fake(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    *,
    eps: float,
    hc_eps: float,
    deterministic: bool,
) -> torch.Tensor:
    return _alloc(streams, fn, scale, base, norm_weight)


def example(shape: Shape, *, num_tokens: int, device: torch.device, dtype: torch.dtype, seed: int) -> Arguments:
    g = torch.Generator(device="cpu").manual_seed(seed)
    streams = torch.randn(num_tokens, shape.num_streams, shape.hidden, generator=g).to(device, dtype)
    parameters = _mhc.example_parameters(shape.num_streams, shape.hidden, shape.num_streams, 1, g)
    fn, scale, base, norm_weight = (p.to(device) for p in parameters)
    return (streams, fn, scale, base, norm_weight.to(dtype)), {"eps": shape.eps, "hc_eps": 1e-6, "deterministic": True}


def cuda(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    *,
    eps: float,
    hc_eps: float,
    deterministic: bool,
) -> torch.Tensor:
    out = _alloc(streams, fn, scale, base, norm_weight)
    partials = _mhc.alloc_partials(streams, fn.shape[0], deterministic=deterministic)
    _mhc_dispatch.pre(
        streams, fn, scale, base, norm_weight, partials, out, None, eps=eps, hc_eps=hc_eps, sinkhorn_iters=0
    )
    return out


def cuda_cases(shape: Shape, device: torch.device, max_tokens: int) -> tuple[PrewarmCase, ...]:
    """One specialisation of each of two kernels serves every number of rows and of parts."""

    def arguments() -> Arguments:
        return example(shape, num_tokens=1, device=device, dtype=torch.bfloat16, seed=0)

    return _mhc_dispatch.pre_cases("mhc_head", shape, shape.num_streams, arguments)


mhc_head = register(
    "mhc_head",
    "(Tensor streams, Tensor fn, Tensor scale, Tensor base, Tensor norm_weight, *, float eps, float hc_eps,"
    " bool deterministic) -> Tensor",
    reference=reference,
    fake=fake,
    example=example,
    cuda=cuda,
    cuda_cases=cuda_cases,
)
