"""mHC after a sublayer: mix the streams and add the sublayer output to each.

Shapes: y ``[T, D]`` and streams ``[T, M, D]`` in one dtype, fp32 or bf16; post ``[T, M]`` and comb ``[T, M, M]`` fp32,
as mhc_pre returns them. Returns new streams ``[T, M, D]``.
Numerics: ``new[k] = post[k] * y + sum_j comb[j, k] * streams[j]``: the FIRST index of comb is contracted, so comb acts
transposed. fp32, one rounding at the end; every row is bitwise independent of the other rows.
Errors: ``ValueError`` for wrong shapes or dtypes.
Source: hc_post of the official inference code; Xie et al., mHC, 2025.
"""

import torch

from . import _mhc, _mhc_dispatch
from ._registry import Arguments, PrewarmCase, register
from .shapes import Shape


def reference(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """Streams of every row after a sublayer whose output is ``y``."""
    return _mhc.alloc_post("mhc_post", y, streams, post, comb).copy_(_mhc.post(y, streams, post, comb))


def fake(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    return _mhc.alloc_post("mhc_post", y, streams, post, comb)


def example(shape: Shape, *, num_tokens: int, device: torch.device, dtype: torch.dtype, seed: int) -> Arguments:
    g = torch.Generator(device="cpu").manual_seed(seed)
    num_streams, hidden = shape.num_streams, shape.hidden
    y = torch.randn(num_tokens, hidden, generator=g).to(device, dtype)
    streams = torch.randn(num_tokens, num_streams, hidden, generator=g).to(device, dtype)
    post = 2 * torch.rand(num_tokens, num_streams, generator=g)
    comb = torch.rand(num_tokens, num_streams, num_streams, generator=g)
    return (y, streams, post.to(device), comb.to(device)), {}


def cuda(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    out = _mhc.alloc_post("mhc_post", y, streams, post, comb)
    _mhc_dispatch.post(y, streams, post, comb, out)
    return out


def cuda_cases(shape: Shape, device: torch.device, max_tokens: int) -> tuple[PrewarmCase, ...]:
    """One specialisation serves every number of rows."""

    def arguments() -> Arguments:
        return example(shape, num_tokens=1, device=device, dtype=torch.bfloat16, seed=0)

    return _mhc_dispatch.post_cases("mhc_post", shape, arguments)


mhc_post = register(
    "mhc_post",
    "(Tensor y, Tensor streams, Tensor post, Tensor comb) -> Tensor",
    reference=reference,
    fake=fake,
    example=example,
    cuda=cuda,
    cuda_cases=cuda_cases,
)
