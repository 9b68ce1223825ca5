"""Token embedding, copied into every residual stream.

Shapes: token_ids ``[num_tokens]`` int32 or int64; weight ``[vocab, hidden]`` fp32 or bf16; result
``[num_tokens, num_streams, hidden]`` in ``dtype``, contiguous.
Numerics: a copy, rounded once if ``dtype`` is narrower than the weight. An id outside ``[0, vocab)`` (a pad, or a
token of another rank's vocabulary shard) reads nothing and gives zeros.
Errors: ``ValueError`` on wrong ranks, dtypes or ``num_streams < 1``.
Source: ``Transformer.forward`` of the official inference code (embedding repeated over the hyper-connection streams).
"""

import torch

from . import _rows
from ._registry import Arguments, PrewarmCase, register
from .shapes import Shape


def _alloc(token_ids: torch.Tensor, weight: torch.Tensor, num_streams: int, dtype: torch.dtype) -> torch.Tensor:
    _rows.check_indices("embed_streams", 1, token_ids=token_ids)
    if weight.dim() != 2 or weight.shape[0] < 1:
        raise ValueError(f"embed_streams weight must be [vocab >= 1, hidden], got {list(weight.shape)}")
    if num_streams < 1:
        raise ValueError(f"embed_streams num_streams must be at least 1, got {num_streams}")
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"embed_streams dtype must be float32 or bfloat16, got {dtype}")
    return torch.empty(token_ids.shape[0], num_streams, weight.shape[1], dtype=dtype, device=weight.device)


def reference(token_ids: torch.Tensor, weight: torch.Tensor, *, num_streams: int, dtype: torch.dtype) -> torch.Tensor:
    """Embed every token and repeat the row over the streams."""
    out = _alloc(token_ids, weight, num_streams, dtype)
    vocab = weight.shape[0]
    ids = token_ids.long()
    inside = ((ids >= 0) & (ids < vocab)).unsqueeze(-1)
    rows = torch.where(inside, weight[ids.clamp(0, vocab - 1)], weight.new_zeros(()))
    return out.copy_(rows.unsqueeze(1))


def fake(token_ids: torch.Tensor, weight: torch.Tensor, *, num_streams: int, dtype: torch.dtype) -> torch.Tensor:
    return _alloc(token_ids, weight, num_streams, dtype)


def example(shape: Shape, *, num_tokens: int, device: torch.device, dtype: torch.dtype, seed: int) -> Arguments:
    g = torch.Generator(device="cpu").manual_seed(seed)
    token_ids = torch.randint(-1, shape.vocab + 1, (num_tokens,), generator=g).to(device)
    weight = torch.randn(shape.vocab, shape.hidden, generator=g).to(device, torch.bfloat16)
    return (token_ids, weight), {"num_streams": shape.num_streams, "dtype": dtype}


def cuda(token_ids: torch.Tensor, weight: torch.Tensor, *, num_streams: int, dtype: torch.dtype) -> torch.Tensor:
    from . import embed_streams_kernel

    out = _alloc(token_ids, weight, num_streams, dtype)
    embed_streams_kernel.run(token_ids, weight, out)
    return out


def cuda_cases(shape: Shape, device: torch.device, max_tokens: int) -> tuple[PrewarmCase, ...]:
    """One specialisation serves every number of tokens and every table."""
    from . import embed_streams_kernel

    dtype = torch.bfloat16

    def arguments() -> Arguments:
        weight = torch.ones(2, shape.hidden, dtype=dtype, device=device)
        return (torch.ones(1, dtype=torch.int64, device=device), weight), {
            "num_streams": shape.num_streams,
            "dtype": dtype,
        }

    ids = torch.empty(1, dtype=torch.int64, device="meta")
    weight = torch.empty(2, shape.hidden, dtype=dtype, device="meta")
    key = embed_streams_kernel.key(ids, weight, shape.num_streams, dtype)
    return (PrewarmCase(op="embed_streams", key=key, arguments=arguments),)


embed_streams = register(
    "embed_streams",
    "(Tensor token_ids, Tensor weight, *, int num_streams, ScalarType dtype) -> Tensor",
    reference=reference,
    fake=fake,
    example=example,
    cuda=cuda,
    cuda_cases=cuda_cases,
)
