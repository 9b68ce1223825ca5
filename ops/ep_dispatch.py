"""Expert-parallel dispatch: every row goes to the ranks that hold its experts, into buffers of fixed capacity.

Shapes: x ``[T, D]`` with x_scale ``[T, S]`` fp32 or empty; ids ``[T, K]`` int32 global expert numbers (−1 = none; ids
outside 0…num_experts−1 are none); weights ``[T, K]`` fp32. Written: recv_x ``[C, D]`` and recv_scale ``[C, S]`` in
x's and x_scale's dtypes, recv_ids ``[C, K]`` int32 (numbers local to this rank, −1 where the expert lives elsewhere),
recv_weights ``[C, K]`` fp32, recv_source ``[C]`` int64, recv_count ``[1]`` int32. C is the capacity; it is the same
for all buffers and for all ranks.
Meaning: a row is received once by every rank that holds at least one of its experts, in order of source rank, then
row. ``recv_source = source_rank * 2^32 + row``: the stride is a constant, so ranks need not agree on T.
Received rows fill slots 0…recv_count−1; the slots behind them are left as they are.
Numerics: copies, no arithmetic.
Overflow: if more than C rows arrive, the CPU raises. CUDA, which may not read the count on the host, keeps the first
C rows and leaves in recv_count the number that arrived: whoever reads it compares it with C.
Errors: ``ValueError`` for dtypes or shapes that do not agree, and if more than C rows arrive on the CPU;
``NotImplementedError`` for a group of several ranks, which has no body here.
"""

import torch

from . import _rows, _runtime
from ._registry import Arguments, PrewarmCase, register
from .shapes import Shape


def _check(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    recv_x: torch.Tensor,
    recv_scale: torch.Tensor,
    recv_ids: torch.Tensor,
    recv_weights: torch.Tensor,
    recv_source: torch.Tensor,
    recv_count: torch.Tensor,
    group: str,
) -> None:
    _runtime.require_one_rank("ep_dispatch", group)
    for name, sent, received in (
        ("x", x, recv_x),
        ("scale", x_scale, recv_scale),
        ("ids", ids, recv_ids),
        ("weights", weights, recv_weights),
    ):
        if received.dtype != sent.dtype or received.shape[-1] != sent.shape[-1]:
            raise ValueError(
                f"ep_dispatch recv_{name} must have dtype {sent.dtype} and {sent.shape[-1]} columns, "
                f"got {received.dtype} and {received.shape[-1]}"
            )
    for name, tensor, dtype in (
        ("ids", ids, torch.int32),
        ("weights", weights, torch.float32),
        ("recv_source", recv_source, torch.int64),
        ("recv_count", recv_count, torch.int32),
    ):
        if tensor.dtype != dtype:
            raise ValueError(f"ep_dispatch {name} must have dtype {dtype}, got {tensor.dtype}")
    if ids.shape[1] != weights.shape[1]:
        raise ValueError(f"ep_dispatch weights must have {ids.shape[1]} columns like ids, got {weights.shape[1]}")
    if tuple(recv_count.shape) != (1,):
        raise ValueError(f"ep_dispatch recv_count must have shape [1], got {list(recv_count.shape)}")
    _rows.check_rows("ep_dispatch", "x", x.shape[0], ids=ids, weights=weights)
    buffers = {"recv_ids": recv_ids, "recv_weights": recv_weights, "recv_source": recv_source}
    _rows.check_rows("ep_dispatch", "recv_x", recv_x.shape[0], **buffers)
    if x_scale.shape[-1] != 0:
        _rows.check_rows("ep_dispatch", "x", x.shape[0], x_scale=x_scale)
        _rows.check_rows("ep_dispatch", "recv_x", recv_x.shape[0], recv_scale=recv_scale)


def reference(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    recv_x: torch.Tensor,
    recv_scale: torch.Tensor,
    recv_ids: torch.Tensor,
    recv_weights: torch.Tensor,
    recv_source: torch.Tensor,
    recv_count: torch.Tensor,
    *,
    num_experts: int,
    group: str,
) -> None:
    """One rank: compact the rows that have an expert, in row order."""
    _check(x, x_scale, ids, weights, recv_x, recv_scale, recv_ids, recv_weights, recv_source, recv_count, group)
    has_scale = x_scale.shape[-1] != 0
    capacity = recv_x.shape[0]
    held = (ids >= 0) & (ids < num_experts)
    rows = held.any(dim=1).nonzero().flatten()
    count = rows.numel()
    if count > capacity:
        raise ValueError(f"ep_dispatch capacity must hold the {count} rows to receive, got {capacity}")
    recv_x[:count] = x[rows]
    if has_scale:
        recv_scale[:count] = x_scale[rows]
    recv_ids[:count] = torch.where(held, ids, -1)[rows]
    recv_weights[:count] = weights[rows]
    recv_source[:count] = rows
    recv_count.fill_(count)


def fake(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    recv_x: torch.Tensor,
    recv_scale: torch.Tensor,
    recv_ids: torch.Tensor,
    recv_weights: torch.Tensor,
    recv_source: torch.Tensor,
    recv_count: torch.Tensor,
    *,
    num_experts: int,
    group: str,
) -> None:
    _check(x, x_scale, ids, weights, recv_x, recv_scale, recv_ids, recv_weights, recv_source, recv_count, group)


def example(shape: Shape, *, num_tokens: int, device: torch.device, dtype: torch.dtype, seed: int) -> Arguments:
    """Random rows in one rank, one of them without an expert; buffers with three spare slots, poisoned."""
    g = torch.Generator(device="cpu").manual_seed(seed)
    columns, topk = shape.hidden // 32, min(shape.experts_per_token, shape.num_experts)
    capacity = num_tokens + 3
    ids = torch.rand(num_tokens, shape.num_experts, generator=g).topk(topk).indices.int()
    if num_tokens > 1:
        ids[-1] = -1
    tensors = (
        torch.randn(num_tokens, shape.hidden, generator=g).to(dtype),
        torch.rand(num_tokens, columns, generator=g),
        ids,
        torch.rand(num_tokens, topk, generator=g),
        torch.full((capacity, shape.hidden), 1e9, dtype=dtype),
        torch.full((capacity, columns), 1e9),
        torch.full((capacity, topk), 12345, dtype=torch.int32),
        torch.full((capacity, topk), 1e9),
        torch.full((capacity,), 12345),
        torch.full((1,), 12345, dtype=torch.int32),
    )
    keywords = {"num_experts": shape.num_experts, "group": _runtime.SELF}
    return tuple(t.to(device, copy=True) for t in tensors), keywords


def cuda(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    recv_x: torch.Tensor,
    recv_scale: torch.Tensor,
    recv_ids: torch.Tensor,
    recv_weights: torch.Tensor,
    recv_source: torch.Tensor,
    recv_count: torch.Tensor,
    *,
    num_experts: int,
    group: str,
) -> None:
    """One rank: the reference's result, except that an overflow shows in ``recv_count`` and does not raise."""
    from . import ep_dispatch_kernel

    received = (recv_x, recv_scale, recv_ids, recv_weights, recv_source, recv_count)
    _check(x, x_scale, ids, weights, *received, group)
    for buffer in received:
        if not buffer.is_contiguous():
            raise ValueError(f"ep_dispatch receive buffers must be contiguous, got strides {buffer.stride()}")
    ep_dispatch_kernel.run((x, x_scale, ids, weights), received, num_experts)


def cuda_cases(shape: Shape, device: torch.device, max_tokens: int) -> tuple[PrewarmCase, ...]:
    """Rows of a bf16 model: e4m3 with scales, and bf16 without."""
    from . import ep_dispatch_kernel

    cases: dict[tuple[str | int, ...], PrewarmCase] = {}
    hidden, topk = shape.hidden, shape.experts_per_token
    for dtype, scales in ((torch.float8_e4m3fn, -(-hidden // 128)), (torch.bfloat16, 0)):

        def arguments(dtype: torch.dtype = dtype, scales: int = scales) -> Arguments:
            def rows() -> tuple[torch.Tensor, ...]:
                return (
                    torch.zeros(1, hidden, dtype=dtype, device=device),
                    torch.ones(1, scales, device=device),
                    torch.zeros(1, topk, dtype=torch.int32, device=device),
                    torch.ones(1, topk, device=device),
                )

            source = torch.zeros(1, dtype=torch.int64, device=device)
            count = torch.zeros(1, dtype=torch.int32, device=device)
            return (*rows(), *rows(), source, count), {"num_experts": shape.num_experts, "group": _runtime.SELF}

        for key in ep_dispatch_kernel.keys(torch.empty(0, hidden, dtype=dtype, device="meta"), scales, topk):
            cases.setdefault(key, PrewarmCase(op="ep_dispatch", key=key, arguments=arguments))
    return tuple(cases.values())


ep_dispatch = register(
    "ep_dispatch",
    "(Tensor x, Tensor x_scale, Tensor ids, Tensor weights, Tensor(a!) recv_x, Tensor(b!) recv_scale, "
    "Tensor(c!) recv_ids, Tensor(d!) recv_weights, Tensor(e!) recv_source, Tensor(f!) recv_count, *, "
    "int num_experts, str group) -> ()",
    reference=reference,
    fake=fake,
    example=example,
    cuda=cuda,
    cuda_cases=cuda_cases,
    role="parallel",
)
