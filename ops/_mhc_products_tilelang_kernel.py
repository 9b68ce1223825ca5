"""First launch of the mHC kernels in TileLang: products with ``fn`` and sums of squares, alone or after the mixing.

The inner dimension is walked in blocks of 64 columns, and within a block over the streams. So a kernel that makes the
new streams column by column (``post_products``) can multiply them while it has them, in the order of the kernel that
reads them (``products``) and to the same bits; a part is a range of blocks.

``fn`` is cut into three bf16 pieces, whose products with bf16 streams are exact in fp32. The pieces lie below each
other in shared memory, so one tensor-core product per stream and block serves all three. Tensor cores truncate when
they accumulate: sums of a block start at zero, blocks are added in fp32 registers, and the three sums stay apart
until the end. fp32 streams are cut likewise and take three products.
"""

from typing import Any

import tilelang.language as T

from . import _mhc
from ._tilelang import Program
from .mhc_post_tilelang_kernel import NUM_STREAMS, mix_macro

ROWS = _mhc.PRODUCT_ROWS
BLOCK = 64  # 128 bytes of a bf16 row: one swizzled line of shared memory
PIECES = 3
STAGES = 4
POST_STAGES = 2  # 72 KiB each
POST_THREADS = 256


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _piece_rows(outputs: int, threads: int) -> tuple[int, int]:
    """Rows of one piece of ``fn``, and of all pieces: each group of 128 threads multiplies a multiple of 16."""
    padded = _round_up(outputs, 8)
    return padded, _round_up(PIECES * padded, 16 * (threads // 128))


def _cut_macro(rows: int, threads: int, *, rows_first: bool) -> Any:
    """Macro: three pieces, ``rows`` apart, of an fp32 tile: ``tile[:, slot]`` with ``rows_first``, else ``tile[slot]``.

    Each holds the 8 leading bits of what is left.

    Integer steps, since conversions to bf16 round and run at a lower rate.
    """
    per_row = BLOCK // 4
    steps = -(-rows * per_row // threads)

    @T.macro
    def cut(tile, slot, pieces, thread):
        value = T.alloc_local((4,), "float32")
        part = T.alloc_local((PIECES, 4), "bfloat16")
        for step in T.unroll(steps):
            item = step * threads + thread
            if item < rows * per_row:
                for v in T.vectorized(4):
                    if rows_first:
                        value[v] = tile[item // per_row, slot, item % per_row * 4 + v]
                    else:
                        value[v] = tile[slot, item // per_row, item % per_row * 4 + v]
                for v in T.unroll(4):
                    for p in T.unroll(PIECES):
                        bits = T.reinterpret(value[v], "uint32")
                        part[p, v] = T.reinterpret(T.cast(bits >> 16, "uint16"), "bfloat16")
                        value[v] = value[v] - T.reinterpret(bits & T.uint32(0xFFFF0000), "float32")
                for p in T.unroll(PIECES):
                    for v in T.vectorized(4):
                        pieces[p * rows + item // per_row, item % per_row * 4 + v] = part[p, v]

    return cut


def _square_macro(threads: int, dtype: str) -> Any:
    """Macro: add the squares of ``tile[slot]`` to the thread's sums, one for every ``ROWS / steps``-th row."""
    vector = 8 if dtype == "bfloat16" else 4
    per_row = BLOCK // vector
    steps = ROWS * per_row // threads

    @T.macro
    def square(tile, slot, squares, thread):
        value = T.alloc_local((vector,), dtype)
        for step in T.unroll(steps):
            item = step * threads + thread
            for v in T.vectorized(vector):
                value[v] = tile[slot, item // per_row, item % per_row * vector + v]
            for v in T.unroll(vector):
                squares[step] = T.ieee_fmaf(T.cast(value[v], "float32"), T.cast(value[v], "float32"), squares[step])

    return square


def _store_macro(outputs: int, padded: int, threads: int, dtype: str) -> Any:
    """Macro: write one part of the rows of a tile: sums of the pieces, smallest first, and the sum of squares."""
    vector = 8 if dtype == "bfloat16" else 4
    per_row = BLOCK // vector
    square_steps = ROWS * per_row // threads
    steps = -(-ROWS * outputs // threads)

    @T.macro
    def store(sums, squares, partials, split, tile, num_tokens, thread):
        for step in T.unroll(square_steps):
            item = step * threads + thread
            for hop in T.unroll(per_row.bit_length() - 1):
                squares[step] += T.shfl_xor(squares[step], 1 << hop)
            if item % per_row == 0 and tile * ROWS + item // per_row < num_tokens:
                partials[split, tile * ROWS + item // per_row, outputs] = squares[step]
        for step in T.unroll(steps):
            item = step * threads + thread
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


def products(hidden: int, outputs: int, dtype: str, *, threads: int = 128, stages: int = STAGES) -> Program:
    """``streams [T, M, D]``, ``fn [outputs, M, D]`` -> ``partials [num_splits, T, columns]``."""
    columns = _mhc.partial_columns(outputs)
    padded, piece_rows = _piece_rows(outputs, threads)
    fp32 = dtype == "float32"
    num_tokens, num_splits = T.dynamic("num_tokens", "int64"), T.dynamic("num_splits", "int64")
    cut_fn = _cut_macro(padded, threads, rows_first=True)
    cut_x = _cut_macro(ROWS, threads, rows_first=False)
    square, store = _square_macro(threads, dtype), _store_macro(outputs, padded, threads, dtype)

    @T.prim_func
    def mhc_products(
        streams: T.Tensor((num_tokens, NUM_STREAMS, hidden), dtype),
        fn: T.Tensor((outputs, NUM_STREAMS, hidden), "float32"),
        partials: T.Tensor((num_splits, num_tokens, columns), "float32"),
    ):
        with T.Kernel(T.ceildiv(num_tokens, ROWS), num_splits, threads=threads) as (tile, split):
            x = T.alloc_shared((1, ROWS, BLOCK), dtype)
            weight = T.alloc_shared((padded, 1, BLOCK), "float32")
            pieces = T.alloc_shared((piece_rows, BLOCK), "bfloat16")
            sums = T.alloc_shared((ROWS, piece_rows), "float32")
            block_sum = T.alloc_fragment((ROWS, piece_rows), "float32")
            total = T.alloc_fragment((ROWS, piece_rows), "float32")
            squares = T.alloc_local((ROWS * BLOCK // (4 if fp32 else 8) // threads,), "float32")
            thread = T.get_thread_binding()
            T.clear(total)
            T.clear(squares)
            first, last = _blocks_of_part(split, num_splits, hidden // BLOCK)
            for i in T.Pipelined((last - first) * NUM_STREAMS, num_stages=stages):
                stream = i % NUM_STREAMS
                column = (first + i // NUM_STREAMS) * BLOCK
                T.copy(streams[tile * ROWS : (tile + 1) * ROWS, stream, column : column + BLOCK], x[0, :, :])
                T.copy(fn[0:padded, stream : stream + 1, column : column + BLOCK], weight)
                cut_fn(weight, 0, pieces, thread)
                if fp32:
                    x_pieces = T.alloc_shared((PIECES * ROWS, BLOCK), "bfloat16")
                    cut_x(x, 0, x_pieces, thread)
                    T.gemm(x_pieces[2 * ROWS : 3 * ROWS, :], pieces, block_sum, transpose_B=True, clear_accum=True)
                    T.gemm(x_pieces[ROWS : 2 * ROWS, :], pieces, block_sum, transpose_B=True)
                    T.gemm(x_pieces[0:ROWS, :], pieces, block_sum, transpose_B=True)
                else:
                    T.gemm(x[0, :, :], pieces, block_sum, transpose_B=True, clear_accum=True)
                for t, n in T.Parallel(ROWS, piece_rows):
                    total[t, n] += block_sum[t, n]
                square(x, 0, squares, thread)
            T.copy(total, sums)
            store(sums, squares, partials, split, tile, num_tokens, thread)

    return Program(mhc_products)


def post_products(hidden: int, outputs: int, *, threads: int = POST_THREADS, stages: int = POST_STAGES) -> Program:
    """:func:`products` of the bf16 streams that the mixing makes, which are written to ``out [T, M, D]`` on the way."""
    dtype, vector = "bfloat16", 8
    per_row = BLOCK // vector
    columns = _mhc.partial_columns(outputs)
    padded, piece_rows = _piece_rows(outputs, threads)
    num_tokens, num_splits = T.dynamic("num_tokens", "int64"), T.dynamic("num_splits", "int64")
    mix, cut_fn = mix_macro(vector, dtype), _cut_macro(padded, threads, rows_first=True)
    square, store = _square_macro(threads, dtype), _store_macro(outputs, padded, threads, dtype)

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
        with T.Kernel(T.ceildiv(num_tokens, ROWS), num_splits, threads=threads) as (tile, split):
            added = T.alloc_shared((ROWS, BLOCK), dtype)
            source = T.alloc_shared((ROWS, NUM_STREAMS, BLOCK), dtype)
            weight = T.alloc_shared((padded, NUM_STREAMS, BLOCK), "float32")
            x = T.alloc_shared((NUM_STREAMS, ROWS, BLOCK), dtype)
            pieces = T.alloc_shared((piece_rows, BLOCK), "bfloat16")
            gates = T.alloc_shared((ROWS, NUM_STREAMS + 1, NUM_STREAMS), "float32")  # comb, and post below it
            sums = T.alloc_shared((ROWS, piece_rows), "float32")
            block_sum = T.alloc_fragment((ROWS, piece_rows), "float32")
            total = T.alloc_fragment((ROWS, piece_rows), "float32")
            squares = T.alloc_local((ROWS * per_row // threads,), "float32")
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
            first, last = _blocks_of_part(split, num_splits, hidden // BLOCK)
            for i in T.Pipelined(last - first, num_stages=stages):
                column = (first + i) * BLOCK
                T.copy(y[tile * ROWS : (tile + 1) * ROWS, column : column + BLOCK], added)
                T.copy(streams[tile * ROWS : (tile + 1) * ROWS, 0:NUM_STREAMS, column : column + BLOCK], source)
                T.copy(fn[0:padded, 0:NUM_STREAMS, column : column + BLOCK], weight)
                for step in T.unroll(ROWS * per_row // threads):
                    t = (step * threads + thread) // per_row
                    at = (step * threads + thread) % per_row * vector
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
                            x[k, t, at + v] = made[k, v]
                    if tile * ROWS + t < num_tokens:
                        for k in T.unroll(NUM_STREAMS):
                            for v in T.vectorized(vector):
                                out[tile * ROWS + t, k, column + at + v] = made[k, v]
                for k in T.serial(NUM_STREAMS):
                    cut_fn(weight, k, pieces, thread)
                    T.gemm(x[k, :, :], pieces, block_sum, transpose_B=True, clear_accum=True)
                    for t, n in T.Parallel(ROWS, piece_rows):
                        total[t, n] += block_sum[t, n]
                    square(x, k, squares, thread)
            T.copy(total, sums)
            store(sums, squares, partials, split, tile, num_tokens, thread)

    return Program(mhc_post_products)
