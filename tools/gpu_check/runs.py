"""Engines and row counts of the measurements that repeat themselves: replays, poison, and sweeps of a ready engine."""

from itertools import product

from .place import BACKENDS

WIDTHS = ("flash", "pro")
# ``numerics.graphs[.libraries]``
REPLAY_RUNS = (
    "exact.full", "exact.piecewise", "exact.full.libraries",
    "official.full", "official.piecewise", "official.full.libraries", "official.piecewise.libraries",
)  # fmt: skip
POISON_RUNS = {  # ``graphs[.libraries]``: numerics with cache rows
    "full": ("exact.bf16", "official.bf16", "official.fp8"),
    "piecewise": ("exact.bf16", "official.fp8"),
    "full.libraries": ("exact.bf16", "official.fp8"),
    "piecewise.libraries": ("exact.bf16", "official.fp8"),
}
POISON_CASES = tuple(  # engines of full graphs also make the steps eagerly
    f"{kind}/{calls}"
    for run, kinds in POISON_RUNS.items()
    for calls in dict.fromkeys((run, run.replace("full", "eager")))
    for kind in kinds
)
POISON_KINDS = tuple(f"{how}{kind}" for how in ("", "draft of ") for kind in ("prefill", "mixed", "decode", "verify"))

# ---- sweeps

# First token counts of the split buckets of 132 multiprocessors, at hidden 4,096 and 7,168 (65 only at the latter).
BUCKET_STARTS = (
    1, 65, 129, 193, 257, 321, 385, 449, 513, 577, 641, 705, 769, 833, 897, 1025, 1153, 1409, 1665, 2113, 2817, 4225,
)  # fmt: skip
MAX_ROWS = 8192
EDGE_ROWS = (1, 7, 8, 15, 16, 17, 31, 32, 33)
ODD_ROWS = (50, 100, 999, 3001, 5003)  # no multiples of 16, inside buckets
MAX_REQUESTS = 64
SWEEP_ROWS: dict[str, tuple[int, ...]] = {
    "prefill": tuple(sorted({*BUCKET_STARTS, *(s - 1 for s in BUCKET_STARTS[1:]), *EDGE_ROWS, *ODD_ROWS, MAX_ROWS})),
    "decode": (*EDGE_ROWS, 50, MAX_REQUESTS),
    "mixed": (2, 7, 15, 33, 50, 129, 385, 999, 3001, MAX_ROWS),  # half of them, 63 at most, decode
    "verify": (2, 6, 14, 18, 34, 66, 100, 2 * MAX_REQUESTS),  # two of every request
}
SWEEP_KINDS = {f"{how}{kind}": rows for how in ("", "draft of ", "unpadded ") for kind, rows in SWEEP_ROWS.items()}
SWEEPS = tuple(map(".".join, product(WIDTHS, ("full", "piecewise"), BACKENDS)))
WATCHED = ("triton", "tilelang", "inductor")
