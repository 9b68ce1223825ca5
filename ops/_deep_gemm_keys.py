"""Which kernels DeepGEMM 2.5 builds on SM90, as a pure function of the call: the keys of its run-time compiler.

DeepGEMM picks a tile per call by a cost model over the shape and compiles one kernel per pick; it reports neither. This
module repeats the choice (facts of the SM90 heuristics of the release named in ``_deep_gemm``, our own code), so that
a call can be refused before it compiles. The choice depends on the number of rows only through the number of row
blocks, hence :func:`row_classes`. N and K stay run-time arguments (``compiled_dims=""``): otherwise every matrix of a
model would have keys of its own: 93 in place of 36 for Flash at 8,192 rows.

A key is ``deep_gemm``, the name of the kernel's template and its arguments, as the library writes them into the source
that it compiles (without namespaces), so that a cache entry can be compared with a key word by word.
"""

import functools
import struct
from dataclasses import dataclass

from ._runtime import Key

BLOCK = 128  # K per tile and per scale
GROUP_ROWS = 128  # rows of a grouped product that must share a group; also its row block
SMEM_BYTES = 232_448
L1_BYTES_PER_CYCLE = 128  # per multiprocessor
L2_BYTES_PER_CYCLE = 6_153  # of the device: 8 TB/s at 1.3 GHz
MAX_STAGES = 16
BARRIER_BYTES = MAX_STAGES * 2 * 8
TMA_THREADS = 128
BF16_BYTES = 2

_STEP_N, _MAX_N = 16, 192  # wider tiles spill registers


@dataclass(frozen=True)
class Tile:
    """One candidate: rows x columns of the result, and how many CTAs of a cluster share an operand."""

    rows: int
    cols: int
    cluster_rows: int
    cluster_cols: int

    @property
    def cluster(self) -> int:
        return self.cluster_rows * self.cluster_cols


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def align(a: int, b: int) -> int:
    return ceil_div(a, b) * b


def swizzle(row_bytes: int) -> int:
    """Widest TMA swizzle that divides a row of shared memory."""
    return next(mode for mode in (128, 64, 32, 16) if row_bytes % mode == 0)


def _float32(value: float) -> float:
    """The cost model divides in fp32, which decides ties."""
    return struct.unpack("f", struct.pack("f", value))[0]


def stages(tile: Tile, k: int) -> int:
    """Pipeline depth that fits in shared memory beside the result tile and the weight scales."""
    scale_rows = 1 if BLOCK % tile.cols == 0 else 2  # a tile that straddles weight blocks keeps two rows of scales
    fixed = align(tile.rows * tile.cols * BF16_BYTES, 1024) + BARRIER_BYTES
    fixed += align(ceil_div(k, BLOCK) * 4 * scale_rows, 8)
    return min(MAX_STAGES, (SMEM_BYTES - fixed) // ((tile.rows + tile.cols) * BLOCK + align(tile.rows * 4, 128)))


def _legal(tile: Tile, k: int) -> bool:
    excess = tile.cols - BLOCK
    if excess > 0 and (tile.cols % excess and BLOCK % excess or tile.rows > BLOCK):
        return False
    depth = stages(tile, k)
    return depth >= 3 and (depth >= 4 or tile.rows * tile.cols >= 128 * 192)


@functools.lru_cache(maxsize=256)
def _candidates(row_blocks: tuple[int, ...], k: int, num_sms: int) -> tuple[Tile, ...]:
    """In the library's order, which breaks ties."""
    clusters = ((1, 1), (1, 2), (2, 1)) if num_sms % 2 == 0 else ((1, 1),)
    tiles = (
        Tile(rows, cols, *cluster)
        for cluster in clusters
        for rows in row_blocks
        for cols in range(_STEP_N, _MAX_N + 1, _STEP_N)
    )
    return tuple(tile for tile in tiles if _legal(tile, k))


def _cycles(tile: Tile, m: int, n: int, k: int, num_sms: int) -> float:
    blocks = ceil_div(m, tile.rows) * ceil_div(n, tile.cols)
    waves = ceil_div(blocks, num_sms)
    if tile.cluster > 1 and waves <= 1:
        return float("inf")  # sharing only costs when every block has a multiprocessor of its own
    result = tile.rows * tile.cols * BF16_BYTES
    l2 = k * (tile.rows // tile.cluster_cols + tile.cols // tile.cluster_rows) + result
    l1 = k * (tile.rows + tile.cols) + k * (max(64, tile.rows) + tile.cols) + 2 * result
    l2_cycles = l2 * blocks // min(64 * num_sms, L2_BYTES_PER_CYCLE)
    l1_cycles = l1 * blocks // (L1_BYTES_PER_CYCLE * num_sms)
    efficiency = _float32(_float32(blocks) / _float32(waves * num_sms))
    return int(_float32(_float32(max(l1_cycles, l2_cycles)) / efficiency))


def _row_blocks(m: int) -> tuple[int, ...]:
    return (64, 128, *((16,) if m <= 16 else ()), *((32,) if m <= 32 else ()), 256)


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _product(kind: str, groups: int, tile: Tile, k: int, num_sms: int) -> Key:
    sizes = (0, 0, 0)  # M, N and K at run time
    swizzles = (BLOCK, BLOCK, swizzle(tile.cols * BF16_BYTES))
    threads = (TMA_THREADS, 128 if tile.rows <= 64 else 256)
    multicast = (tile.cluster, _bool(tile.cluster_cols > 1))
    return (
        "deep_gemm", "sm90_fp8_gemm_1d2d_impl", "K", *sizes, groups, tile.rows, tile.cols, BLOCK, *swizzles,
        stages(tile, k), *threads, *multicast, num_sms, kind, "bfloat16_t", "EpilogueIdentity",
    )  # fmt: skip


def gemm(m: int, n: int, k: int, num_sms: int) -> Key:
    """Key of ``[m, k] x [n, k].T`` in FP8 with 1 x 128 and 128 x 128 scales and a bf16 result; ``m`` at least 1."""
    tiles = _candidates(_row_blocks(m), k, num_sms)
    best = min(tiles, key=lambda tile: _cycles(tile, m, n, k, num_sms))
    return _product("Normal", 1, best, k, num_sms)


def grouped_gemm(m: int, n: int, k: int, groups: int, num_sms: int) -> Key:
    """The same for ``m`` rows in runs of 128 of one group each."""
    tiles = _candidates((GROUP_ROWS,), k, num_sms)
    best = min(tiles, key=lambda tile: _cycles(tile, m, n, k, num_sms))
    return _product("MGroupedContiguous", groups, best, k, num_sms)


def mqa_logits(heads: int, dim: int, num_sms: int) -> Key:
    """Key of the indexer scores with rows of their own width (``max_seqlen_k``)."""
    blocks, depths = (128 // heads, 256), (3, 3)  # (rows, entries), stages of either
    return (
        "deep_gemm", "sm90_fp8_mqa_logits", heads, dim, _bool(True), *blocks, *depths, num_sms, TMA_THREADS, 512,
        "float",
    )  # fmt: skip


def hc_prenorm_gemm(n: int, k: int, splits: int) -> Key:
    """Key of the product before mHC's normalisation: one kernel per number of splits."""
    cols, rows, depth = align(n, 16), 64, 64
    mode = swizzle(cols * 4)
    per_stage = rows * depth * 2 + cols * depth * 4 + 16
    num_stages = min(12, (SMEM_BYTES - rows * mode) // per_stage)
    return (
        "deep_gemm", "sm90_tf32_hc_prenorm_gemm_impl", n, k, rows, cols, depth, splits, mode, num_stages, 128,
        TMA_THREADS,
    )  # fmt: skip


def row_classes(max_rows: int) -> list[int]:
    """Row counts that stand for all of 1 … ``max_rows``: the smallest of every class with equal keys.

    Row blocks are 16, 32 or multiples of 64, so within ``(64 i, 64 (i + 1)]`` nothing changes, except that the blocks
    of 16 and 32 are only considered up to 16 and 32 rows.
    """
    return [m for m in (1, 17, 33, *range(65, max_rows + 1, 64)) if m <= max_rows]


@functools.lru_cache(maxsize=256)
def keys_for(n: int, k: int, max_rows: int, num_sms: int) -> dict[Key, int]:
    """Every key that :func:`gemm` gives for 1 … ``max_rows`` rows, with the fewest rows that give it."""
    found: dict[Key, int] = {}
    for m in row_classes(max_rows):
        found.setdefault(gemm(m, n, k, num_sms), m)
    return found
