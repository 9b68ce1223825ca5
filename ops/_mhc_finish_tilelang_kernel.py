"""Second launch of the mHC kernels in TileLang: sum the parts, make the gates, collapse and normalise.

One program per row collapses; a few programs before them make ``post`` and ``comb`` of many rows each, four threads a
row, so that no row waits for the Sinkhorn rounds. Sums over the values of a row have an order that depends on the
width alone.
"""

from typing import Any

import tilelang.language as T

from . import _mhc
from ._tilelang import Program
from .mhc_post_tilelang_kernel import NUM_STREAMS, VECTOR_BYTES

MAX_WARPS = 8
PARTS_IN_FLIGHT = 8  # loads of a row's parts that do not wait for each other
MIX_LANES = NUM_STREAMS  # threads of a row's matrix, one matrix row each
OPTIONS = {"tl.disable_safe_memory_legalize": True}  # every index below is in bounds
COLLAPSE_LANES = 8  # threads that read one part: the gates and the sum of squares


def _threads(vectors: int) -> int:
    """Threads of a program: as many as divide the row's 16-byte vectors, so that none idles."""
    warps = [w for w in range(1, MAX_WARPS + 1) if vectors % (32 * w) == 0]
    return 32 * max(warps, default=1)


@T.macro
def _sigmoid(x):
    return 1.0 / (1.0 + T.exp(-x))


@T.macro
def _reciprocal_root(x):
    """Correctly rounded steps: the bits of the reference on the CPU."""
    return T.ieee_frcp(T.ieee_fsqrt(x))


def _block_sum_macro(threads: int) -> Any:
    """Macro: the sum of one fp32 per thread, known to all; ``scratch [warps]`` is shared."""
    warps = threads // 32

    @T.macro
    def block_sum(value, scratch, thread):
        for hop in T.unroll(5):
            value[0] += T.shfl_xor(value[0], 16 >> hop)
        if warps > 1:
            if thread % 32 == 0:
                scratch[thread // 32] = value[0]
            T.sync_threads()
            value[0] = scratch[0]
            for w in T.unroll(warps - 1):
                value[0] += scratch[w + 1]

    return block_sum


def _collapse_macro(hidden: int, outputs: int, dtype: str, vector: int, threads: int) -> Any:
    vectors = hidden // vector
    steps = -(-vectors // threads)
    warps = threads // 32
    parts_per_pass = threads // COLLAPSE_LANES
    block_sum = _block_sum_macro(threads)

    @T.macro
    def collapse(partials, streams, scale, base, norm, x, row, num_splits, eps, hc_eps, thread):
        value = T.alloc_local((steps, NUM_STREAMS, vector), dtype)
        weight = T.alloc_local((steps, vector), "float32")
        collapsed = T.alloc_local((steps, vector), "float32")
        result = T.alloc_local((vector,), dtype)
        part_sum = T.alloc_local((1,), "float32")
        sums = T.alloc_local((NUM_STREAMS + 1,), "float32")
        gate = T.alloc_local((NUM_STREAMS,), "float32")
        square = T.alloc_local((1,), "float32")
        warp_sums = T.alloc_shared((warps, COLLAPSE_LANES), "float32")
        scratch = T.alloc_shared((warps,), "float32")

        for i in T.unroll(steps):  # requested before the gates are known
            index = i * threads + thread
            if index < vectors:
                for j in T.unroll(NUM_STREAMS):
                    for v in T.vectorized(vector):
                        value[i, j, v] = streams[row, j, index * vector + v]
                for half in T.unroll(vector // 4):
                    for v in T.vectorized(4):
                        weight[i, half * 4 + v] = norm[index * vector + half * 4 + v]

        lane = thread % COLLAPSE_LANES
        source = T.Select(lane < NUM_STREAMS, lane, outputs)
        part_sum[0] = 0.0
        for start in T.serial(T.ceildiv(num_splits, parts_per_pass)):
            part = start * parts_per_pass + thread // COLLAPSE_LANES
            if part < num_splits:
                part_sum[0] += partials[part, row, source]
        part_sum[0] += T.shfl_xor(part_sum[0], 8)
        part_sum[0] += T.shfl_xor(part_sum[0], 16)
        if thread % 32 < COLLAPSE_LANES:
            warp_sums[thread // 32, lane] = part_sum[0]
        T.sync_threads()
        for j in T.unroll(NUM_STREAMS + 1):
            sums[j] = warp_sums[0, j]
            for w in T.unroll(warps - 1):
                sums[j] += warp_sums[w + 1, j]
        inverse = _reciprocal_root(sums[NUM_STREAMS] / (NUM_STREAMS * hidden) + eps)
        for j in T.unroll(NUM_STREAMS):
            gate[j] = _sigmoid(sums[j] * inverse * scale[0] + base[j]) + hc_eps

        square[0] = 0.0
        for i in T.unroll(steps):
            if i * threads + thread < vectors:
                for v in T.unroll(vector):
                    total = T.ieee_mul(T.cast(value[i, 0, v], "float32"), gate[0])
                    second = T.ieee_add(total, T.ieee_mul(T.cast(value[i, 1, v], "float32"), gate[1]))
                    third = T.ieee_add(second, T.ieee_mul(T.cast(value[i, 2, v], "float32"), gate[2]))
                    fourth = T.ieee_add(third, T.ieee_mul(T.cast(value[i, 3, v], "float32"), gate[3]))
                    collapsed[i, v] = T.cast(T.cast(fourth, dtype), "float32")
                    square[0] += collapsed[i, v] * collapsed[i, v]
        block_sum(square, scratch, thread)
        norm_inverse = _reciprocal_root(square[0] / hidden + eps)
        for i in T.unroll(steps):
            index = i * threads + thread
            if index < vectors:
                for v in T.unroll(vector):
                    result[v] = T.cast(collapsed[i, v] * norm_inverse * weight[i, v], dtype)
                for v in T.vectorized(vector):
                    x[row, index * vector + v] = result[v]

    return collapse


def _mix_macro(hidden: int, outputs: int, threads: int) -> Any:
    rows = threads // MIX_LANES

    @T.macro
    def mix(partials, scale, base, post, comb, group, num_tokens, num_splits, eps, hc_eps, sinkhorn_iters, thread):
        entry = T.alloc_local((NUM_STREAMS,), "float32")
        read = T.alloc_local((NUM_STREAMS,), "float32")
        column_sum = T.alloc_local((NUM_STREAMS,), "float32")
        post_sum = T.alloc_local((1,), "float32")
        square = T.alloc_local((1,), "float32")
        row_sum = T.alloc_local((1,), "float32")
        row = group * rows + thread // MIX_LANES
        there = T.min(row, num_tokens - 1)  # a row that does not exist computes what it does not store
        lane = thread % MIX_LANES
        T.clear(entry)
        post_sum[0] = 0.0
        square[0] = 0.0
        for start in T.serial(T.ceildiv(num_splits, PARTS_IN_FLIGHT)):
            for u in T.unroll(PARTS_IN_FLIGHT):
                part = T.min(start * PARTS_IN_FLIGHT + u, num_splits - 1)  # no branch between the loads
                counts = start * PARTS_IN_FLIGHT + u < num_splits
                for v in T.vectorized(NUM_STREAMS):
                    read[v] = partials[part, there, 2 * NUM_STREAMS + lane * NUM_STREAMS + v]
                for v in T.unroll(NUM_STREAMS):
                    entry[v] += T.Select(counts, read[v], T.float32(0))
                post_sum[0] += T.Select(counts, partials[part, there, NUM_STREAMS + lane], T.float32(0))
                square[0] += T.Select(counts, partials[part, there, outputs], T.float32(0))
        inverse = _reciprocal_root(square[0] / (NUM_STREAMS * hidden) + eps)
        if row < num_tokens:
            argument = post_sum[0] * inverse * scale[1] + base[NUM_STREAMS + lane]
            post[row, lane] = 2.0 * _sigmoid(argument)

        for v in T.unroll(NUM_STREAMS):
            entry[v] = entry[v] * inverse * scale[2] + base[2 * NUM_STREAMS + lane * NUM_STREAMS + v]
        largest = T.max(T.max(entry[0], entry[1]), T.max(entry[2], entry[3]))
        for v in T.unroll(NUM_STREAMS):
            entry[v] = T.exp(entry[v] - largest)
        row_sum[0] = ((entry[0] + entry[1]) + entry[2]) + entry[3]
        for v in T.unroll(NUM_STREAMS):
            entry[v] = entry[v] / row_sum[0] + hc_eps
        for iteration in T.serial(sinkhorn_iters):
            if iteration > 0:
                row_sum[0] = ((entry[0] + entry[1]) + entry[2]) + entry[3] + hc_eps
                for v in T.unroll(NUM_STREAMS):
                    entry[v] = entry[v] / row_sum[0]
            for v in T.unroll(NUM_STREAMS):
                column_sum[v] = entry[v]
                column_sum[v] += T.shfl_xor(column_sum[v], 1)
                column_sum[v] += T.shfl_xor(column_sum[v], 2)
                entry[v] = entry[v] / (column_sum[v] + hc_eps)
        if row < num_tokens:
            for v in T.vectorized(NUM_STREAMS):
                comb[row, lane, v] = entry[v]

    return mix


def finish(hidden: int, outputs: int, dtype: str) -> Program:
    """``partials [num_splits, T, columns]`` and ``streams [T, M, D]`` -> ``x [T, D]``, ``post``, ``comb``."""
    columns = _mhc.partial_columns(outputs)
    vector = VECTOR_BYTES // (2 if dtype == "bfloat16" else 4)
    threads = _threads(hidden // vector)
    rows = threads // MIX_LANES
    num_tokens, num_splits = T.dynamic("num_tokens", "int64"), T.dynamic("num_splits", "int64")
    collapse = _collapse_macro(hidden, outputs, dtype, vector, threads)
    mix = _mix_macro(hidden, outputs, threads)

    @T.prim_func
    def mhc_finish(
        partials: T.Tensor((num_splits, num_tokens, columns), "float32"),
        streams: T.Tensor((num_tokens, NUM_STREAMS, hidden), dtype),
        scale: T.Tensor((3,), "float32"),
        base: T.Tensor((outputs,), "float32"),
        norm: T.Tensor((hidden,), "float32"),
        x: T.Tensor((num_tokens, hidden), dtype),
        post: T.Tensor((num_tokens, NUM_STREAMS), "float32"),
        comb: T.Tensor((num_tokens, NUM_STREAMS, NUM_STREAMS), "float32"),
        eps: T.float32,
        hc_eps: T.float32,
        sinkhorn_iters: T.int32,
    ):
        with T.Kernel(T.ceildiv(num_tokens, rows) + num_tokens, threads=threads) as program:
            thread = T.get_thread_binding()
            groups = T.ceildiv(num_tokens, rows)
            parts = T.cast(num_splits, "int32")
            if program < groups:
                mix(partials, scale, base, post, comb, program, num_tokens, parts, eps, hc_eps, sinkhorn_iters, thread)
            else:
                collapse(partials, streams, scale, base, norm, x, program - groups, parts, eps, hc_eps, thread)

    return Program(mhc_finish, OPTIONS)


def finish_head(hidden: int, dtype: str) -> Program:
    """:func:`finish` without weights for after it: ``fn`` had M rows, and ``scale`` has one value."""
    outputs = NUM_STREAMS
    columns = _mhc.partial_columns(outputs)
    vector = VECTOR_BYTES // (2 if dtype == "bfloat16" else 4)
    threads = _threads(hidden // vector)
    num_tokens, num_splits = T.dynamic("num_tokens", "int64"), T.dynamic("num_splits", "int64")
    collapse = _collapse_macro(hidden, outputs, dtype, vector, threads)

    @T.prim_func
    def mhc_finish_head(
        partials: T.Tensor((num_splits, num_tokens, columns), "float32"),
        streams: T.Tensor((num_tokens, NUM_STREAMS, hidden), dtype),
        scale: T.Tensor((1,), "float32"),
        base: T.Tensor((outputs,), "float32"),
        norm: T.Tensor((hidden,), "float32"),
        x: T.Tensor((num_tokens, hidden), dtype),
        eps: T.float32,
        hc_eps: T.float32,
    ):
        with T.Kernel(num_tokens, threads=threads) as row:
            thread = T.get_thread_binding()
            parts = T.cast(num_splits, "int32")
            collapse(partials, streams, scale, base, norm, x, row, parts, eps, hc_eps, thread)

    return Program(mhc_finish_head, OPTIONS)
