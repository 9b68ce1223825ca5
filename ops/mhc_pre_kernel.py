"""mHC gates and collapse, for mhc_pre, mhc_post_pre and mhc_head.

Two launches. The first multiplies tiles of 64 rows by ``fn`` and sums their squares, each program over one part of
the M*D values, so that few rows still fill the GPU; the second sums the parts and finishes: one program per row
collapses the streams and normalises, and a few programs, each for several rows, make ``post`` and ``comb`` beside
them, so that no row waits for the Sinkhorn rounds.

The number of parts is a run-time integer: one compilation serves every number of tokens.

Products. ``fn`` is fp32 and must keep its 24 bits, since an error of a gate's argument reaches post and comb. For bf16
streams every value of ``fn`` is cut into three bf16 pieces of 8 bits, whose products with the streams are exact in
fp32: three bf16 products cost as much as one and a half in tf32, and lose nothing. Tensor cores truncate when they
accumulate, which over thousands of steps would drift past 1e-5; so they sum one block of columns, starting at zero,
and blocks are added in fp32 registers, which round to nearest. fp32 streams use fp32 multiplications.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from . import _mhc, _mhc_few_rows_kernel, mhc_post_kernel
from ._mhc_few_rows_kernel import gate_and_normalise, sigmoid
from ._registry import Arguments, PrewarmCase
from ._triton import dtype_key, launch
from .shapes import Shape

MAX_HIDDEN = 8192  # a row of every stream is held in the registers of one program
NUM_STREAMS = 4
PARTS_IN_FLIGHT = tl.constexpr(16)  # loads of a group of rows that do not wait for each other
PARTS_PER_TILE = tl.constexpr(32)


@triton.jit
def _leading(x):
    """``x`` cut to the 8 leading bits of its significand: as bf16, and what is left, as fp32. Both are exact."""
    bits = x.to(tl.int32, bitcast=True)
    piece = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)  # integer steps: conversions run at a lower rate
    return piece, x - (bits & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _product(x, fn):
    """``x [t, k] @ fn [n, k].T`` in fp32, accurate to fp32 rounding."""
    if x.dtype == tl.bfloat16:
        high, rest = _leading(fn)
        middle, rest = _leading(rest)
        low, _ = _leading(rest)
        total = tl.dot(x, low.T)
        total = tl.dot(x, middle.T, total)
        return tl.dot(x, high.T, total)
    else:
        return tl.dot(x, fn.T, input_precision="ieee")


@triton.jit(do_not_specialize=["num_tokens", "num_splits"])
def _mhc_products(
    streams_ptr, fn_ptr, partials_ptr, num_tokens, num_splits,
    width: tl.constexpr, outputs: tl.constexpr, columns: tl.constexpr, block_t: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * block_t + tl.arange(0, block_t)
    split = tl.program_id(1)
    num_blocks: tl.constexpr = (width + block_k - 1) // block_k
    output = tl.arange(0, columns)
    row = streams_ptr + token[:, None] * width
    weight = fn_ptr + output[:, None] * width
    total = tl.zeros([block_t, columns], dtype=tl.float32)
    squares = tl.zeros([block_t, block_k // 8], dtype=tl.float32)
    for block in range(split * num_blocks // num_splits, (split + 1) * num_blocks // num_splits):
        k = block * block_k + tl.arange(0, block_k)[None, :]
        x = tl.load(row + k, mask=(token < num_tokens)[:, None] & (k < width), other=0.0)
        fn = tl.load(weight + k, mask=(output < outputs)[:, None] & (k < width), other=0.0)
        total += _product(x, fn)
        value = x.to(tl.float32)
        squares += tl.sum(tl.reshape(value * value, [block_t, block_k // 8, 8]), axis=2)  # within a thread
    total = tl.where(output[None, :] == outputs, tl.sum(squares, axis=1)[:, None], total)
    out = partials_ptr + (split.to(tl.int64) * num_tokens + token)[:, None] * columns + output[None, :]
    tl.store(out, total, mask=(token < num_tokens)[:, None] & (output <= outputs)[None, :])


@triton.jit
def _mix(
    partials_ptr, scale_ptr, base_ptr, post_ptr, comb_ptr, group, num_tokens, num_splits, eps, hc_eps, sinkhorn_iters,
    num_streams: tl.constexpr, hidden: tl.constexpr, outputs: tl.constexpr, columns: tl.constexpr,
    group_rows: tl.constexpr,
):  # fmt: skip
    """``post`` and ``comb`` of the rows of one group."""
    row = group.to(tl.int64) * group_rows + tl.arange(0, group_rows)
    keep = row < num_tokens
    stream = tl.arange(0, num_streams)
    post_at = num_streams + stream[None, :]
    entry = stream[None, :, None] * num_streams + stream[None, None, :]
    comb_at = 2 * num_streams + entry
    stride = num_tokens.to(tl.int64) * columns
    part_ptr = partials_ptr + row * columns
    squares = tl.zeros([group_rows], dtype=tl.float32)
    post = tl.zeros([group_rows, num_streams], dtype=tl.float32)
    comb = tl.zeros([group_rows, num_streams, num_streams], dtype=tl.float32)
    for start in range(0, num_splits, PARTS_IN_FLIGHT):
        for index in tl.static_range(PARTS_IN_FLIGHT):
            there = keep & (start + index < num_splits)
            squares += tl.load(part_ptr + outputs, mask=there, other=0.0)
            post += tl.load(part_ptr[:, None] + post_at, mask=there[:, None], other=0.0)
            comb += tl.load(part_ptr[:, None, None] + comb_at, mask=there[:, None, None], other=0.0)
            part_ptr += stride
    inverse = tl.rsqrt(squares / (num_streams * hidden) + eps)

    post = post * inverse[:, None] * tl.load(scale_ptr + 1) + tl.load(base_ptr + post_at)
    tl.store(post_ptr + row[:, None] * num_streams + stream[None, :], 2.0 * sigmoid(post), mask=keep[:, None])

    comb = comb * inverse[:, None, None] * tl.load(scale_ptr + 2) + tl.load(base_ptr + comb_at)
    comb = tl.exp(comb - tl.max(comb, axis=2, keep_dims=True))
    comb = comb / tl.sum(comb, axis=2, keep_dims=True) + hc_eps
    comb = comb / (tl.sum(comb, axis=1, keep_dims=True) + hc_eps)
    for _ in range(sinkhorn_iters - 1):
        comb = comb / (tl.sum(comb, axis=2, keep_dims=True) + hc_eps)
        comb = comb / (tl.sum(comb, axis=1, keep_dims=True) + hc_eps)
    tl.store(comb_ptr + row[:, None, None] * (num_streams * num_streams) + entry, comb, mask=keep[:, None, None])


@triton.jit
def _collapse(
    partials_ptr, streams_ptr, scale_ptr, base_ptr, norm_ptr, x_ptr, row, num_tokens, num_splits, eps, hc_eps,
    num_streams: tl.constexpr, hidden: tl.constexpr, outputs: tl.constexpr, columns: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Normalised collapse of one row. Its streams are requested before the gates are known."""
    row = row.to(tl.int64)
    column = tl.arange(0, block)
    inside = column < hidden
    stream = tl.arange(0, num_streams)
    source = streams_ptr + (row * num_streams + stream[:, None]) * hidden + column[None, :]
    value = tl.load(source, mask=inside[None, :], other=0.0)
    norm = tl.load(norm_ptr + column, mask=inside, other=0.0)

    part = tl.arange(0, PARTS_PER_TILE)
    kind = tl.arange(0, 2)[:, None]
    at = tl.where(kind == 0, stream[None, :], outputs)  # the gates, and the squares beside each
    total = tl.zeros([PARTS_PER_TILE, 2, num_streams], dtype=tl.float32)
    for start in range(0, num_splits, PARTS_PER_TILE):
        offset = ((start + part).to(tl.int64) * num_tokens + row) * columns
        there = start + part < num_splits
        pointer = partials_ptr + offset[:, None, None] + at[None, :, :]
        total += tl.load(pointer, mask=there[:, None, None], other=0.0)
    both = tl.sum(total, axis=0)
    scale, base = tl.load(scale_ptr), tl.load(base_ptr + stream)
    gate_and_normalise(value, both, scale, base, norm, x_ptr, row, eps, hc_eps, hidden, num_streams, block)


@triton.jit(
    do_not_specialize=["num_tokens", "num_splits", "num_groups", "eps", "hc_eps", "sinkhorn_iters"],
    do_not_specialize_on_alignment=["scale_ptr", "base_ptr"],
)
def _mhc_finish(
    partials_ptr, streams_ptr, scale_ptr, base_ptr, norm_ptr, x_ptr, post_ptr, comb_ptr,
    num_tokens, num_splits, num_groups, eps, hc_eps, sinkhorn_iters,
    num_streams: tl.constexpr, hidden: tl.constexpr, outputs: tl.constexpr, columns: tl.constexpr, block: tl.constexpr,
    group_rows: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if outputs == num_streams:  # the head needs no weights after it
        _collapse(
            partials_ptr, streams_ptr, scale_ptr, base_ptr, norm_ptr, x_ptr, program, num_tokens, num_splits, eps,
            hc_eps, num_streams, hidden, outputs, columns, block,
        )  # fmt: skip
    elif program < num_groups:
        _mix(
            partials_ptr, scale_ptr, base_ptr, post_ptr, comb_ptr, program, num_tokens, num_splits, eps, hc_eps,
            sinkhorn_iters, num_streams, hidden, outputs, columns, group_rows,
        )  # fmt: skip
    else:
        _collapse(
            partials_ptr, streams_ptr, scale_ptr, base_ptr, norm_ptr, x_ptr, program - num_groups, num_tokens,
            num_splits, eps, hc_eps, num_streams, hidden, outputs, columns, block,
        )  # fmt: skip


def keys(streams: torch.Tensor, fn: torch.Tensor) -> tuple[tuple[str | int, ...], ...]:
    """What the two launches for ``streams [T, M, D]`` and ``fn [outputs, M*D]`` are specialised on."""
    specialised = (streams.shape[1], streams.shape[2], fn.shape[0], *dtype_key(streams))
    return ("mhc_products", *specialised), ("mhc_finish", *specialised)


def cases(
    op: str, shape: Shape, outputs: int, arguments: Callable[[], Arguments], *, after_post: bool = False
) -> tuple[PrewarmCase, ...]:
    """The specialisations of the production dtype, reached by a call of ``op`` with ``arguments`` in each mode."""
    streams = torch.empty(1, shape.num_streams, shape.hidden, dtype=torch.bfloat16, device="meta")
    fn = torch.empty(outputs, shape.num_streams * shape.hidden, device="meta")
    found = {}
    for deterministic in (True, False):

        def in_mode(deterministic: bool = deterministic) -> Arguments:
            args, keywords = arguments()
            return args, keywords | {"deterministic": deterministic}

        if _mhc_few_rows_kernel.serves(streams, fn, _mhc.alloc_partials(streams, outputs, deterministic=deterministic)):
            names = _mhc_few_rows_kernel.keys(streams, fn, mixing=after_post)
        else:
            names = (*((mhc_post_kernel.key(streams),) if after_post else ()), *keys(streams, fn))
        for name in names:
            found.setdefault(name, PrewarmCase(op=op, key=name, arguments=in_mode))
    return tuple(found.values())


def run(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    partials: torch.Tensor,
    x: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    eps: float,
    hc_eps: float,
    sinkhorn_iters: int,
) -> None:
    """Write ``x [T, D]``, and ``post`` and ``comb`` if ``weights`` takes them; without, ``fn`` has M rows.

    ``partials``: fp32 workspace of :func:`_mhc.alloc_partials`; its first dimension is the number of parts.
    """
    _mhc.check_partials(partials, streams, fn.shape[0])
    if weights and _mhc_few_rows_kernel.serves(streams, fn, partials):
        _mhc_few_rows_kernel.run(
            None, streams, fn, scale, base, norm_weight, partials, x, weights,
            eps=eps, hc_eps=hc_eps, sinkhorn_iters=sinkhorn_iters,
        )  # fmt: skip
        return
    num_tokens, num_streams, hidden = streams.shape
    outputs, num_splits, columns = fn.shape[0], partials.shape[0], _mhc.partial_columns(fn.shape[0])
    if num_streams != NUM_STREAMS or hidden > MAX_HIDDEN:
        raise NotImplementedError(
            f"mHC kernels need {NUM_STREAMS} streams and hidden <= {MAX_HIDDEN}, got {num_streams} and {hidden}"
        )
    streams, fn, scale, base = (t.contiguous() for t in (streams, fn, scale, base))
    norm_weight = norm_weight.float().contiguous()  # loaded as fp32: a copy only in tests
    products, finish = keys(streams, fn)
    block_t = _mhc.PRODUCT_ROWS
    launch(
        products, _mhc_products, (triton.cdiv(num_tokens, block_t), num_splits),
        streams, fn, partials, num_tokens, num_splits,
        width=num_streams * hidden, outputs=outputs, columns=columns, block_t=block_t,
        block_k=64 if streams.dtype == torch.bfloat16 else 32, num_warps=4, num_stages=6,
    )  # fmt: skip
    block = triton.next_power_of_2(hidden)
    warps = 8 if block > 4096 else 4
    group_rows = 2 * warps  # one thread per element of comb
    num_groups = triton.cdiv(num_tokens, group_rows) if weights else 0
    post, comb = weights or (x, x)
    launch(
        finish, _mhc_finish, (num_groups + num_tokens,),
        partials, streams, scale, base, norm_weight, x, post, comb,
        num_tokens, num_splits, num_groups, eps, hc_eps, sinkhorn_iters,
        num_streams=num_streams, hidden=hidden, outputs=outputs, columns=columns, block=block, group_rows=group_rows,
        num_warps=warps,
    )  # fmt: skip


def run_after_post(
    y: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    partials: torch.Tensor,
    new_streams: torch.Tensor,
    x: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    *,
    eps: float,
    hc_eps: float,
    sinkhorn_iters: int,
) -> None:
    """Write what mhc_post makes to ``new_streams``, and of these what :func:`run` makes; bitwise the same."""
    rest = (fn, scale, base, norm_weight, partials, x, weights)
    keywords = {"eps": eps, "hc_eps": hc_eps, "sinkhorn_iters": sinkhorn_iters}
    _mhc.check_partials(partials, new_streams, fn.shape[0])
    if _mhc_few_rows_kernel.serves(new_streams, fn, partials):
        _mhc_few_rows_kernel.run((y, streams, post, comb), new_streams, *rest, **keywords)
    else:
        mhc_post_kernel.run(y, streams, post, comb, new_streams)
        run(new_streams, *rest, **keywords)
