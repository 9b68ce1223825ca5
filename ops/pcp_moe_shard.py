"""The whole mixture of experts of one rank's rows under prefill context parallelism, as one op.

Each rank holds its own rows of the prompt and its own experts; the op hides router, exchange and experts behind one
call. With one rank it is the single-rank path op for op: ``linear`` (router), ``route_hash`` or ``route_topk``,
``record_expert_load``, ``quant_fp8`` if the weights are quantised, ``expert_ffn``, ``shared_expert``, and their sum.

Shapes: x ``[T, D]`` fp32 or bf16; token_ids ``[T]`` int64 or int32; num_valid ``[1]`` int32; gate ``[E, D]`` fp32 or
bf16; bias ``[E]`` fp32 (read unless ``hashed``); table ``[vocab, topk]`` int64 or int32 (read if ``hashed``); the
tensor that is not read may be empty. Experts as in ``expert_ffn`` and ``shared_expert``, both quantised or both dense.
load_enabled ``[1]`` int32; load_counts ``[E]`` int64, added to. Result ``[T, D]`` in x's dtype, zero in pad rows.
Numerics: those of the parts; routed sum plus shared expert in fp32, rounded once.
Errors: ``ValueError`` for dtypes or shapes that do not agree; ``NotImplementedError`` for a group of several
ranks, which has no body here.
Source: MoE of the official inference code.
"""

from typing import Any

import torch

from . import _experts, _routing, _rows, _runtime
from ._registry import Arguments, PrewarmCase, register
from .expert_ffn import example as expert_example, reference as expert_ffn
from .linear import reference as linear
from .quant_fp8 import reference as quant_fp8
from .record_expert_load import reference as record_expert_load
from .route_hash import reference as route_hash
from .route_topk import reference as route_topk
from .shapes import Shape
from .shared_expert import example as shared_example, reference as shared_expert

OP = "pcp_moe_shard"


def _alloc(
    x: torch.Tensor,
    token_ids: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor,
    table: torch.Tensor,
    routed: tuple[torch.Tensor, ...],
    shared: tuple[torch.Tensor, ...],
    load_counts: torch.Tensor,
    topk: int,
    hashed: bool,
    group: str,
) -> torch.Tensor:
    _runtime.require_one_rank(OP, group)
    hidden, _ = _experts.check_weights(OP, *routed)
    shared_hidden, _ = _experts.check_weights(f"{OP} shared", *shared)
    if shared_hidden != hidden or _experts.is_quantized(routed[0]) != _experts.is_quantized(shared[0]):
        raise ValueError(
            f"{OP} shared expert must be like the routed ones, hidden {hidden} {routed[0].dtype}, "
            f"got hidden {shared_hidden} {shared[0].dtype}"
        )
    if x.dtype not in _experts.DENSE or x.dim() != 2 or x.shape[1] != hidden:
        raise ValueError(f"{OP} x must be a float32 or bfloat16 [T, {hidden}], got {list(x.shape)} {x.dtype}")
    num_experts = routed[0].shape[0]
    expected = {"gate": (gate, (num_experts, hidden)), "load_counts": (load_counts, (num_experts,))}
    expected |= {"table": (table, (table.shape[0], topk))} if hashed else {"bias": (bias, (num_experts,))}
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{OP} {name} must have shape {list(shape)}, got {list(tensor.shape)}")
    _rows.check_indices(OP, 1, token_ids=token_ids)
    _rows.check_rows(OP, "x", x.shape[0], token_ids=token_ids)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def reference(
    x: torch.Tensor,
    token_ids: torch.Tensor,
    num_valid: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor,
    table: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    shared_w13: torch.Tensor,
    shared_w13_scale: torch.Tensor,
    shared_w2: torch.Tensor,
    shared_w2_scale: torch.Tensor,
    load_enabled: torch.Tensor,
    load_counts: torch.Tensor,
    *,
    topk: int,
    scale: float,
    limit: float,
    hashed: bool,
    deterministic: bool,
    group: str,
) -> torch.Tensor:
    """One rank: route its rows, apply their experts and the shared expert, add."""
    experts = (w13, w13_scale, w2, w2_scale)
    shared = (shared_w13, shared_w13_scale, shared_w2, shared_w2_scale)
    out = _alloc(x, token_ids, gate, bias, table, experts, shared, load_counts, topk, hashed, group)
    logits = linear(x, gate, dtype=torch.float32, deterministic=deterministic)
    if hashed:
        ids, weights = route_hash(logits, table, token_ids, num_valid, scale=scale)
    else:
        ids, weights = route_topk(logits, bias, num_valid, topk=topk, scale=scale)
    record_expert_load(ids, load_enabled, load_counts)
    inputs = quant_fp8(x) if _experts.is_quantized(w13) else (x, x.new_empty(0))
    total = expert_ffn(*inputs, ids, weights, *experts, limit=limit, deterministic=deterministic)
    total += shared_expert(*inputs, *shared, limit=limit, dtype=x.dtype, deterministic=deterministic)
    valid = _routing.in_step(logits, num_valid).unsqueeze(1)
    return out.copy_(torch.where(valid, total, 0.0))


def fake(
    x: torch.Tensor,
    token_ids: torch.Tensor,
    num_valid: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor,
    table: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    shared_w13: torch.Tensor,
    shared_w13_scale: torch.Tensor,
    shared_w2: torch.Tensor,
    shared_w2_scale: torch.Tensor,
    load_enabled: torch.Tensor,
    load_counts: torch.Tensor,
    *,
    topk: int,
    scale: float,
    limit: float,
    hashed: bool,
    deterministic: bool,
    group: str,
) -> torch.Tensor:
    experts = (w13, w13_scale, w2, w2_scale)
    shared = (shared_w13, shared_w13_scale, shared_w2, shared_w2_scale)
    return _alloc(x, token_ids, gate, bias, table, experts, shared, load_counts, topk, hashed, group)


def cuda(
    x: torch.Tensor,
    token_ids: torch.Tensor,
    num_valid: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor,
    table: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    shared_w13: torch.Tensor,
    shared_w13_scale: torch.Tensor,
    shared_w2: torch.Tensor,
    shared_w2_scale: torch.Tensor,
    load_enabled: torch.Tensor,
    load_counts: torch.Tensor,
    *,
    topk: int,
    scale: float,
    limit: float,
    hashed: bool,
    deterministic: bool,
    group: str,
) -> torch.Tensor:
    """The reference's composition, of the registered ops: each of them runs its own kernels."""
    ops = torch.ops.dsv4
    experts = (w13, w13_scale, w2, w2_scale)
    shared = (shared_w13, shared_w13_scale, shared_w2, shared_w2_scale)
    out = _alloc(x, token_ids, gate, bias, table, experts, shared, load_counts, topk, hashed, group)
    logits = ops.linear.default(x, gate, dtype=torch.float32, deterministic=deterministic)
    if hashed:
        ids, weights = ops.route_hash.default(logits, table, token_ids, num_valid, scale=scale)
    else:
        ids, weights = ops.route_topk.default(logits, bias, num_valid, topk=topk, scale=scale)
    ops.record_expert_load.default(ids, load_enabled, load_counts)
    inputs = ops.quant_fp8.default(x) if _experts.is_quantized(w13) else (x, x.new_empty(0))
    total = ops.expert_ffn.default(*inputs, ids, weights, *experts, limit=limit, deterministic=deterministic)
    total += ops.shared_expert.default(*inputs, *shared, limit=limit, dtype=x.dtype, deterministic=deterministic)
    valid = _routing.in_step(logits, num_valid).unsqueeze(1)
    return out.copy_(torch.where(valid, total, 0.0))


def cuda_cases(shape: Shape, device: torch.device, max_tokens: int) -> tuple[PrewarmCase, ...]:
    """None: the op launches no kernel of its own, and its parts list theirs."""
    return ()


def example(shape: Shape, *, num_tokens: int, device: torch.device, dtype: torch.dtype, seed: int) -> Arguments:
    """Routing by score for even seeds and by table for odd ones; fp32 has dense weights, bf16 FP4 and FP8 ones."""
    g = torch.Generator(device="cpu").manual_seed(seed)
    common: dict[str, Any] = {"num_tokens": num_tokens, "device": device, "dtype": dtype, "seed": seed}
    (_, _, _, _, *experts), _ = expert_example(shape, **common)
    (_, _, *shared), _ = shared_example(shape, **common)
    topk = min(shape.experts_per_token, shape.num_experts)
    table = torch.rand(shape.vocab, shape.num_experts, generator=g).topk(topk).indices
    rows = (
        torch.randn(num_tokens, shape.hidden, generator=g).to(dtype),
        torch.randint(shape.vocab, (num_tokens,), generator=g),
        torch.tensor([num_tokens - 1 if num_tokens > 1 else num_tokens], dtype=torch.int32),
        torch.randn(shape.num_experts, shape.hidden, generator=g) * shape.hidden**-0.5,
        torch.randn(shape.num_experts, generator=g) * 0.1,
        table,
    )
    counters = (torch.ones(1, dtype=torch.int32), torch.randint(0, 1000, (shape.num_experts,), generator=g))
    keywords = {
        "topk": topk,
        "scale": shape.route_scale,
        "limit": shape.swiglu_limit,
        "hashed": seed % 2 == 1,
        "deterministic": True,
        "group": _runtime.SELF,
    }
    return (*(t.to(device) for t in rows), *experts, *shared, *(t.to(device) for t in counters)), keywords


pcp_moe_shard = register(
    OP,
    "(Tensor x, Tensor token_ids, Tensor num_valid, Tensor gate, Tensor bias, Tensor table, Tensor w13, "
    "Tensor w13_scale, Tensor w2, Tensor w2_scale, Tensor shared_w13, Tensor shared_w13_scale, Tensor shared_w2, "
    "Tensor shared_w2_scale, Tensor load_enabled, Tensor(a!) load_counts, *, int topk, float scale, float limit, "
    "bool hashed, bool deterministic, str group) -> Tensor",
    reference=reference,
    fake=fake,
    example=example,
    cuda=cuda,
    cuda_cases=cuda_cases,
    role="parallel",
)
