"""mHC mixing after a sublayer in TileLang: everything read once and written once, 16 bytes a thread and stream.

Products and sums are rounded one by one, in the order of the reference, so the streams are its bits; contracting them
would save instructions that a kernel of 18 bytes per column does not miss.
"""

from typing import Any

import tilelang.language as T
import torch

from ._aligned import aligned
from ._tilelang import Program, launch
from ._triton import dtype_key

NUM_STREAMS = 4
VECTOR_BYTES = 16
THREADS = 128


def mix_macro(vector: int, dtype: str) -> Any:
    """Macro: ``out[k] = post[k] * y + sum_j comb[j, k] * streams[j]`` of one thread's columns."""

    @T.macro
    def mix(y, streams, post, comb, out):
        for k in T.unroll(NUM_STREAMS):
            for v in T.unroll(vector):
                first = T.ieee_mul(comb[k], T.cast(streams[0, v], "float32"))
                second = T.ieee_mul(comb[NUM_STREAMS + k], T.cast(streams[1, v], "float32"))
                third = T.ieee_mul(comb[2 * NUM_STREAMS + k], T.cast(streams[2, v], "float32"))
                fourth = T.ieee_mul(comb[3 * NUM_STREAMS + k], T.cast(streams[3, v], "float32"))
                mixed = T.ieee_add(T.ieee_add(T.ieee_add(first, second), third), fourth)
                added = T.ieee_mul(post[k], T.cast(y[v], "float32"))
                out[k, v] = T.cast(T.ieee_add(added, mixed), dtype)

    return mix


def program(hidden: int, dtype: str, threads: int = THREADS) -> Program:
    vector = VECTOR_BYTES // torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    vectors = hidden // vector
    tiles = -(-vectors // threads)
    num_tokens = T.dynamic("num_tokens", "int64")
    mix = mix_macro(vector, dtype)

    @T.prim_func
    def mhc_post(
        y: T.Tensor((num_tokens, hidden), dtype),
        streams: T.Tensor((num_tokens, NUM_STREAMS, hidden), dtype),
        post: T.Tensor((num_tokens, NUM_STREAMS), "float32"),
        comb: T.Tensor((num_tokens, NUM_STREAMS, NUM_STREAMS), "float32"),
        out: T.Tensor((num_tokens, NUM_STREAMS, hidden), dtype),
    ):
        with T.Kernel(num_tokens * tiles, threads=threads) as program:
            y_part = T.alloc_local((vector,), dtype)
            source = T.alloc_local((NUM_STREAMS, vector), dtype)
            target = T.alloc_local((NUM_STREAMS, vector), dtype)
            post_row = T.alloc_local((NUM_STREAMS,), "float32")
            comb_row = T.alloc_local((NUM_STREAMS * NUM_STREAMS,), "float32")
            row = program // tiles
            index = program % tiles * threads + T.get_thread_binding()
            if index < vectors:
                column = index * vector
                for j in T.unroll(NUM_STREAMS):
                    for v in T.vectorized(vector):
                        source[j, v] = streams[row, j, column + v]
                for v in T.vectorized(vector):
                    y_part[v] = y[row, column + v]
                for v in T.vectorized(NUM_STREAMS):
                    post_row[v] = post[row, v]
                for j in T.unroll(NUM_STREAMS):
                    for v in T.vectorized(NUM_STREAMS):
                        comb_row[j * NUM_STREAMS + v] = comb[row, j, v]
                mix(y_part, source, post_row, comb_row, target)
                for k in T.unroll(NUM_STREAMS):
                    for v in T.vectorized(vector):
                        out[row, k, column + v] = target[k, v]

    return Program(mhc_post)


def check(streams: torch.Tensor) -> None:
    """Refuse what the kernels are not written for."""
    num_streams, hidden = streams.shape[1:]
    if num_streams != NUM_STREAMS or hidden % 64 or hidden > 8192:
        raise NotImplementedError(
            f"mHC kernels of TileLang need {NUM_STREAMS} streams and hidden a multiple of 64 up to 8192,"
            f" got {num_streams} and {hidden}"
        )


def key(streams: torch.Tensor) -> tuple[str | int, ...]:
    """What the launch for ``streams [T, M, D]`` is specialised on."""
    return ("tilelang", "mhc_post", streams.shape[1], streams.shape[2], *dtype_key(streams))


def run(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, out: torch.Tensor) -> None:
    """Write the mixed streams ``[T, M, D]`` to ``out``."""
    check(streams)
    name, hidden = key(streams), streams.shape[2]
    inputs = (aligned(t) for t in (y, streams, post, comb))
    launch(name, lambda: program(hidden, name[-1]), (streams.shape[0],), *inputs, out)
