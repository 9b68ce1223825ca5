"""Which kernels a model needs, and the call that warms them: the prewarm of ``dsv4.graphs`` applied to a model.

The module is not called ``prewarm``, because importing it would then replace the function ``dsv4.prewarm``.
"""

import torch

from . import ops
from .config import ModelConfig, default_compile_cache, prewarm_enabled
from .engine_config import EngineConfig
from .graphs.jit_monitor import JitMonitor
from .graphs.prewarm import PrewarmReport, prewarm
from .ops import PrewarmCase, _backends, _runtime
from .ops._jit_libraries import jit_libraries
from .prewarm_progress import prewarm_progress


def choose_backends(settings: EngineConfig) -> None:
    """Settle which kernels serve this process; see ``dsv4.ops._backends``. On the CPU references serve all ops."""
    if torch.device(settings.device).type == "cuda":
        _backends.choose("mhc", settings.mhc_backend)
        _backends.choose("gemm", settings.gemm_backend)


def prewarm_cases(config: ModelConfig, device: torch.device, max_tokens: int) -> list[PrewarmCase]:
    """Every specialisation that a step of up to ``max_tokens`` rows can need, MTP block included."""
    shape = config.shape()
    return [
        case
        for spec in ops.specs().values()
        if spec.role == "model"
        for case in spec.prewarm_cases(shape, device, max_tokens)
    ]


def warm_kernels(config: ModelConfig, settings: EngineConfig, *, count: bool = False) -> PrewarmReport:
    """Compile and load every kernel of the model; see ``dsv4.graphs.prewarm``. ``count`` adds the monitor's counts."""
    device = torch.device(settings.device)
    choose_backends(settings)

    def run(case: PrewarmCase) -> None:
        args, kwargs = case.arguments()
        ops.spec(case.op).overload(*args, **kwargs)

    decision = {
        "config": config.to_dict(),
        "numerics": settings.numerics,
        "token_budget": settings.token_budget,
        "mhc_backend": settings.mhc_backend,
        "gemm_backend": settings.gemm_backend,
    }
    with prewarm_progress() as progress:
        return prewarm(
            prewarm_cases(config, device, settings.token_budget),
            run=run,
            is_warm=_runtime.is_warm,
            mark_warm=_runtime.mark_warm,
            lock_dir=default_compile_cache().parent / "locks",
            settings=decision,
            device=device,
            workers=settings.prewarm_workers,
            progress=progress,
            monitor=JitMonitor(libraries=jit_libraries()) if count else None,
            enabled=prewarm_enabled(),
        )
