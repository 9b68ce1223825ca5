"""Maths of manifold-constrained hyper-connections (mHC), shared by the mhc_* ops.

A row carries M residual streams of width D. Before a sublayer the streams collapse to one vector with M weights;
after it they are mixed by an M x M matrix that Sinkhorn rounds make nearly doubly stochastic, and the sublayer output
is added to each with its own weight.

Sums over streams are written out as additions, and the sigmoid through ``exp``: torch's vectorised kernels round
``sigmoid`` differently in the tail of a loop, so the last row of a small batch would see its neighbours.
"""

from collections.abc import Sequence
from functools import reduce

import torch

from . import _rows

ACT_DTYPES = (torch.float32, torch.bfloat16)

# How kernels divide the product with fn over its inner dimension. These are constants of the library, not properties
# of the device, so that the sums of a row are the same on every device.
PRODUCT_ROWS = 64  # rows of one tile
MULTIPROCESSORS = 132
LEAST_SPLIT = 4 * 64  # values of the inner dimension that one part holds at least
DETERMINISTIC_SPLIT = 1024  # values that one part holds when the number of rows must not matter


def check_tensor(op: str, name: str, tensor: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Refuse a parameter of another shape or dtype."""
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{op} {name} must have shape {list(shape)}, got {list(tensor.shape)}")
    if tensor.dtype != dtype:
        raise ValueError(f"{op} {name} must have dtype {dtype}, got {tensor.dtype}")


def check_row_tensor(op: str, name: str, tensor: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Refuse a per-token tensor whose dimensions after the first, or whose dtype, are others."""
    if tensor.dim() != len(shape) + 1 or tuple(tensor.shape[1:]) != tuple(shape):
        expected = ", ".join(["T", *map(str, shape)])
        raise ValueError(f"{op} {name} must have shape [{expected}], got {list(tensor.shape)}")
    if tensor.dtype != dtype:
        raise ValueError(f"{op} {name} must have dtype {dtype}, got {tensor.dtype}")


def check_streams(op: str, streams: torch.Tensor) -> tuple[int, int]:
    """Number of streams and width of ``streams [T, M, D]``."""
    if streams.dim() != 3:
        raise ValueError(f"{op} streams must have 3 dimensions, got {streams.dim()}")
    if streams.dtype not in ACT_DTYPES:
        raise ValueError(f"{op} streams must have dtype float32 or bfloat16, got {streams.dtype}")
    return streams.shape[1], streams.shape[2]


def check_norm_weight(op: str, norm_weight: torch.Tensor, hidden: int) -> None:
    if norm_weight.dim() != 1 or norm_weight.shape[0] != hidden:
        raise ValueError(f"{op} norm_weight must have shape {[hidden]}, got {list(norm_weight.shape)}")


def alloc_pre(
    op: str,
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    sinkhorn_iters: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Check the arguments of a collapse before a sublayer and allocate ``(x, post, comb)``."""
    num_streams, hidden = check_streams(op, streams)
    outputs = (2 + num_streams) * num_streams
    check_tensor(op, "fn", fn, (outputs, num_streams * hidden), torch.float32)
    check_tensor(op, "scale", scale, (3,), torch.float32)
    check_tensor(op, "base", base, (outputs,), torch.float32)
    check_norm_weight(op, norm_weight, hidden)
    if sinkhorn_iters < 1:
        raise ValueError(f"{op} sinkhorn_iters must be at least 1, got {sinkhorn_iters}")
    num_tokens = streams.shape[0]
    return (
        streams.new_empty(num_tokens, hidden),
        streams.new_empty(num_tokens, num_streams, dtype=torch.float32),
        streams.new_empty(num_tokens, num_streams, num_streams, dtype=torch.float32),
    )


def alloc_post(op: str, y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """Check the arguments of the mixing after a sublayer and allocate the new streams."""
    num_streams, hidden = check_streams(op, streams)
    check_row_tensor(op, "y", y, (hidden,), streams.dtype)
    check_row_tensor(op, "post", post, (num_streams,), torch.float32)
    check_row_tensor(op, "comb", comb, (num_streams, num_streams), torch.float32)
    _rows.check_rows(op, "streams", streams.shape[0], y=y, post=post, comb=comb)
    return torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)


def num_splits(num_tokens: int, width: int, *, deterministic: bool) -> int:
    """Parts into which kernels divide the ``width = M*D`` products of a row: as many as fill a GPU.

    With ``deterministic`` a function of ``width`` alone, since the parts decide the order of a row's sums.
    """
    if deterministic:
        return max(1, width // DETERMINISTIC_SPLIT)
    tiles = max(1, -(-num_tokens // PRODUCT_ROWS))
    return max(1, min(MULTIPROCESSORS // tiles, width // LEAST_SPLIT))


def partial_columns(outputs: int) -> int:
    """Columns of a workspace row: ``outputs`` partial products, one partial sum of squares, up to a power of two."""
    return max(16, 1 << outputs.bit_length())


def alloc_partials(streams: torch.Tensor, outputs: int, *, deterministic: bool) -> torch.Tensor:
    """Workspace ``[num_splits, T, columns]`` fp32 of the kernels; its shape depends on shapes alone."""
    num_tokens, num_streams, hidden = streams.shape
    splits = num_splits(num_tokens, num_streams * hidden, deterministic=deterministic)
    return streams.new_empty(splits, num_tokens, partial_columns(outputs), dtype=torch.float32)


def check_partials(partials: torch.Tensor, streams: torch.Tensor, outputs: int) -> None:
    """Kernels index the workspace by its sizes alone, so it must be what :func:`alloc_partials` makes for ``streams``.

    The launch does not know the mode, so the parts of either are right.
    """
    num_tokens, num_streams, hidden = streams.shape
    splits = [num_splits(num_tokens, num_streams * hidden, deterministic=mode) for mode in (False, True)]
    rows = (num_tokens, partial_columns(outputs))
    if partials.shape[0] not in splits or partials.shape[1:] != rows or not partials.is_contiguous():
        raise ValueError(
            f"mHC workspace must be contiguous, {' or '.join(map(str, splits))} parts of {list(rows)}, "
            f"got {list(partials.shape)} with strides {list(partials.stride())}"
        )


def mixes(streams: torch.Tensor, fn: torch.Tensor, eps: float, *, deterministic: bool) -> torch.Tensor:
    """``fn @ flat / rms(flat)`` of every row, flat being its M*D stream values: ``[T, fn rows]`` fp32."""
    flat = streams.float().flatten(1).contiguous()
    rms = torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
    return _rows.product(flat, fn, deterministic=deterministic) * rms


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1.0 / (1.0 + torch.exp(-x))


def sum_over(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum over a short dimension in index order, kept as size 1."""
    return reduce(torch.add, x.split(1, dim))


def sinkhorn(logits: torch.Tensor, iters: int, eps: float) -> torch.Tensor:
    """Row softmax, then ``iters`` column and ``iters - 1`` row normalisations, ending on columns: ``[T, M, M]``."""
    comb = torch.exp(logits - logits.amax(-1, keepdim=True))
    comb = comb / sum_over(comb, -1) + eps
    comb = comb / (sum_over(comb, -2) + eps)
    for _ in range(iters - 1):
        comb = comb / (sum_over(comb, -1) + eps)
        comb = comb / (sum_over(comb, -2) + eps)
    return comb


def pre_weights(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    eps: float,
    hc_eps: float,
    sinkhorn_iters: int,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Collapse weights ``[T, M]``, output weights ``[T, M]`` and mixing matrix ``[T, M, M]``, fp32.

    ``fn`` rows are M for the collapse, M for the output and M*M for the matrix (row-major), each third with its scale.
    """
    num_streams = streams.shape[1]
    sizes = (num_streams, num_streams, num_streams * num_streams)
    parts = mixes(streams, fn, eps, deterministic=deterministic).split(sizes, -1)
    pre, post, comb = (m * s + b for m, s, b in zip(parts, scale, base.split(sizes)))
    comb = comb.unflatten(-1, (num_streams, num_streams))
    return sigmoid(pre) + hc_eps, 2.0 * sigmoid(post), sinkhorn(comb, sinkhorn_iters, hc_eps)


def collapse(streams: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``sum_j weights[:, j] * streams[:, j]`` in fp32, rounded to the stream dtype: ``[T, D]``."""
    return sum_over(streams.float() * weights.unsqueeze(-1), 1).squeeze(1).to(streams.dtype)


def pre(
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(x, post, comb)`` before a sublayer; x is rounded once after the collapse and once after the norm."""
    weights, post_weights, comb = pre_weights(
        streams, fn, scale, base, eps=eps, hc_eps=hc_eps, sinkhorn_iters=sinkhorn_iters, deterministic=deterministic
    )
    return _rows.rms_normalize(collapse(streams, weights), norm_weight, eps), post_weights, comb


def post(y: torch.Tensor, streams: torch.Tensor, post_weights: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """``new[k] = post[k] * y + sum_j comb[j, k] * streams[j]`` in fp32, rounded once to the stream dtype."""
    added = post_weights.unsqueeze(-1) * y.float().unsqueeze(1)
    value = streams.float()
    terms = (comb[:, j].unsqueeze(-1) * value[:, j].unsqueeze(1) for j in range(streams.shape[1]))
    return (added + reduce(torch.add, terms)).to(streams.dtype)


def example_parameters(
    num_streams: int, hidden: int, outputs: int, num_scales: int, g: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random ``(fn, scale, base, norm_weight)`` whose gates neither saturate nor vanish."""
    width = num_streams * hidden
    fn = torch.randn(outputs, width, generator=g) * width**-0.5
    scale = 0.5 + torch.rand(num_scales, generator=g)
    return fn, scale, torch.randn(outputs, generator=g), torch.randn(hidden, generator=g)
