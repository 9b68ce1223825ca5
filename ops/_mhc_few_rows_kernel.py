"""mHC of few rows: the mixing after a sublayer, the products with ``fn``, then the gates and the collapse.

What a decode step does is too little to fill a GPU, so its time is that of the longest chain. Two launches, whatever
the number of rows: the first owns :data:`BLOCK` columns of all streams, makes the new streams there if a sublayer
precedes, and multiplies them with ``fn`` in fp32 without tensor cores; the second has a program per row that
collapses and one per row that makes ``post`` and ``comb``, with a whole matrix in every thread: no round of the
normalisation waits for another thread.
"""

import torch
import triton
import triton.language as tl

from . import _mhc
from ._runtime import Key
from ._triton import dtype_key, launch

FEW_ROWS = 16  # most rows that are served here
BLOCK = 64  # columns of every stream that one program multiplies: one part
ROWS = 4  # rows that a program multiplies with the values of ``fn`` that it holds
NUM_STREAMS = 4


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["post_ptr"])
def _few_products(
    y_ptr, streams_ptr, post_ptr, comb_ptr, fn_ptr, new_ptr, partials_ptr, num_tokens,
    hidden: tl.constexpr, outputs: tl.constexpr, columns: tl.constexpr, block: tl.constexpr, rows: tl.constexpr,
    num_streams: tl.constexpr, mixing: tl.constexpr,
):  # fmt: skip
    """``partials [parts, T, columns]``: products with the rows of ``fn``, then the sum of squares."""
    first, part = tl.program_id(0) * rows, tl.program_id(1)
    place = tl.arange(0, num_streams * block)
    stream, column = place // block, part * block + place % block
    output = tl.arange(0, columns)
    width: tl.constexpr = num_streams * hidden
    weight = fn_ptr + output[:, None] * width + (stream * hidden + column)[None, :]
    fn = tl.load(weight, mask=(output < outputs)[:, None], other=0.0)
    for row in range(first, tl.minimum(first + rows, num_tokens)):
        if mixing:
            value = tl.zeros([num_streams * block], tl.float32)
            for source in tl.static_range(num_streams):  # in the order of mhc_post
                x = tl.load(streams_ptr + (row * num_streams + source) * hidden + column).to(tl.float32)
                value += tl.load(comb_ptr + (row * num_streams + source) * num_streams + stream) * x
            y = tl.load(y_ptr + row * hidden + column).to(tl.float32)
            value = tl.load(post_ptr + row * num_streams + stream) * y + value
            new = value.to(new_ptr.dtype.element_ty)
            tl.store(new_ptr + row * width + stream * hidden + column, new)
        else:
            new = tl.load(streams_ptr + row * width + stream * hidden + column)
        x = new.to(tl.float32)[None, :]
        total = tl.sum(tl.where((output == outputs)[:, None], x, fn) * x, axis=1)
        target = partials_ptr + (part * num_tokens + row) * columns + output
        tl.store(target, total, mask=output <= outputs)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _divide(a, b, c, d, eps):
    """Four positive numbers by their sum plus ``eps``, to a few units of the last place."""
    root = tl.rsqrt(((a + b) + (c + d)) + eps)
    factor = root * root  # one instruction and a product, where a division first brings its operand into range
    return a * factor, b * factor, c * factor, d * factor


@triton.jit
def _element(values, index: tl.constexpr):
    """``values[index]`` in every lane."""
    return tl.gather(values, tl.zeros_like(values).to(tl.int32) + index, 0)


@triton.jit
def _softmax(values, first: tl.constexpr, eps):
    """Four neighbours from ``first`` on."""
    a, b = _element(values, first), _element(values, first + 1)
    c, d = _element(values, first + 2), _element(values, first + 3)
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = _divide(tl.exp(a - top), tl.exp(b - top), tl.exp(c - top), tl.exp(d - top), 0.0)
    return a + eps, b + eps, c + eps, d + eps


@triton.jit
def _mix_row(
    partials_ptr, scale_ptr, base_ptr, post_ptr, comb_ptr, row, num_tokens, num_splits, eps, hc_eps, sinkhorn_iters,
    hidden: tl.constexpr, outputs: tl.constexpr, columns: tl.constexpr, num_streams: tl.constexpr,
    parts: tl.constexpr,
):  # fmt: skip
    """``post`` and ``comb`` of one row."""
    tl.static_assert(num_streams == 4 and outputs == 24 and columns == 32)
    output = tl.arange(0, columns)
    part = tl.arange(0, parts)[:, None]
    source = partials_ptr + (part * num_tokens + row) * columns + output[None, :]
    inside = (part < num_splits) & (output <= outputs)[None, :]
    third = tl.minimum(output // num_streams, 2)
    scale = tl.load(scale_ptr + third)
    base = tl.load(base_ptr + output, mask=output < outputs, other=0.0)
    total = tl.sum(tl.load(source, mask=inside, other=0.0), axis=0)
    squares = tl.sum(tl.where(output == outputs, total, 0.0), axis=0)
    value = total * tl.rsqrt(squares / (num_streams * hidden) + eps) * scale + base
    target = post_ptr + row * num_streams + output - num_streams
    tl.store(target, 2.0 * sigmoid(value), mask=third == 1)

    a0, a1, a2, a3 = _softmax(value, 8, hc_eps)
    b0, b1, b2, b3 = _softmax(value, 12, hc_eps)
    c0, c1, c2, c3 = _softmax(value, 16, hc_eps)
    d0, d1, d2, d3 = _softmax(value, 20, hc_eps)
    for iteration in range(sinkhorn_iters):
        if iteration > 0:
            a0, a1, a2, a3 = _divide(a0, a1, a2, a3, hc_eps)
            b0, b1, b2, b3 = _divide(b0, b1, b2, b3, hc_eps)
            c0, c1, c2, c3 = _divide(c0, c1, c2, c3, hc_eps)
            d0, d1, d2, d3 = _divide(d0, d1, d2, d3, hc_eps)
        a0, b0, c0, d0 = _divide(a0, b0, c0, d0, hc_eps)
        a1, b1, c1, d1 = _divide(a1, b1, c1, d1, hc_eps)
        a2, b2, c2, d2 = _divide(a2, b2, c2, d2, hc_eps)
        a3, b3, c3, d3 = _divide(a3, b3, c3, d3, hc_eps)
    lane = output % num_streams
    row0 = tl.where(lane == 0, a0, tl.where(lane == 1, a1, tl.where(lane == 2, a2, a3)))
    row1 = tl.where(lane == 0, b0, tl.where(lane == 1, b1, tl.where(lane == 2, b2, b3)))
    row2 = tl.where(lane == 0, c0, tl.where(lane == 1, c1, tl.where(lane == 2, c2, c3)))
    row3 = tl.where(lane == 0, d0, tl.where(lane == 1, d1, tl.where(lane == 2, d2, d3)))
    line = output // num_streams
    comb = tl.where(line == 0, row0, tl.where(line == 1, row1, tl.where(line == 2, row2, row3)))
    tl.store(comb_ptr + row * (num_streams * num_streams) + output, comb, mask=line < num_streams)


@triton.jit
def gate_and_normalise(
    value, both, scale, base, norm, x_ptr, row, eps, hc_eps,
    hidden: tl.constexpr, num_streams: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Store the normalised collapse of one row's streams ``value [M, width]``; ``both [2, M]`` holds the products of
    the gates, and beside each the sum of squares."""
    kind = tl.arange(0, 2)[:, None]
    gate = tl.sum(tl.where(kind == 0, both, 0.0), axis=0)
    squares = tl.sum(tl.where(kind == 1, both, 0.0), axis=0)
    gate = sigmoid(gate * tl.rsqrt(squares / (num_streams * hidden) + eps) * scale + base) + hc_eps

    act: tl.constexpr = x_ptr.dtype.element_ty
    collapsed = tl.sum(value.to(tl.float32) * gate[:, None], axis=0).to(act).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(collapsed * collapsed, axis=0) / hidden + eps)
    column = tl.arange(0, width)
    tl.store(x_ptr + row * hidden + column, (collapsed * inverse * norm).to(act), mask=column < hidden)


@triton.jit
def _collapse_row(
    partials_ptr, streams_ptr, scale_ptr, base_ptr, norm_ptr, x_ptr, row, num_tokens, num_splits, eps, hc_eps,
    hidden: tl.constexpr, outputs: tl.constexpr, columns: tl.constexpr, num_streams: tl.constexpr,
    parts: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Normalised collapse of one row. Its streams are requested before the gates are known."""
    column = tl.arange(0, width)
    inside = column < hidden
    stream = tl.arange(0, num_streams)
    source = streams_ptr + (row * num_streams + stream[:, None]) * hidden + column[None, :]
    value = tl.load(source, mask=inside[None, :], other=0.0)
    norm = tl.load(norm_ptr + column, mask=inside, other=0.0)
    scale, base = tl.load(scale_ptr), tl.load(base_ptr + stream)

    kind = tl.arange(0, 2)[:, None]
    at = tl.where(kind == 0, stream[None, :], outputs)  # the gates, and the squares beside each
    part = tl.arange(0, parts)
    source = partials_ptr + ((part * num_tokens + row) * columns)[:, None, None] + at[None, :, :]
    both = tl.sum(tl.load(source, mask=(part < num_splits)[:, None, None], other=0.0), axis=0)
    gate_and_normalise(value, both, scale, base, norm, x_ptr, row, eps, hc_eps, hidden, num_streams, width)


@triton.jit(
    do_not_specialize=["num_tokens", "num_splits", "eps", "hc_eps", "sinkhorn_iters"],
    do_not_specialize_on_alignment=["scale_ptr", "base_ptr"],
)
def _few_finish(
    partials_ptr, streams_ptr, scale_ptr, base_ptr, norm_ptr, x_ptr, post_ptr, comb_ptr,
    num_tokens, num_splits, eps, hc_eps, sinkhorn_iters,
    hidden: tl.constexpr, outputs: tl.constexpr, columns: tl.constexpr, num_streams: tl.constexpr,
    parts: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < num_tokens:
        _mix_row(
            partials_ptr, scale_ptr, base_ptr, post_ptr, comb_ptr, program, num_tokens, num_splits, eps, hc_eps,
            sinkhorn_iters, hidden, outputs, columns, num_streams, parts,
        )  # fmt: skip
    else:
        _collapse_row(
            partials_ptr, streams_ptr, scale_ptr, base_ptr, norm_ptr, x_ptr, program - num_tokens, num_tokens,
            num_splits, eps, hc_eps, hidden, outputs, columns, num_streams, parts, width,
        )  # fmt: skip


def _parts(hidden: int) -> int:
    return hidden // BLOCK


def serves(streams: torch.Tensor, fn: torch.Tensor, partials: torch.Tensor) -> bool:
    """Whether the products of these tensors, which may be meta tensors, are made here.

    The workspace tells: its number of parts is that of few rows, and not that of deterministic products.
    """
    num_tokens, num_streams, hidden = streams.shape
    if num_streams != NUM_STREAMS or streams.dtype != torch.bfloat16 or fn.shape[0] != (2 + NUM_STREAMS) * NUM_STREAMS:
        return False
    fixed = _mhc.num_splits(num_tokens, num_streams * hidden, deterministic=True)
    return num_tokens <= FEW_ROWS and hidden % BLOCK == 0 and partials.shape[0] == _parts(hidden) != fixed


def keys(streams: torch.Tensor, fn: torch.Tensor, *, mixing: bool) -> tuple[Key, Key]:
    """What the two launches for ``streams [T, M, D]`` and ``fn [outputs, M*D]`` are specialised on."""
    sizes = (streams.shape[1], streams.shape[2], fn.shape[0], *dtype_key(streams))
    return ("mhc_few_post_products" if mixing else "mhc_few_products", *sizes), ("mhc_few_finish", *sizes)


def run(
    mixed: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None,
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    partials: torch.Tensor,
    x: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    *,
    eps: float,
    hc_eps: float,
    sinkhorn_iters: int,
) -> None:
    """As ``mhc_pre_kernel.run``; with ``mixed``, the arguments of mhc_post, ``streams`` is its result and written."""
    num_tokens, num_streams, hidden = streams.shape
    outputs, parts, columns = fn.shape[0], partials.shape[0], partials.shape[2]
    fn, scale, base, norm_weight = (t.contiguous() for t in (fn, scale, base, norm_weight.float()))
    if mixed is None:
        streams = streams.contiguous()
    y, before, post, comb = (t.contiguous() for t in mixed or (streams, streams, fn, fn))
    width = triton.next_power_of_2(hidden)
    products, finish = keys(streams, fn, mixing=mixed is not None)
    sizes = {"hidden": hidden, "outputs": outputs, "columns": columns, "num_streams": num_streams}
    launch(
        products, _few_products, (triton.cdiv(num_tokens, ROWS), parts), y, before, post, comb, fn, streams, partials,
        num_tokens, **sizes, block=BLOCK, rows=ROWS, mixing=mixed is not None, num_warps=8,
    )  # fmt: skip
    launch(
        finish, _few_finish, (2 * num_tokens,), partials, streams, scale, base, norm_weight, x, *weights,
        num_tokens, parts, eps, hc_eps, sinkhorn_iters,
        **sizes, parts=triton.next_power_of_2(parts), width=width, num_warps=8 if width > 4096 else 4,
    )  # fmt: skip
