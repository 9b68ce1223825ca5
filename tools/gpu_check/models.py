"""Models, engines and steps that several sections measure."""

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from dsv4.caches import allocate_caches
from dsv4.checkpoint import Checkpoint
from dsv4.config import ModelConfig, flash_config, pro_config
from dsv4.engine import Engine
from dsv4.engine_config import EngineConfig
from dsv4.execution import Execution
from dsv4.graphs.device_graphs import CudaGraphs
from dsv4.hardware import CudaHardware
from dsv4.model import DeepseekV4
from dsv4.ops import _backends
from dsv4.ops._jit_libraries import jit_libraries
from dsv4.runner import Runner, Sequence
from dsv4.tokenizer import Tokenizer
from dsv4.weights import load_weights, meta_weights

from .place import NANO, Place

LIBRARIES = {"triton": ("triton", "triton"), "libraries": ("tilelang", "deep_gemm")}


def backend_settings(backend: str) -> dict[str, str]:
    """Settings of ``EngineConfig`` for a backend of the report."""
    mhc, gemm = LIBRARIES[backend]
    return {"mhc_backend": mhc, "gemm_backend": gemm}


@contextmanager
def using_backend(backend: str, place: Place) -> Iterator[None]:
    """Let a backend serve the block; on the CPU references serve it anyway."""
    mhc, gemm = LIBRARIES[backend]
    with ExitStack() as stack:
        if not place.dry:
            stack.enter_context(_backends.using("mhc", mhc))
            stack.enter_context(_backends.using("gemm", gemm))
        yield


def nano_runner(
    place: Place,
    numerics: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    storage: str | None = None,
    deterministic: bool = False,
    max_blocks: int = 8,
    num_requests: int = 1,
    expert_weights: str = "fp4",
) -> Runner:
    """The trained checkpoint, eager, with caches of its own."""
    config = ModelConfig.from_json(NANO)
    execution = Execution(numerics=numerics, dtype=dtype, deterministic=deterministic)
    weights = load_weights(
        Checkpoint.open(NANO), config, numerics, dtype=dtype, device=place.device, progress=False,
        expert_weights=expert_weights,
    )  # fmt: skip
    model = DeepseekV4(config, execution, weights, max_positions=256 * max_blocks)
    caches = allocate_caches(
        config, execution, num_blocks=max_blocks * num_requests, num_window_pages=2 * max_blocks * num_requests,
        num_slots=num_requests, storage=storage or ("fp32" if dtype == torch.float32 else "bf16"), device=place.device,
    )  # fmt: skip
    return Runner.eager(model, caches, max_blocks)


def random_weights(
    config: ModelConfig,
    device: torch.device,
    *,
    numerics: str = "official",
    expert_weights: str = "fp4",
    share_experts: bool = False,
) -> dict[str, torch.Tensor]:
    """Weights of any config in kernel layout, made on the device; scales keep activations near 1.

    With ``share_experts`` the layers have one set of experts between them, where all of them would not fit.
    """
    g = torch.Generator(device=device).manual_seed(0)
    kind: dict[str, Any] = {"device": device, "generator": g}
    made, shared = {}, {}
    for name, meta in meta_weights(config, numerics, torch.bfloat16, expert_weights).items():
        experts = name.partition(".experts.")[2] if share_experts else ""
        if experts in shared:
            made[name] = shared[experts]
            continue
        if meta.dtype == torch.uint8:  # FP4 pairs, or E8M0 exponents of 2^-10 to 2^-8
            low, high = (117, 120) if name.endswith("scale") else (0, 256)
            value = torch.randint(low, high, meta.shape, dtype=torch.uint8, **kind)
        elif meta.dtype == torch.float8_e4m3fn:
            value = torch.empty(meta.shape, dtype=meta.dtype, device=device)
            for part in value.split(max(1, len(value) // 16)):  # fp32 numbers of all experts would not fit
                part.copy_(torch.randn(part.shape, **kind))
        elif meta.dtype == torch.int32:
            value = torch.rand(meta.shape[0], config.n_routed_experts, **kind).topk(meta.shape[1]).indices.int()
        elif name.endswith(".scale") and meta.numel():
            value = torch.full(meta.shape, 2.0**-6, dtype=meta.dtype, device=device)
        elif "norm" in name:
            value = (1 + 0.1 * torch.randn(meta.shape, **kind)).to(meta.dtype)
        else:
            value = (torch.randn(meta.shape, **kind) * 0.02).to(meta.dtype)
        made[name] = value
        if experts:
            shared[experts] = value
    return made


def wide_config(width: str, place: Place, *, layers: int, ratios: tuple[int, ...], experts: int) -> ModelConfig:
    """A model of Flash or Pro width with few layers and experts; nano's config when dry."""
    if place.dry:
        return ModelConfig.from_json(NANO)
    full = {"flash": flash_config, "pro": pro_config}[width]()
    return full.resized(
        num_hidden_layers=layers, compress_ratios=(*ratios, full.mtp_ratio), n_routed_experts=experts,
        num_hash_layers=min(1, layers),
    )  # fmt: skip


class DryHardware:
    """The CPU as a device that has kernels and graphs, for dry runs: graphs are recorded calls, nothing is warmed."""

    graph_mode = "full"

    def prewarm(self, *_: object, **__: object) -> None:
        return None

    def graphs(self) -> Any:
        from tests.graphs.cpu_graphs import CpuGraphs

        return CpuGraphs(1 << 28)

    def free_and_total_bytes(self) -> tuple[int, int]:
        return 1 << 34, 1 << 34

    def reset_peak(self) -> None:
        return None

    def transient_bytes(self) -> int:
        return 0

    def release_cached(self) -> None:
        gc.collect()

    def jit_libraries(self) -> Any:
        return jit_libraries()


class _SharedGraphs(CudaGraphs):
    def free_bytes(self) -> int:
        return _own_free_bytes()[0]


class SharedGpu(CudaHardware):
    """A GPU that other processes use too: what they take and give back must not look like this one's graphs."""

    def graphs(self) -> CudaGraphs:
        return _SharedGraphs(self.device)

    def free_and_total_bytes(self) -> tuple[int, int]:
        return _own_free_bytes()


def _own_free_bytes() -> tuple[int, int]:
    total = torch.cuda.get_device_properties(0).total_memory
    return total - torch.cuda.memory_reserved(), total


def _start(
    place: Place, model: DeepseekV4, settings: EngineConfig, mode: str, tokenizer: Tokenizer | None = None
) -> Engine:
    hardware = None
    if place.dry:
        hardware = DryHardware() if mode != "off" else None
    elif place.shared:
        hardware = SharedGpu(torch.device(settings.device), settings.graph_mode)
    return Engine.from_model(model, settings, tokenizer, progress=False, hardware=hardware)


def random_engine(
    place: Place, config: ModelConfig, settings: EngineConfig, mode: str, *, share_experts: bool = False
) -> Engine:
    """An engine over random weights."""
    weights = random_weights(
        config, torch.device(settings.device), numerics=settings.numerics, expert_weights=settings.expert_weights,
        share_experts=share_experts,
    )  # fmt: skip
    model = DeepseekV4(config, settings.execution, weights, max_positions=settings.max_blocks * 256)
    return _start(place, model, settings, mode)


def settings_of(place: Place, mode: str, backend: str = "triton", **more: Any) -> EngineConfig:
    """Engine settings of a graph mode (``off``, ``full``, ``piecewise``); eager on the CPU when dry."""
    compiled = "piecewise" if mode == "piecewise" else "off"
    chosen = {"device": place.device.type, "compile": compiled, "graphs": mode, **backend_settings(backend)} | more
    if place.dry:
        chosen |= {"compile": "off", "graphs": "off"}
        for name in ("mhc_backend", "gemm_backend", "prewarm_workers"):  # the CPU has no kernels
            chosen.pop(name, None)
        if chosen.get("numerics", "exact") == "exact" and chosen.get("cache_storage") == "bf16":
            chosen["cache_storage"] = "fp32"
    elif compiled == "piecewise":
        chosen["compile_cache"] = str(place.cache / "pieces")
    return EngineConfig(**chosen)


def nano_engine(place: Place, mode: str, backend: str = "triton", **more: Any) -> Engine:
    """An engine over the trained checkpoint."""
    settings = settings_of(place, mode, backend, **more)
    if not place.dry and not place.shared:
        return Engine.from_checkpoint(NANO, settings, progress=False)
    runner = nano_runner(
        place, settings.numerics, dtype=settings.execution.dtype, deterministic=settings.deterministic,
        max_blocks=settings.max_blocks, expert_weights=settings.expert_weights,
    )  # fmt: skip
    return _start(place, runner.model, settings, mode, Tokenizer.from_dir(NANO))


def sequences(count: int, blocks_each: int) -> list[Sequence]:
    """``count`` requests with pages of their own."""
    return [Sequence(i * blocks_each, 2 * i * blocks_each, i) for i in range(count)]
