"""Several processes that warm one GPU: cases C1 (skewed compilation) and C12 (a race for one cold key).

The functions return raw samples, for the tests and for the GPU report alike; ``samples`` counts what went wrong, so
every number in it must be zero, and ``detail`` says what happened. With ``device="cpu"`` references stand for kernels:
that shows that the code runs, and compiles nothing.
"""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .rank_programs import _group, _meet_in, run_ranks

C1_TOKENS = (0, 64, 512, 4096)
C1_SLOW_RANK = 2
C12_PROCESSES = 4
# Outputs of the op are bf16 sums of 5 products; half of all elements may round the other way, by one step of 2^-8.
RMS_TOLERANCE = 2.0**-9


def c1(device: str = "cuda", slow_s: float = 20.0, limit_s: float = 10.0) -> dict[str, Any]:
    """4 ranks with own cold caches; rank 2 sleeps ``slow_s`` while it compiles, a collective may take ``limit_s``.

    The collective is gloo's, on the CPU: what matters is who enters it when, and that it does not time out.
    """
    with tempfile.TemporaryDirectory(prefix="dsv4-c1-") as directory:
        ranks = run_ranks(_c1_rank, len(C1_TOKENS), Path(directory), device, slow_s, limit_s)
    last_warm = max(rank["warm_at"] for rank in ranks)
    failed = [rank["error"] for rank in ranks if rank["error"]]
    waited = [last_warm - rank["warm_at"] for number, rank in enumerate(ranks) if number != C1_SLOW_RANK]
    samples = {
        "failed": len(failed),
        "entered_early": sum(rank["entered_at"] < last_warm for rank in ranks),
        "wrong_sums": sum(rank["total"] != sum(C1_TOKENS) for rank in ranks),
        "not_skewed": int(max(waited) < limit_s),  # else the case was not the one that breaks others
    }
    return {"samples": samples, "bar": 0, "detail": {"ranks": ranks, "slow_s": slow_s, "limit_s": limit_s}}


def _c1_rank(rank: int, size: int, directory: Path, device: str, slow_s: float, limit_s: float) -> dict[str, Any]:
    _private_caches(directory / f"rank{rank}")
    from dsv4 import ops, prewarming
    from dsv4.ops.shapes import nano

    group = _group(rank, size, directory, limit_s)
    slept = []

    def run(case: ops.PrewarmCase) -> None:
        if rank == C1_SLOW_RANK and not slept:
            slept.append(case.key)
            time.sleep(slow_s)
        prewarming.run_case(case)

    error, total = "", torch.tensor([float(C1_TOKENS[rank])])
    report = _warm(("mhc_pre", "mhc_post"), nano, device, directory / f"rank{rank}", run, group=group)
    warm_at = time.monotonic() - report.wait_seconds
    _expert_step(device, C1_TOKENS[rank])
    entered_at = time.monotonic()
    try:
        dist.all_reduce(total)
    except RuntimeError as failure:
        error = f"{type(failure).__name__}: {failure}"
    return {
        "warm_at": warm_at, "entered_at": entered_at, "wait_seconds": report.wait_seconds, "total": total.item(),
        "error": error, "keys": len(report.seconds),
    }  # fmt: skip


def _expert_step(device: str, num_tokens: int) -> None:
    """What comes before a collective: the hyper-connections of a rank's own tokens, of which it may have none."""
    from dsv4 import ops
    from dsv4.ops.shapes import nano

    spec = ops.spec("mhc_pre")
    args, kwargs = spec.example(
        nano, num_tokens=num_tokens, device=torch.device(device), dtype=torch.bfloat16, seed=num_tokens
    )
    spec.overload(*args, **kwargs)
    if device != "cpu":
        torch.cuda.synchronize()


def c12(device: str = "cuda", mhc_backend: str = "triton", names: tuple[str, ...] | None = None) -> dict[str, Any]:
    """4 processes, one cold cache directory, the same keys at the same moment; then each uses a kernel, ``mhc_post``.

    ``names``: the ops that are warmed; default: all of nano, whose cases share kernels.
    """
    with tempfile.TemporaryDirectory(prefix="dsv4-c12-") as directory:
        found = run_ranks(_c12_process, C12_PROCESSES, Path(directory), device, names, mhc_backend)
    keys = sorted({key for one in found for key in one["compiled"]} | {key for one in found for key in one["loaded"]})
    compilations = {key: sum(one["compiled"].get(key, 0) for one in found) for key in keys}
    missing = sum(not (one["compiled"].get(key) or one["loaded"].get(key)) for one in found for key in keys)
    samples = {
        "extra_compilations": sum(abs(count - 1) for count in compilations.values()) if keys else 1,
        "keys_without_kernel": sum(max(0, one["keys"] - len(keys)) for one in found),
        "wrong": sum(not one["rms"] <= RMS_TOLERANCE for one in found),
        "neither_compiled_nor_loaded": missing,
    }
    return {"samples": samples, "bar": 0, "detail": {"processes": found, "compilations": compilations}}


def _c12_process(
    rank: int, size: int, directory: Path, device: str, names: tuple[str, ...] | None, mhc_backend: str
) -> dict[str, Any]:
    _private_caches(directory)
    from dsv4 import ops
    from dsv4.ops import _backends
    from dsv4.ops.shapes import nano
    from dsv4.prewarming import run_case

    _backends.choose({"mhc": mhc_backend})
    names = names or tuple(spec.name for spec in ops.specs().values() if spec.role == "model")
    spec = ops.spec("mhc_post")
    args, kwargs = spec.example(nano, num_tokens=17, device=torch.device("cpu"), dtype=torch.bfloat16, seed=rank)
    want = spec.reference(*args, **kwargs).double()
    on_device = [a.to(device) if isinstance(a, torch.Tensor) else a for a in args]  # the context exists from here on
    _meet_in(directory, rank, size)
    report = _warm(names, nano, device, directory, run_case, workers=2)
    got = spec.overload(*on_device, **kwargs).cpu().double()
    assert report.jit is not None
    each = [(key, counts) for keys in report.jit.libraries.values() for key, counts in keys.items()]
    return {
        "keys": len(report.keys),
        "rms": ((got - want).square().mean() / want.square().mean()).sqrt().item(),
        "compiled": {key: counts.compilations for key, counts in each if counts.compilations},
        "loaded": {key: counts.loads for key, counts in each if counts.loads},
        "seconds": report.wall_seconds, "lock_seconds": report.lock_seconds,
    }  # fmt: skip


def _private_caches(directory: Path) -> None:
    """Cold caches of every library that compiles; before any of them is imported."""
    for name in ("TRITON_CACHE_DIR", "TILELANG_CACHE_DIR", "TILELANG_TMP_DIR", "DG_JIT_CACHE_DIR"):
        os.environ[name] = str(directory / name.lower())


def _warm(
    names: tuple[str, ...], shape: Any, device: str, directory: Path, run: Any, group: Any = None, workers: int = 1
) -> Any:
    """The prewarm of a few ops, as ``dsv4.prewarming`` makes it."""
    from dsv4 import ops
    from dsv4.graphs.jit_monitor import JitMonitor
    from dsv4.graphs.prewarm import prewarm
    from dsv4.ops import _runtime
    from dsv4.ops._jit_libraries import jit_libraries

    where = torch.device(device)

    def cases() -> list[ops.PrewarmCase]:
        return [case for name in names for case in ops.spec(name).prewarm_cases(shape, where, 4096)]

    return prewarm(
        cases, run=run, thread=_runtime.in_prewarm, is_warm=_runtime.is_warm, mark_warm=_runtime.mark_warm,
        lock_dir=directory / "locks",
        settings={"shape": shape.name}, device=where, group=group, workers=workers,
        monitor=lambda: JitMonitor(libraries=jit_libraries()),
    )  # fmt: skip
