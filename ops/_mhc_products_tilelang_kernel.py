"""First launch of the mHC kernels in TileLang: products with ``fn`` and sums of squares, alone or after the mixing.

The inner dimension is walked in blocks of 64 columns of all streams (32 if fp32). So a kernel that makes the new
streams column by column (``post_products``) can multiply them while it has them, in the order of the kernel that reads
them (``products``) and to the same bits; a part is a range of blocks.

``fn`` is cut into three bf16 pieces, whose products with bf16 streams are exact in fp32. The pieces lie below each
other in shared memory, so one tensor-core product of a block serves all three. Tensor cores truncate when they
accumulate: sums of a block start at zero, blocks are added in fp32 registers, and the three sums stay apart until the
end. fp32 streams are cut likewise and take three products.
"""

from typing import Any

import tilelang.language as T

from . import _mhc
from ._tilelang import Program
from .mhc_post_tilelang_kernel import NUM_STREAMS, mix_macro

ROWS = _mhc.PRODUCT_ROWS
PIECES = 3
THREADS = 256
PER_ROW = 8  # threads that share a row of a stream's block: 16 bytes each
STEPS = ROWS * PER_ROW // THREADS  # rows of a thread


def _widths(dtype: str) -> tuple[int, int]:
    """Values of 16 bytes, and columns of a block."""
    vector = 8 if dtype == "bfloat16" else 4
    return vector, PER_ROW * vector


def _piece_rows(outputs: int) -> tuple[int, int]:
    """Rows of one piece of ``fn``, and of all pieces: each of two warp groups multiplies a multiple of 16."""
    padded = -(-outputs // 8) * 8
    return padded, -(-PIECES * padded // 32) * 32


def _cut_macro(rows: int, block: int) -> Any:
    """Macro: three pieces, ``rows`` apart, of fp32 ``tile [rows, M, block]``, streams beside each other.

    Each piece holds the 8 leading bits of what is left. Integer steps, since conversions to bf16 run at a lower rate.
    """
    per_row = NUM_STREAMS * block // 4
    steps = -(-rows * per_row // THREADS)

    @T.macro
    def cut(tile, pieces, thread):
        value = T.alloc_local((4,), "float32")
        part = T.alloc_local((PIECES, 4), "bfloat16")
        for step in T.unroll(steps):
            item = step * THREADS + thread
            row = item // per_row
            column = item % per_row * 4
            if item < rows * per_row:
                for v in T.vectorized(4):
                    value[v] = tile[row, column // block, column % block + v]
                for v in T.unroll(4):
                    for p in T.unroll(PIECES):
                        bits = T.reinterpret(value[v], "uint32")
                        part[p, v] = T.reinterpret(T.cast(bits >> 16, "uint16"), "bfloat16")
                        value[v] = value[v] - T.reinterpret(bits & T.uint32(0xFFFF0000), "float32")
                for p in T.unroll(PIECES):
                    for v in T.vectorized(4):
                        pieces[p * rows + row, column + v] = part[p, v]

    return cut


def _square_macro(vector: int) -> Any:
    """Macro: add the squares of one thread's ``values`` of a stream to its sum for the row."""

    @T.macro
    def square(values, stream, squares, step):
        few = T.alloc_local((1,), "float32")
        few[0] = 0.0
        for v in T.unroll(vector):
            value = T.cast(values[stream, v], "float32")
            few[0] = T.ieee_fmaf(value, value, few[0])
        squares[step] = T.ieee_add(squares[step], few[0])

    return square


def _store_macro(outputs: int, padded: int) -> Any:
    """Macro: write one part of the rows of a tile: sums of the pieces, smallest first, and the sum of squares."""
    steps = -(-ROWS * outputs // THREADS)

    @T.macro
    def store(sums, squares, partials, split, tile, num_tokens, thread):
        for step in T.unroll(STEPS):
            row = tile * ROWS + (step * THREADS + thread) // PER_ROW
            for hop in T.unroll(PER_ROW.bit_length() - 1):
                squares[step] += T.shfl_xor(squares[step], 1 << hop)
            if thread % PER_ROW == 0 and row < num_tokens:
                partials[split, row, outputs] = squares[step]
        for step in T.unroll(steps):
            item = step * THREADS + thread
            t = item // outputs
            n = item % outputs
            if item < ROWS * outputs and tile * ROWS + t < num_tokens:
                partials[split, tile * ROWS + t, n] = (sums[t, 2 * padded + n] + sums[t, padded + n]) + sums[t, n]

    return store


@T.macro
def _blocks_of_part(split, num_splits, num_blocks):
    """First block of a part, and the first one that is not in it."""
    parts = T.cast(num_splits, "int32")
    part = T.cast(split, "int32")
    return T.truncdiv(part * num_blocks, parts), T.truncdiv((part + 1) * num_blocks, parts)


def products(hidden: int, outputs: int, dtype: str, *, stages: int = 3) -> Program:
    """``streams [T, M, D]``, ``fn [outputs, M, D]`` -> ``partials [num_splits, T, columns]``."""
    columns = _mhc.partial_columns(outputs)
    padded, piece_rows = _piece_rows(outputs)
    vector, block = _widths(dtype)
    fp32, width = dtype == "float32", NUM_STREAMS * block
    stages = min(stages, 2) if fp32 else stages
    num_tokens, num_splits = T.dynamic("num_tokens", "int64"), T.dynamic("num_splits", "int64")
    cut_fn, cut_x = _cut_macro(padded, block), _cut_macro(ROWS, block)
    square, store = _square_macro(vector), _store_macro(outputs, padded)

    @T.prim_func
    def mhc_products(
        streams: T.Tensor((num_tokens, NUM_STREAMS, hidden), dtype),
        fn: T.Tensor((outputs, NUM_STREAMS, hidden), "float32"),
        partials: T.Tensor((num_splits, num_tokens, columns), "float32"),
    ):
        with T.Kernel(T.ceildiv(num_tokens, ROWS), num_splits, threads=THREADS) as (tile, split):
            weight = T.alloc_shared((padded, NUM_STREAMS, block), "float32")
            pieces = T.alloc_shared((piece_rows, width), "bfloat16")
            sums = T.alloc_shared((ROWS, piece_rows), "float32")
            block_sum = T.alloc_fragment((ROWS, piece_rows), "float32")
            total = T.alloc_fragment((ROWS, piece_rows), "float32")
            squares = T.alloc_local((STEPS,), "float32")
            values = T.alloc_local((NUM_STREAMS, vector), dtype)
            thread = T.get_thread_binding()
            if fp32:
                x = T.alloc_shared((ROWS, NUM_STREAMS, block), dtype)
                x_pieces = T.alloc_shared((PIECES * ROWS, width), "bfloat16")
            else:
                x = T.alloc_shared((ROWS, width), dtype)
            T.clear(total)
            T.clear(squares)
            first, last = _blocks_of_part(split, num_splits, hidden // block)
            for i in T.Pipelined(last - first, num_stages=stages):
                row, column = tile * ROWS, (first + i) * block
                if fp32:
                    T.copy(streams[row : row + ROWS, 0:NUM_STREAMS, column : column + block], x)
                else:
                    T.copy(streams[row : row + ROWS, 0, column : column + block], x[:, 0:block])
                    T.copy(streams[row : row + ROWS, 1, column : column + block], x[:, block : 2 * block])
                    T.copy(streams[row : row + ROWS, 2, column : column + block], x[:, 2 * block : 3 * block])
                    T.copy(streams[row : row + ROWS, 3, column : column + block], x[:, 3 * block : 4 * block])
                T.copy(fn[0:padded, 0:NUM_STREAMS, column : column + block], weight)
                cut_fn(weight, pieces, thread)
                for step in T.unroll(STEPS):
                    t = (step * THREADS + thread) // PER_ROW
                    at = (step * THREADS + thread) % PER_ROW * vector
                    for k in T.unroll(NUM_STREAMS):
                        for v in T.vectorized(vector):
                            if fp32:
                                values[k, v] = x[t, k, at + v]
                            else:
                                values[k, v] = x[t, k * block + at + v]
                        square(values, k, squares, step)
                if fp32:
                    cut_x(x, x_pieces, thread)
                    T.gemm(x_pieces[2 * ROWS : 3 * ROWS, :], pieces, block_sum, transpose_B=True, clear_accum=True)
                    T.gemm(x_pieces[ROWS : 2 * ROWS, :], pieces, block_sum, transpose_B=True)
                    T.gemm(x_pieces[0:ROWS, :], pieces, block_sum, transpose_B=True)
                else:
                    T.gemm(x, pieces, block_sum, transpose_B=True, clear_accum=True)
                for t, n in T.Parallel(ROWS, piece_rows):
                    total[t, n] += block_sum[t, n]
            T.copy(total, sums)
            store(sums, squares, partials, split, tile, num_tokens, thread)

    return Program(mhc_products)


def post_products(hidden: int, outputs: int, *, stages: int = 2) -> Program:
    """:func:`products` of the bf16 streams that the mixing makes, which are written to ``out [T, M, D]`` on the way."""
    dtype = "bfloat16"
    vector, block = _widths(dtype)
    columns, width = _mhc.partial_columns(outputs), NUM_STREAMS * block
    padded, piece_rows = _piece_rows(outputs)
    num_tokens, num_splits = T.dynamic("num_tokens", "int64"), T.dynamic("num_splits", "int64")
    mix, cut_fn = mix_macro(vector, dtype), _cut_macro(padded, block)
    square, store = _square_macro(vector), _store_macro(outputs, padded)

    @T.prim_func
    def mhc_post_products(
        y: T.Tensor((num_tokens, hidden), dtype),
        streams: T.Tensor((num_tokens, NUM_STREAMS, hidden), dtype),
        post: T.Tensor((num_tokens, NUM_STREAMS), "float32"),
        comb: T.Tensor((num_tokens, NUM_STREAMS, NUM_STREAMS), "float32"),
        fn: T.Tensor((outputs, NUM_STREAMS, hidden), "float32"),
        out: T.Tensor((num_tokens, NUM_STREAMS, hidden), dtype),
        partials: T.Tensor((num_splits, num_tokens, columns), "float32"),
    ):
        with T.Kernel(T.ceildiv(num_tokens, ROWS), num_splits, threads=THREADS) as (tile, split):
            added = T.alloc_shared((ROWS, block), dtype)
            source = T.alloc_shared((ROWS, NUM_STREAMS, block), dtype)
            weight = T.alloc_shared((padded, NUM_STREAMS, block), "float32")
            x = T.alloc_shared((ROWS, width), dtype)
            pieces = T.alloc_shared((piece_rows, width), "bfloat16")
            gates = T.alloc_shared((ROWS, NUM_STREAMS + 1, NUM_STREAMS), "float32")  # comb, and post below it
            sums = T.alloc_shared((ROWS, piece_rows), "float32")
            block_sum = T.alloc_fragment((ROWS, piece_rows), "float32")
            total = T.alloc_fragment((ROWS, piece_rows), "float32")
            squares = T.alloc_local((STEPS,), "float32")
            y_part = T.alloc_local((vector,), dtype)
            old = T.alloc_local((NUM_STREAMS, vector), dtype)
            made = T.alloc_local((NUM_STREAMS, vector), dtype)
            post_row = T.alloc_local((NUM_STREAMS,), "float32")
            comb_row = T.alloc_local((NUM_STREAMS * NUM_STREAMS,), "float32")
            thread = T.get_thread_binding()
            T.clear(total)
            T.clear(squares)
            if thread < ROWS:
                T.clear(post_row)
                T.clear(comb_row)
                if tile * ROWS + thread < num_tokens:
                    for v in T.vectorized(NUM_STREAMS):
                        post_row[v] = post[tile * ROWS + thread, v]
                    for j in T.unroll(NUM_STREAMS):
                        for v in T.vectorized(NUM_STREAMS):
                            comb_row[j * NUM_STREAMS + v] = comb[tile * ROWS + thread, j, v]
                for v in T.vectorized(NUM_STREAMS):
                    gates[thread, NUM_STREAMS, v] = post_row[v]
                for j in T.unroll(NUM_STREAMS):
                    for v in T.vectorized(NUM_STREAMS):
                        gates[thread, j, v] = comb_row[j * NUM_STREAMS + v]
            first, last = _blocks_of_part(split, num_splits, hidden // block)
            for i in T.Pipelined(last - first, num_stages=stages):
                row, column = tile * ROWS, (first + i) * block
                T.copy(y[row : row + ROWS, column : column + block], added)
                T.copy(streams[row : row + ROWS, 0:NUM_STREAMS, column : column + block], source)
                T.copy(fn[0:padded, 0:NUM_STREAMS, column : column + block], weight)
                for step in T.unroll(STEPS):
                    t = (step * THREADS + thread) // PER_ROW
                    at = (step * THREADS + thread) % PER_ROW * vector
                    for v in T.vectorized(vector):
                        y_part[v] = added[t, at + v]
                    for j in T.unroll(NUM_STREAMS):
                        for v in T.vectorized(vector):
                            old[j, v] = source[t, j, at + v]
                    for v in T.vectorized(NUM_STREAMS):
                        post_row[v] = gates[t, NUM_STREAMS, v]
                    for j in T.unroll(NUM_STREAMS):
                        for v in T.vectorized(NUM_STREAMS):
                            comb_row[j * NUM_STREAMS + v] = gates[t, j, v]
                    mix(y_part, old, post_row, comb_row, made)
                    for k in T.unroll(NUM_STREAMS):
                        for v in T.vectorized(vector):
                            x[t, k * block + at + v] = made[k, v]
                        square(made, k, squares, step)
                    if row + t < num_tokens:
                        for k in T.unroll(NUM_STREAMS):
                            for v in T.vectorized(vector):
                                out[row + t, k, column + at + v] = made[k, v]
                cut_fn(weight, pieces, thread)
                T.gemm(x, pieces, block_sum, transpose_B=True, clear_accum=True)
                for t, n in T.Parallel(ROWS, piece_rows):
                    total[t, n] += block_sum[t, n]
            T.copy(total, sums)
            store(sums, squares, partials, split, tile, num_tokens, thread)

    return Program(mhc_post_products)
