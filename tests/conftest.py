"""Shared fixtures: the nano checkpoint in both numerics, and runners with fresh caches."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dsv4.caches import allocate_caches
from dsv4.checkpoint import Checkpoint
from dsv4.config import ModelConfig
from dsv4.execution import CacheStorage, Execution
from dsv4.model import DeepseekV4
from dsv4.runner import Runner
from dsv4.weights import load_weights

ROOT = Path(__file__).resolve().parent.parent
NANO = ROOT / "assets" / "nano"
GOLDEN = ROOT / "tests" / "golden"


@pytest.fixture(scope="session")
def nano_config() -> ModelConfig:
    return ModelConfig.from_json(NANO)


@pytest.fixture(scope="session")
def nano_model(nano_config) -> Callable[..., DeepseekV4]:
    """``nano_model(numerics, deterministic=False)``: one instance per combination for the whole session."""
    models: dict = {}
    checkpoint = Checkpoint.open(NANO)

    def get(numerics: str, *, deterministic: bool = False, dtype: torch.dtype | None = None) -> DeepseekV4:
        execution = Execution.of(numerics, deterministic=deterministic)
        if dtype is not None:
            execution = Execution(numerics=numerics, deterministic=deterministic, dtype=dtype)
        if execution not in models:
            weights = load_weights(
                checkpoint, nano_config, numerics, dtype=execution.dtype, device="cpu", progress=False
            )
            models[execution] = DeepseekV4(nano_config, execution, weights, max_positions=2048)
        return models[execution]

    return get


@pytest.fixture
def make_runner(nano_model) -> Callable[..., Runner]:
    """``make_runner(numerics, max_blocks=8, num_requests=1, ...)``: an eager runner with its own caches."""

    def make(
        numerics: str = "exact",
        *,
        max_blocks: int = 8,
        num_requests: int = 1,
        storage: CacheStorage | None = None,
        max_draft: int = 0,
        **execution: object,
    ) -> Runner:
        model = nano_model(numerics, **execution)
        caches = allocate_caches(
            model.config,
            model.execution,
            num_blocks=max_blocks * num_requests,
            num_window_pages=2 * max_blocks * num_requests,
            num_slots=num_requests,
            storage=storage or ("fp32" if model.execution.dtype == torch.float32 else "bf16"),
            max_draft=max_draft,
        )
        return Runner.eager(model, caches, max_blocks)

    return make


@pytest.fixture(scope="session")
def golden() -> Callable[[str], object]:
    """``golden(name)``: a committed golden file, parsed once."""
    cache: dict[str, object] = {}

    def get(name: str) -> object:
        if name not in cache:
            path = GOLDEN / name
            cache[name] = load_file(path) if path.suffix == ".safetensors" else json.loads(path.read_text())
        return cache[name]

    return get
