"""The prewarm: its seconds and keys, cold and warm, in child processes; what it must refuse."""

import importlib
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from dsv4 import ops
from dsv4.config import flash_config, pro_config
from dsv4.graphs.deep_gemm_cache import snapshot
from dsv4.graphs.jit_monitor import JitMonitor
from dsv4.ops import _runtime
from dsv4.ops._jit_libraries import jit_libraries

from . import children
from .common import Record
from .models import LIBRARIES, nano_engine, settings_of, using_backend
from .place import DEEP_GEMM_CACHE, NANO, Place, cache_environment

GEMM_OPS = ("linear", "one_row", "few_rows", "one_row_fp8", "few_rows_fp8", "fp8_linear", "grouped_o_proj",
            "one_row_o_proj", "few_rows_o_proj", "expert_ffn", "indexer_logits", "deep_gemm")  # fmt: skip
MHC_OPS = ("mhc_pre", "mhc_post", "mhc_post_pre", "mhc_head")


def cold_and_warm(place: Place, record: Record, prepared: Sequence[children.Child]) -> None:
    """Everything for Flash from empty caches, then again in new processes; the caches stay for the other sections."""
    details = record.samples.setdefault("prewarm_details", {})
    for child in prepared:
        _, backend, kind = child.purpose
        with record.block(f"prewarm_{kind}_s", "gemm_keys") as (seconds, gemm):
            child.go()
            found = child.result()
            details.setdefault(backend, {})[kind] = found
            compiled = sum(library["compilations"] for library in found["jit"].values())
            seconds[backend] = {"call_s": found["call_s"], "keys": found["num_keys"], "compilations": compiled}
            if kind == "cold":
                gemm[backend] = found["gemm"]


def prewarm_child(place: Place, backend: str, kind: str) -> dict[str, Any]:
    """A prewarm; ``kind`` names it."""
    from dsv4.prewarming import warm_kernels

    budget = 8 if place.dry else 8192
    settings = settings_of(
        place, "off", backend, numerics="official", token_budget=budget, max_requests=8, prewarm_workers=16
    )
    config = settings_of_width("flash", place)
    for library in LIBRARIES[backend] if not place.dry else ():  # to import a library is not to warm it
        importlib.import_module(library)
    torch.zeros(1, device=place.device)
    children.wait_for_turn()
    began = time.perf_counter()
    report = warm_kernels(config, settings, count=True)
    call_s = time.perf_counter() - began
    jit = report.jit.to_dict() if report.jit else {"libraries": {}}
    return {
        "call_s": call_s, "wall_s": report.wall_seconds, "num_keys": len(report.keys), "gemm": _gemm_keys(report.keys),
        "jit": {n: {k: v for k, v in each.items() if k != "keys"} for n, each in jit["libraries"].items()},
        "slowest": sorted(((round(s, 2), str(k)) for k, s in report.seconds.items()), reverse=True)[:6],
    }  # fmt: skip


def _gemm_keys(keys: Iterable[tuple]) -> dict[str, Any]:
    """GEMM keys by op; DeepGEMM's next to the kernels in its cache directory, each by what it was instantiated with."""
    counted = [key for key in keys if key[0] in GEMM_OPS]
    by_op = Counter(str(key[0]) for key in counted)
    built = snapshot(Path(os.environ[DEEP_GEMM_CACHE])).values()
    return {
        "gemm_keys": sum(by_op.values()), "by_op": dict(by_op),
        "deep_gemm_keys": _as_texts(key for key in counted if key[0] == "deep_gemm"),
        "deep_gemm_kernels": _as_texts(built),
    }  # fmt: skip


def _as_texts(keys: Iterable[tuple]) -> list[str]:
    return sorted(" ".join(map(str, key[1:])) for key in keys)


def settings_of_width(width: str, place: Place) -> Any:
    from dsv4.config import ModelConfig

    return ModelConfig.from_json(NANO) if place.dry else {"flash": flash_config, "pro": pro_config}[width]()


def mhc_compilations(place: Place, record: Record) -> None:
    """Compilations of everything that mHC needs at one width, both activation sites, from an empty cache."""
    with record.block("mhc_compilations") as (found,), ThreadPoolExecutor(4) as threads:
        runs = {
            (name, width): threads.submit(_mhc_compilations, place, backend, width)
            for backend, name in (("triton", "triton"), ("libraries", "tilelang"))
            for width in ("flash", "pro")
        }
        for (name, width), run in runs.items():
            found.setdefault(name, {})[width] = run.result()


def _mhc_compilations(place: Place, backend: str, width: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        environment = cache_environment(Path(folder))
        return children.start(place, "mhc", backend, width, environment=environment).result()["compilations"]


def mhc_child(place: Place, backend: str, width: str) -> dict[str, Any]:
    from dsv4.prewarming import prewarm_cases, run_case

    config = settings_of_width(width, place)
    with using_backend(backend, place), JitMonitor(libraries=jit_libraries()) as monitor:
        cases = [c for c in prewarm_cases(config, place.device, 8192) if c.op in MHC_OPS]
        for case in cases:
            run_case(case)
        place.synchronize()
        report = monitor.report()
    return {"compilations": report.compilations, "cases": len(cases)}


def switched_off(place: Place, record: Record) -> None:
    """``DSV4_PREWARM=0`` skips the kernels."""
    with record.block("prewarm_off") as (found,), tempfile.TemporaryDirectory() as folder:
        environment = cache_environment(Path(folder)) | {"DSV4_PREWARM": "0"}
        found |= children.start(place, "off", environment=environment).result()


def off_child(place: Place) -> dict[str, Any]:
    from dsv4.prewarming import warm_kernels

    settings = settings_of(place, "off", numerics="official", token_budget=512)
    with JitMonitor(libraries=jit_libraries()) as monitor:
        report = warm_kernels(settings_of_width("flash", place), settings)
    return {
        "run": len(report.seconds), "compilations": monitor.report().compilations,
        "warm_keys": len(_runtime.warm_keys()),
    }  # fmt: skip


def before_capture(place: Place, record: Record) -> None:
    """A spy on the prewarm and on every graph shows their order, on the step that the capture stage really runs."""
    from dsv4 import hardware
    from dsv4.graphs import device_graphs

    with record.block("prewarm_before_capture") as (found,):
        events: list[str] = []
        warm, graph = hardware.warm_kernels, device_graphs._CudaGraph.capture

        def spy_warm(*args: Any, **kwargs: Any) -> Any:
            events.append("prewarm")
            return warm(*args, **kwargs)

        def spy_capture(self: Any, fn: Any) -> Any:
            events.append("capture")
            return graph(self, fn)

        hardware.warm_kernels, device_graphs._CudaGraph.capture = spy_warm, spy_capture
        try:
            nano_engine(place, "full", token_budget=64, max_requests=4, max_seq_len=256, num_blocks=4)
        finally:
            hardware.warm_kernels, device_graphs._CudaGraph.capture = warm, graph
        found["nano"] = {"events": events}


def cold_key(place: Place, record: Record) -> None:
    """A specialisation that nobody warmed, and a prewarm, met while capturing: errors that say so. Runs last."""
    with record.block("cold_key_in_capture") as (found,):
        x, weight = torch.randn(3, 1234, device=place.device), torch.randn(1234, device=place.device)
        found["rms_norm"] = {
            "message": _while_capturing(lambda: ops.rms_norm(x, weight, eps=1e-6), _runtime.ColdKernelError)
        }
    with record.block("cold_key_in_capture") as (found,):
        from dsv4.prewarming import warm_kernels

        settings = settings_of(place, "off", token_budget=64, max_requests=4)
        found["prewarm"] = {
            "message": _while_capturing(lambda: warm_kernels(settings_of_width("flash", place), settings), RuntimeError)
        }


def _while_capturing(call: Any, kind: type[Exception]) -> str:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except kind as error:
        return str(error)
    return "no error"
