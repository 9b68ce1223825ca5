"""Samples under which a point of the GPU report passes: all that it needs, and nothing else."""

import copy
from typing import Any

from tools.gpu_check.points import POINTS

KEYS = [f"kernel {number}" for number in range(30)]
ERRORS = ("rms", "max", "peak")
LISTS = {"kernel_us": 1.0, "copy_us": 1.0, "ours": 1.0, "theirs": 60.0, "awake_s": 0.5}
REQUESTS = {"request_s": (2.2, *[2.0] * 9), "core_s": (1e-3,) * 11}
WHOLE: dict[str, Any] = {
    "captures_before_prewarm": {"nano": {"events": ["prewarm", *["capture"] * 11]}},
    "uncounted_kernels": {
        "triton": {"gemm_keys": 30, "by_op": {"linear": 30}, "deep_gemm_keys": [], "deep_gemm_kernels": []},
        "libraries": {
            "gemm_keys": 60, "by_op": {"linear": 30, "deep_gemm": 30},
            "deep_gemm_keys": KEYS, "deep_gemm_kernels": KEYS,
        },
    },
}  # fmt: skip


def samples_of(name: str) -> dict[str, Any]:
    """Made from the point's own list of what it needs."""
    point = POINTS[name]
    if point.rule in WHOLE:
        return copy.deepcopy(WHOLE[point.rule])
    made: dict[str, Any] = {}
    for path in point.required():
        *parents, last = path.split("/")
        inner = made
        for part in parents:
            inner = inner.setdefault(part, {})
        inner[last] = _leaf(name, path)
    if point.rule == "not_passed":
        for part in made.values():
            part["passed"] = part["collected"] = len(part["functions"])
    return made


def _leaf(name: str, path: str) -> Any:
    point, last = POINTS[name], path.rpartition("/")[2]
    length = point.least.get(path, 0)
    if last in LISTS:
        return [LISTS[last]] * int(length)
    if last in REQUESTS:
        return [list(REQUESTS[last]) for _ in range(int(length))]
    if path in point.given:
        return point.given[path]
    if point.rule == "worst_error":
        count = point.options["outputs"]()[path.partition("/")[0]]
        return {f"{output}.{kind}": 0.0 for output in range(count) for kind in ERRORS}
    if point.rule == "unnamed":
        return " ".join(point.options["texts"][path.partition("/")[0]])
    if point.rule == "not_passed":
        return int("/functions/" in path)
    if last == "agreed":
        return point.given[path.replace("agreed", "rows")]
    return {"zeros": 1, "worst_memory": 11}.get(point.rule, length)
