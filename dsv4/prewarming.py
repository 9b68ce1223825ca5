"""Which kernels a model needs, and the call that warms them: the prewarm of ``dsv4.graphs`` applied to a model.

The module is not called ``prewarm``, because importing it would then replace the function ``dsv4.prewarm``.
"""

import json
import logging
import sys
import time
import weakref
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from . import ops
from .config import ModelConfig, deep_gemm_cache, default_compile_cache, prewarm_enabled
from .engine_config import EngineConfig
from .execution import ExpertWeights
from .graphs.deep_gemm_cache import compile_ahead, counter as deep_gemm_counter
from .graphs.jit_monitor import Counter, JitMonitor
from .graphs.prewarm import PrewarmReport, prewarm
from .graphs.ranks import default_group
from .graphs.warmer import Show
from .model import DeepseekV4
from .ops import PrewarmCase, _backends, _deep_gemm, _runtime
from .ops._jit_libraries import NOT_IMPORTED, imported_libraries
from .ops.fp8_linear import deep_gemm_calls
from .ops.shapes import Shape
from .prewarm_progress import stage_progress

logger = logging.getLogger(__name__)

LAYER_MODULES = frozenset(f"{__package__}.{name}" for name in ("model", "attention", "layers", "moe"))
"""Modules whose layers the op cases cover."""
LIBRARIES = ("triton", "tilelang", "deep_gemm", "inductor")
"""Everything that compiles kernels at run time."""
_ABSENT = {"deep_gemm": NOT_IMPORTED, "inductor": "compiles pieces of the model, in a later stage"}
PREWARM_TOKENS = 8192
"""Rows of a step for which a model is warmed that no engine serves."""

_warm: set[Hashable] = set()
_unwarmed: dict[Hashable, "weakref.WeakSet[DeepseekV4]"] = {}


def choose_backends(settings: EngineConfig) -> None:
    """Settle which kernels serve this process; see ``dsv4.ops._backends``. On the CPU references serve all ops.

    Raises:
        ValueError: this process has already chosen another.
        NotImplementedError: a library cannot be imported, or DeepGEMM is another release than is known, or cannot run
            on the device.
    """
    check_backends(settings)
    _backends.choose(_asked(settings))


def check_backends(settings: EngineConfig) -> None:
    """Raise what :func:`choose_backends` would raise: an engine asks before it loads weights for minutes."""
    _backends.check(_asked(settings))
    device = _indexed(settings.device)
    if device.type == "cuda" and settings.gemm_backend == "deep_gemm":
        _deep_gemm.library()
        _deep_gemm.check_device(device)


def _asked(settings: EngineConfig) -> dict[_backends.Kind, str]:
    on_gpu = torch.device(settings.device).type == "cuda"
    return {"mhc": settings.mhc_backend, "gemm": settings.gemm_backend} if on_gpu else {}


def prewarm_cases(
    config: ModelConfig, device: torch.device, max_tokens: int, expert_weights: ExpertWeights = "fp4"
) -> list[PrewarmCase]:
    """Every specialisation that a step of up to ``max_tokens`` rows can need, MTP block included."""
    shape = config.shape()
    if expert_weights == "fp8":
        shape = replace(shape, expert_dtype="fp8")
    return [
        case
        for spec in ops.specs().values()
        if spec.role == "model"
        for case in spec.prewarm_cases(shape, device, max_tokens)
    ]


def warm_kernels(
    config: ModelConfig,
    settings: EngineConfig,
    *,
    count: bool = True,
    group: dist.ProcessGroup | None = None,
    store: dist.Store | None = None,
    progress: bool = True,
) -> PrewarmReport:
    """Compile and load every kernel of a model of ``config``; see ``dsv4.graphs.prewarm``.

    Args:
        config: of the model.
        settings: device, numerics, token budget, backends and worker threads.
        count: let a JIT monitor count compilations and disk loads meanwhile.
        group: ranks that must agree and wait for each other; without one, all ranks of ``torch.distributed`` where it
            is in use.
        store: in place of the store of the group.
        progress: show progress on stderr.
    """
    device = torch.device(settings.device)
    enabled = settings.prewarm and prewarm_enabled()
    decision = {
        "prewarm": settings.prewarm,
        "config": config.to_dict(),
        "numerics": settings.numerics,
        "token_budget": settings.token_budget,
        "mhc_backend": settings.mhc_backend,
        "gemm_backend": settings.gemm_backend,
        "expert_weights": settings.expert_weights,
    }

    def cases() -> list[PrewarmCase]:
        choose_backends(settings)
        return prewarm_cases(config, device, settings.max_rows, settings.expert_weights)

    def compile_ahead(show: Show) -> None:
        if device.type == "cuda" and settings.gemm_backend == "deep_gemm":
            _compile_deep_gemm(config.shape(), settings, show)

    with stage_progress("prewarm", enabled=progress) as show:
        report = prewarm(
            cases,
            run=run_case,
            thread=_runtime.in_prewarm,
            is_warm=_runtime.is_warm,
            mark_warm=_runtime.mark_warm,
            lock_dir=default_compile_cache().parent / "locks",
            settings=decision,
            device=device,
            workers=settings.prewarm_workers,
            progress=show,
            group=group or default_group(),
            store=store,
            compile_ahead=compile_ahead,
            monitor=_monitor if count else None,
            enabled=enabled,
        )
    if enabled:
        _runtime.seal()
    name = _name(config, settings)
    if settings.prewarm:
        _warm.add(name)  # also if the environment switched the kernels off: ranks agreed, and nobody wants them later
    _unwarmed.pop(name, None)
    _runtime.disarm_first_use(name)
    return report


def warm_loaded(config: ModelConfig, settings: EngineConfig, *, progress: bool = True) -> PrewarmReport | None:
    """The prewarm at the tail of weight loading: after the last tensor, before caches are sized and graphs captured."""
    if torch.device(settings.device).type == "cuda":
        return warm_kernels(config, settings, progress=progress)
    return None


def run_case(case: PrewarmCase) -> None:
    """Make the call that compiles and loads one specialisation.

    Raises:
        RuntimeError: references stand for the kernels, so that nothing would be warm.
    """
    if _runtime.references_in_use():
        raise RuntimeError(f"kernels must be in use to be warmed, got references for {case.op}")
    args, kwargs = case.arguments()
    with _runtime.in_prewarm():
        ops.spec(case.op).overload(*args, **kwargs)


def _compile_deep_gemm(shape: Shape, settings: EngineConfig, show: Show) -> None:
    """Compile in processes what the prewarm then only loads: one process compiles one DeepGEMM kernel at a time."""
    started = time.perf_counter()
    added = compile_ahead(
        deep_gemm_calls(shape, settings.max_rows),
        lambda calls: ["-m", "dsv4.ops._deep_gemm_compile", str(_indexed(settings.device)), json.dumps(calls)],
        deep_gemm_cache(),
        lock=default_compile_cache().parent / "locks" / "deep_gemm.lock",
        processes=settings.prewarm_workers,
        timeout=600,
        show=show,
    )
    if added:
        logger.info("deep_gemm: %d kernels compiled by other processes, %.1f s", added, time.perf_counter() - started)


def _monitor() -> JitMonitor:
    """Of the libraries that this process has imported."""
    counters: dict[str, Counter] = {}
    if "deep_gemm" in sys.modules:
        counters["deep_gemm"] = deep_gemm_counter(deep_gemm_cache())
    return JitMonitor(libraries=imported_libraries(), counters=counters)


def library_counts(report: PrewarmReport) -> dict[str, dict[str, Any]]:
    """Per library ``keys``, ``misses`` (compiled), ``hits`` (loaded from disk), ``seconds``; or why it is ``absent``.

    DeepGEMM's loads leave no trace in this process: its hits are the keys that ran and were not compiled, and its
    seconds the larger of what its compilations took, in this or other processes, and what the calls of its keys took.
    """
    if report.jit is None:
        return {}
    found: dict[str, dict[str, Any]] = {}
    for name in LIBRARIES:
        if name not in report.jit.libraries:
            reason = report.jit.absent.get(name) or report.jit.unwatched.get(name) or _ABSENT[name]
            found[name] = {"keys": 0, "misses": 0, "hits": 0, "seconds": 0.0, "absent": reason}
            continue
        keys, total = report.jit.libraries[name], report.jit.total(name)
        own = [seconds for key, seconds in report.seconds.items() if key[0] == name]
        hits = max(0, len(own) - total.compilations) if name == "deep_gemm" else total.loads
        seconds = max(sum(own), total.seconds) if name == "deep_gemm" else total.seconds
        found[name] = {
            "keys": max(len(keys), len(own)), "misses": total.compilations, "hits": hits, "seconds": seconds,
        }  # fmt: skip
    return found


# ---- a model that exists ---------------------------------------------------------------------------------------------


def prewarm_model(
    model: nn.Module,
    settings: EngineConfig | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    store: dist.Store | None = None,
) -> PrewarmReport:
    """What ``dsv4.prewarm`` does; see there."""
    found = recognise(model)
    device = found.embed.device
    if not _has_kernels(device):
        raise ValueError(f"model must be on a GPU to be prewarmed, got {device}: its references have nothing to warm")
    own = settings_of(found) if settings is None else settings
    if _indexed(own.device) != device:
        raise ValueError(f"settings must be for the model's device {device}, got {own.device}")
    return warm_kernels(found.config, own, group=group, store=store)


def recognise(model: nn.Module) -> DeepseekV4:
    """The DeepSeek-V4 in ``model``.

    Raises:
        ValueError: there is none, or it has layers of other classes, whose kernels no case would warm.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    found = [module for module in model.modules() if isinstance(module, DeepseekV4)]
    if len(found) != 1:
        raise ValueError(
            f"model must contain one DeepseekV4 to be prewarmed, got {len(found)} in {type(model).__name__}: "
            "layers that are not recognised would stay cold"
        )
    for name, layer in found[0].named_modules():
        if type(layer) is not nn.ModuleList and type(layer).__module__ not in LAYER_MODULES:
            raise ValueError(
                f"every layer must be one that the prewarm recognises, got {type(layer).__module__}."
                f"{type(layer).__qualname__} at {name or 'the top'}: it would stay cold"
            )
    return found[0]


def settings_of(model: DeepseekV4) -> EngineConfig:
    """Settings for warming a model that no engine serves: its own device and formats, the process's backends."""
    fp8 = model.config.expert_dtype == "fp4" and model.blocks[0].ffn.w13.dtype == torch.float8_e4m3fn
    return EngineConfig(
        device=str(model.embed.device),
        numerics=model.execution.numerics,
        compile="off",
        token_budget=PREWARM_TOKENS,
        mhc_backend=_backends.backend("mhc"),
        gemm_backend=_backends.backend("gemm"),
        expert_weights="fp8" if fp8 else "fp4",
    )


def arm(model: DeepseekV4) -> None:
    """Let the first CUDA call of an op warm ``model``, unless its kernels are warm, or it is gone by then."""
    if not _has_kernels(model.embed.device):
        return
    name = _name(model.config, settings_of(model))
    if name in _warm:
        return
    _unwarmed.setdefault(name, weakref.WeakSet()).add(model)

    def first_use() -> None:
        for each in list(_unwarmed.get(name, ())):
            prewarm_model(each)

    _runtime.arm_first_use(name, first_use)


def _has_kernels(device: torch.device) -> bool:
    """A fake of a CUDA tensor in a process without a GPU has none."""
    return device.type == "cuda" and torch.cuda.is_available()


def _name(config: ModelConfig, settings: EngineConfig) -> Hashable:
    """What the kernels of a model depend on: layers and numerics change nothing."""
    backends = (settings.mhc_backend, settings.gemm_backend, settings.expert_weights)
    return config.shape(), _indexed(settings.device), *backends


def _indexed(device: str | torch.device) -> torch.device:
    device = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device
