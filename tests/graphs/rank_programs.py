"""Programs that several processes run for the prewarm tests, and the function that starts them."""

import functools
import importlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dsv4.graphs.jit_monitor import JitMonitor
from dsv4.graphs.prewarm import PrewarmError, prewarm

prewarm_module = importlib.import_module("dsv4.graphs.prewarm")
SECONDS = 100  # longest life of a test's processes


@dataclass(frozen=True)
class FakeCase:
    key: tuple[str | int, ...]
    op: str = "fake"


class FakeKernels:
    """A kernel library in a folder: compiling writes a binary in two halves and a log line, loading reads it."""

    def __init__(self, directory: Path, seconds: float = 0.05) -> None:
        self.directory, self.seconds = directory, seconds
        self.warm: set[tuple[str | int, ...]] = set()
        self.run_keys: list[tuple[str | int, ...]] = []
        directory.mkdir(parents=True, exist_ok=True)

    def run(self, case: FakeCase) -> str:
        self.run_keys.append(case.key)
        path = self.directory / "-".join(map(str, case.key))
        if not path.exists():
            with open(self.directory / "log", "a") as log:
                log.write(f"{case.key} {os.getpid()} {threading.get_ident()}\n")
            with open(path, "w") as binary:
                binary.write("binary ")
                binary.flush()
                time.sleep(self.seconds)
                binary.write(path.name)
        if path.read_text() != f"binary {path.name}":
            raise RuntimeError(f"binary must be whole, got {path.read_text()!r}")
        return path.read_text()

    @property
    def log(self) -> list[str]:
        path = self.directory / "log"
        return path.read_text().splitlines() if path.exists() else []

    def prewarm(self, keys: Any, **options: Any) -> Any:
        """``keys``: a list of keys, or a function that lists cases."""
        defaults = {
            "run": self.run, "is_warm": self.warm.__contains__, "mark_warm": self.warm.add, "settings": {},
            "lock_dir": self.directory / "locks", "device": "cpu", "timeout": timedelta(seconds=SECONDS),
        }  # fmt: skip
        cases = keys if callable(keys) else lambda: [FakeCase(key) for key in keys]
        return prewarm(cases, **(defaults | options))


def run_ranks(program: Callable[..., Any], size: int, directory: Path, *args: Any) -> list[Any]:
    """Results of ``program(rank, size, directory, *args)`` of ``size`` processes; their exceptions are raised here."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    results = context.Queue()
    processes = [
        context.Process(target=_report, args=(results, program, rank, size, directory, *args), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        found = dict(results.get(timeout=SECONDS) for _ in range(size))
        for process in processes:
            process.join(timeout=10)
    finally:
        for process in processes:
            process.kill()
    for rank in range(size):
        if isinstance(found[rank], str):
            raise AssertionError(f"rank {rank} of {program.__name__} failed:\n{found[rank]}")
    return [found[rank][0] for rank in range(size)]


def _report(results: Any, program: Callable[..., Any], rank: int, size: int, directory: Path, *args: Any) -> None:
    import traceback

    torch.set_num_threads(1)
    try:
        results.put((rank, (program(rank, size, directory, *args),)))
    except BaseException:
        results.put((rank, traceback.format_exc()))
        raise


def _group(rank: int, size: int, directory: Path, seconds: float) -> dist.ProcessGroup:
    """Gloo over a store whose own time limit does not matter here."""
    store = dist.FileStore(str(directory / "store"), size)
    dist.init_process_group("gloo", rank=rank, world_size=size, store=store, timeout=timedelta(seconds=seconds))
    return dist.group.WORLD


def skewed_compile(rank: int, size: int, directory: Path, slow_rank: int, limit: float) -> dict[str, Any]:
    """One rank compiles for longer than the ``limit`` of a collective; then all reduce. Then the same unguarded."""
    slow = 2 * limit + 0.5
    _meet_in(directory, rank, size)  # the processes start at different times
    group = _group(rank, size, directory, limit)
    kernels = FakeKernels(directory / f"kernels{rank}", slow if rank == slow_rank else 0.0)
    report = kernels.prewarm([("mhc_pre", 1)], group=group)
    warm = time.monotonic() - report.wait_seconds
    entered = time.monotonic()
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    try:
        if rank == slow_rank:
            time.sleep(slow)
        dist.all_reduce(total.clone())
        unguarded = "passed"
    except Exception as error:
        unguarded = type(error).__name__
    return {
        "total": total.item(), "warm": warm, "entered": entered, "unguarded": unguarded, "log": kernels.log,
        "rank_seconds": report.rank_seconds, "wait_seconds": report.wait_seconds,
    }  # fmt: skip


def _outcome(call: Callable[[], Any]) -> str:
    try:
        call()
    except (PrewarmError, OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "passed"


def decisions(rank: int, size: int, directory: Path) -> dict[str, Any]:
    """Calls in which one rank differs, each on all ranks; the ranks stay in step, so that the last call passes."""
    group = _group(rank, size, directory, 30)
    kernels = FakeKernels(directory / f"kernels{rank}", 0.0)
    call = functools.partial(kernels.prewarm, group=group)
    keys = [("a", 1), ("b", 2)]
    found = {}
    settings = {"model": {"hidden": 256, "layers": 4}, "max_seq_len": 8192 if rank == 2 else 4096}
    found["settings"] = _outcome(lambda: call(keys, settings=settings))
    found["keys"] = _outcome(lambda: call([*keys, ("c", "3")] if rank == 1 else keys[::-1]))
    found["many keys"] = _outcome(lambda: call([("k", n) for n in range(9)] if rank == 0 else keys))
    found["none here"] = _outcome(lambda: call([] if rank == 1 else keys))
    found["none"] = _outcome(lambda: call([]))
    found["switch"] = _outcome(lambda: call(keys, enabled=rank != 1))
    found["switch off"] = _outcome(lambda: call(keys, enabled=False, settings={"seed": min(rank, 1)}))
    found["bad argument"] = _outcome(lambda: call(keys, workers=0 if rank == 2 else 1))

    def lacking() -> list[FakeCase]:
        raise ValueError("a library must be installed, got none")

    found["no cases"] = _outcome(lambda: call(lacking if rank == 1 else keys))
    found["ran before agreement"] = list(kernels.run_keys)

    def broken(case: FakeCase) -> None:
        if rank == 1 and case.key == ("b", 2):
            raise RuntimeError("no such instruction")

    found["failure"] = _outcome(lambda: call(keys, run=broken))

    def ahead(show: Any) -> None:
        if rank == 2:
            raise TimeoutError("lock must be free")

    found["ahead"] = _outcome(lambda: call(keys, run=lambda case: None, compile_ahead=ahead))
    kernels.warm.clear()
    (directory / f"file{rank}").touch()
    found["no folder"] = _outcome(
        lambda: call([("f", 1)], lock_dir=directory / (f"file{rank}" if rank == 2 else "locks") / "here")
    )
    kernels.run_keys = [key for key in kernels.run_keys if key != ("f", 1)]
    found["all well"] = _outcome(lambda: call(keys))
    found["run"] = list(kernels.run_keys)
    found["repeated"] = call(keys).repeated
    found["run again"] = list(kernels.run_keys)
    return found


def switched_off(rank: int, size: int, directory: Path) -> dict[str, Any]:
    """With the switch off nothing runs, and the ranks still meet."""
    group = _group(rank, size, directory, 30)
    kernels = FakeKernels(directory / f"kernels{rank}")
    if rank == 1:
        time.sleep(1.0)
    entered = time.monotonic()
    report = kernels.prewarm([("a", 1)], group=group, enabled=False)
    return {"entered": entered, "left": time.monotonic(), "report": report.to_dict(), "run": kernels.run_keys}


def world_of_two(rank: int, size: int, directory: Path) -> dict[str, Any]:
    """The prewarm of a model without a group: it takes all ranks, and a difference in their settings is found."""
    from dsv4 import prewarming
    from dsv4.config import flash_config
    from dsv4.engine_config import EngineConfig
    from dsv4.ops import _runtime

    _group(rank, size, directory, 30)
    kernels = FakeKernels(directory / f"kernels{rank}")
    os.environ["XDG_CACHE_HOME"] = str(directory / f"cache{rank}")
    prewarming.prewarm_cases = lambda *_: [FakeCase(("a", 1))]
    prewarming.run_case = kernels.run

    def warm(token_budget: int = 128, prewarm: bool = True) -> Any:
        settings = EngineConfig(token_budget=token_budget)
        object.__setattr__(settings, "prewarm", prewarm)  # it has no effect on the CPU and would be refused
        return prewarming.warm_kernels(flash_config(), settings)

    differs = _outcome(lambda: warm(64 if rank else 128))
    switched = _outcome(lambda: warm(prewarm=rank == 0))
    report = warm()
    return {
        "differs": differs, "switched": switched, "decision": report.decision, "rank_seconds": report.rank_seconds,
        "armed": len(_runtime.first_uses),
    }  # fmt: skip


def one_rank_anew(rank: int, size: int, directory: Path) -> dict[str, Any]:
    """A repeated call on rank 0, while rank 1 has forgotten the first one and compiles."""
    group = _group(rank, size, directory, 30)
    kernels = FakeKernels(directory / f"kernels{rank}", 0.7)
    kernels.prewarm([("a", 1)], group=group)
    if rank == 1:
        prewarm_module._done.clear()
        kernels = FakeKernels(directory / "anew", 0.7)
    report = kernels.prewarm([("a", 1)], group=group)
    return {"repeated": report.repeated, "wait": report.wait_seconds, "rank_seconds": report.rank_seconds}


def same_triton_key(rank: int, size: int, directory: Path) -> dict[str, Any]:
    """All processes warm one Triton kernel on one cold cache at the same moment; they are no group."""
    os.environ["TRITON_CACHE_DIR"] = str(directory / "triton")
    import triton

    from .kernels import compile_directly

    binaries, warm = {}, set()

    def run(case: FakeCase) -> None:
        binaries[case.key] = compile_directly(case.key[1]).asm["cubin"]

    _meet_in(directory, rank, size)
    monitor = JitMonitor(libraries={"triton": triton, "tilelang": "not part of this test"})
    report = prewarm(
        lambda: [FakeCase(("scale_rows", 64))], run=run, is_warm=warm.__contains__, mark_warm=warm.add, settings={},
        lock_dir=directory / "locks", device="cpu", monitor=lambda: monitor, timeout=timedelta(seconds=SECONDS),
    )  # fmt: skip
    total = report.jit.total("triton")
    return {"counts": (total.compilations, total.loads), "binaries": binaries, "warm": warm}


def shared_keys(rank: int, size: int, directory: Path, num_keys: int) -> dict[str, Any]:
    """All processes warm several slow keys on one cold cache."""
    kernels = FakeKernels(directory / "kernels", 0.3)
    _meet_in(directory, rank, size)
    kernels.prewarm([("k", n) for n in range(num_keys)])
    return {"run": kernels.run_keys}


def shared_parts(rank: int, size: int, directory: Path, num_keys: int) -> dict[str, Any]:
    """As above, but every case launches a kernel of its own and then the one that all of them have."""
    from dsv4.ops import _runtime

    kernels = FakeKernels(directory / "kernels", 0.3)

    def run(case: FakeCase) -> None:
        for key in (case.key, ("part", 0)):
            if not _runtime.is_warm(key):
                with _runtime.first_launch(key):
                    kernels.run(FakeCase(key))

    _meet_in(directory, rank, size)
    report = kernels.prewarm([("k", n) for n in range(num_keys)], run=run, thread=_runtime.in_prewarm, workers=2)
    return {"run": kernels.run_keys, "lock_seconds": report.lock_seconds}


def _meet_in(directory: Path, rank: int, size: int) -> None:
    (directory / f"here{rank}").touch()
    while len(list(directory.glob("here*"))) < size:
        time.sleep(0.002)
