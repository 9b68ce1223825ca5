"""Expert-parallel combine: the expert sums of received rows go back to the ranks and rows they came from.

Shapes: y ``[C, D]`` fp32, the sum of this rank's experts for every received row; recv_source ``[C]`` int64 and
recv_count ``[1]`` int32 as ``ep_dispatch`` left them. Written: out ``[T, D]`` fp32, all of it.
Meaning: row t of out is the sum over ranks, in rank order, of y at the slot that holds row t; zero for a row that no
rank received. Slots from recv_count on are not read. With one rank, dispatch, ``expert_ffn`` on the received rows and
combine give bitwise what ``expert_ffn`` gives on the rows themselves with ``deterministic``.
Numerics: fp32; one rank copies.
A count above C, which ``ep_dispatch`` leaves on CUDA after an overflow, and sources outside 0…T−1 raise on the CPU.
CUDA, which may not read them on the host, takes C rows and drops the rows without a place.
Errors: ``ValueError`` for dtypes or shapes that do not agree, and for a count or source outside the buffers on
the CPU; ``NotImplementedError`` for a group of several ranks, which has no body here.
"""

import torch

from . import _rows, _runtime
from ._registry import Arguments, PrewarmCase, register
from .shapes import Shape


def _check(y: torch.Tensor, recv_source: torch.Tensor, recv_count: torch.Tensor, out: torch.Tensor, group: str) -> None:
    _runtime.require_one_rank("ep_combine", group)
    for name, tensor, dtype in (
        ("y", y, torch.float32),
        ("recv_source", recv_source, torch.int64),
        ("recv_count", recv_count, torch.int32),
        ("out", out, torch.float32),
    ):
        if tensor.dtype != dtype:
            raise ValueError(f"ep_combine {name} must have dtype {dtype}, got {tensor.dtype}")
    if y.dim() != 2 or out.dim() != 2 or out.shape[1] != y.shape[1]:
        raise ValueError(f"ep_combine out must have shape [T, {y.shape[-1]}], got {list(out.shape)}")
    if tuple(recv_count.shape) != (1,):
        raise ValueError(f"ep_combine recv_count must have shape [1], got {list(recv_count.shape)}")
    _rows.check_rows("ep_combine", "y", y.shape[0], recv_source=recv_source)


def reference(
    y: torch.Tensor, recv_source: torch.Tensor, recv_count: torch.Tensor, out: torch.Tensor, *, group: str
) -> None:
    """One rank: scatter the received rows to where they came from, zeros elsewhere."""
    _check(y, recv_source, recv_count, out, group)
    count, capacity = int(recv_count), y.shape[0]
    if not 0 <= count <= capacity:
        raise ValueError(f"ep_combine recv_count must be in [0, {capacity}], got {count}")
    source = recv_source[:count]
    outside = source[(source < 0) | (source >= out.shape[0])]
    if outside.numel():
        raise ValueError(f"ep_combine recv_source must be in [0, {out.shape[0]}), got {int(outside[0])}")
    out.zero_()
    out[source] = y[:count]


def fake(
    y: torch.Tensor, recv_source: torch.Tensor, recv_count: torch.Tensor, out: torch.Tensor, *, group: str
) -> None:
    _check(y, recv_source, recv_count, out, group)


def example(shape: Shape, *, num_tokens: int, device: torch.device, dtype: torch.dtype, seed: int) -> Arguments:
    """All rows were received, from two rows on all but the last; two spare slots. ``dtype`` is ignored: y is fp32."""
    g = torch.Generator(device="cpu").manual_seed(seed)
    count = num_tokens - 1 if num_tokens > 1 else num_tokens
    source = torch.full((num_tokens + 2,), 12345)
    source[:count] = torch.arange(count)
    tensors = (
        torch.randn(num_tokens + 2, shape.hidden, generator=g),
        source,
        torch.tensor([count], dtype=torch.int32),
        torch.full((num_tokens, shape.hidden), 1e9),
    )
    return tuple(t.to(device, copy=True) for t in tensors), {"group": _runtime.SELF}


def cuda(
    y: torch.Tensor, recv_source: torch.Tensor, recv_count: torch.Tensor, out: torch.Tensor, *, group: str
) -> None:
    """One rank: the reference's result; never reads or writes outside the buffers."""
    from . import ep_combine_kernel

    _check(y, recv_source, recv_count, out, group)
    if not out.is_contiguous():
        raise ValueError(f"ep_combine out must be contiguous, got strides {out.stride()}")
    out.zero_()
    ep_combine_kernel.run(y, recv_source, recv_count, out)


def cuda_cases(shape: Shape, device: torch.device, max_tokens: int) -> tuple[PrewarmCase, ...]:
    from . import ep_combine_kernel

    def arguments() -> Arguments:
        rows = torch.zeros(1, shape.hidden, device=device)
        source = torch.zeros(1, dtype=torch.int64, device=device)
        return (rows, source, source.int(), torch.empty_like(rows)), {"group": _runtime.SELF}

    return (PrewarmCase(op="ep_combine", key=ep_combine_kernel.key(shape.hidden), arguments=arguments),)


ep_combine = register(
    "ep_combine",
    "(Tensor y, Tensor recv_source, Tensor recv_count, Tensor(a!) out, *, str group) -> ()",
    reference=reference,
    fake=fake,
    example=example,
    cuda=cuda,
    cuda_cases=cuda_cases,
    role="parallel",
)
