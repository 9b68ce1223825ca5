"""Expert choice by token id: row ``token_ids`` of a fixed table, weighted by score.

Shapes: logits ``[T, E]`` fp32; table ``[V, K]`` int32 or int64 with entries in [0, E); token_ids ``[T]`` int32 or
int64; num_valid ``[1]`` int32. Returns ids ``[T, K]`` int32 in table order, and weights ``[T, K]`` fp32. Rows from
num_valid on, and rows whose token id lies outside [0, V), give ids −1 and weights 0.
Numerics: fp32. Weights are ``sqrt(softplus(logits))`` at the ids, divided by their sum, times ``scale``; if that sum
is exactly 0, the weights are 0. No bias. Bitwise independent of the other rows.
Errors: ``ValueError`` for wrong shapes or dtypes; a table entry outside [0, E) is an index error.
Source: Gate of the hash-routed layers of the official inference code.
"""

import torch

from . import _routing, _rows
from ._registry import Arguments, PrewarmCase, register
from .shapes import Shape


def _alloc(
    logits: torch.Tensor, table: torch.Tensor, token_ids: torch.Tensor, num_valid: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    _routing.check_logits("route_hash", logits)
    _rows.check_indices("route_hash", 2, table=table)
    _rows.check_indices("route_hash", 1, token_ids=token_ids)
    _rows.check_rows("route_hash", "logits", logits.shape[0], token_ids=token_ids)
    if table.shape[0] < 1 or table.shape[1] < 1:
        raise ValueError(f"route_hash table must have at least one entry, got shape {list(table.shape)}")
    _routing.check_counter("route_hash", "num_valid", num_valid)
    return _routing.alloc(logits, table.shape[1])


def reference(
    logits: torch.Tensor, table: torch.Tensor, token_ids: torch.Tensor, num_valid: torch.Tensor, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Look the experts of every row up by its token id, weighted by their scores."""
    ids, weights = _alloc(logits, table, token_ids, num_valid)
    vocab = table.shape[0]
    valid = _routing.in_step(logits, num_valid) & (token_ids >= 0) & (token_ids < vocab)
    experts = table[token_ids.clamp(0, vocab - 1)].long()
    chosen, chosen_weights = _routing.finish(_routing.scores(logits), experts, valid, scale)
    return ids.copy_(chosen), weights.copy_(chosen_weights)


def fake(
    logits: torch.Tensor, table: torch.Tensor, token_ids: torch.Tensor, num_valid: torch.Tensor, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return _alloc(logits, table, token_ids, num_valid)


def example(shape: Shape, *, num_tokens: int, device: torch.device, dtype: torch.dtype, seed: int) -> Arguments:
    g = torch.Generator(device="cpu").manual_seed(seed)
    logits = 2 * torch.randn(num_tokens, shape.num_experts, generator=g)
    table = torch.rand(shape.vocab, shape.num_experts, generator=g).argsort(1)[:, : shape.experts_per_token]
    token_ids = torch.randint(-1, shape.vocab, (num_tokens,), generator=g)
    num_valid = torch.tensor([num_tokens - num_tokens // 3], dtype=torch.int32)
    arguments = (logits, table.contiguous(), token_ids, num_valid)
    return tuple(a.to(device) for a in arguments), {"scale": shape.route_scale}


def cuda(
    logits: torch.Tensor, table: torch.Tensor, token_ids: torch.Tensor, num_valid: torch.Tensor, *, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference, but a table entry outside [0, E) gives id −1 and weight 0: a kernel cannot raise."""
    from . import _routing_kernel

    ids, weights = _alloc(logits, table, token_ids, num_valid)
    _routing_kernel.route_hash(logits, table, token_ids, num_valid, ids, weights, scale)
    return ids, weights


def cuda_cases(shape: Shape, device: torch.device, max_tokens: int) -> tuple[PrewarmCase, ...]:
    """The integer types that the op accepts: loaded tables are int32, tables made by hand often int64."""
    from . import _routing_kernel

    cases = []
    for table_dtype in _rows.INDEX_DTYPES:
        for token_dtype in _rows.INDEX_DTYPES:

            def arguments(table_dtype: torch.dtype = table_dtype, token_dtype: torch.dtype = token_dtype) -> Arguments:
                logits = torch.zeros(1, shape.num_experts, device=device)
                table = torch.arange(shape.experts_per_token, device=device).to(table_dtype).unsqueeze(0)
                token_ids = torch.zeros(1, dtype=token_dtype, device=device)
                num_valid = torch.ones(1, dtype=torch.int32, device=device)
                return (logits, table, token_ids, num_valid), {"scale": shape.route_scale}

            key = _routing_kernel.hash_key(shape.experts_per_token, table_dtype, token_dtype)
            cases.append(PrewarmCase(op="route_hash", key=key, arguments=arguments))
    return tuple(cases)


route_hash = register(
    "route_hash",
    "(Tensor logits, Tensor table, Tensor token_ids, Tensor num_valid, *, float scale) -> (Tensor ids, Tensor weights)",
    reference=reference,
    fake=fake,
    example=example,
    cuda=cuda,
    cuda_cases=cuda_cases,
)
