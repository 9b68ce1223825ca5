"""Shared fixtures: the nano checkpoint in both numerics, and runners with fresh caches."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dsv4.checkpoint import Checkpoint
from dsv4.config import ModelConfig
from dsv4.execution import Execution
from dsv4.model import DeepseekV4
from dsv4.runner import Runner
from dsv4.weights import load_weights

from .tiny_model import runner_of

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
    """``make_runner(numerics, max_blocks=8, num_requests=1, ...)``: :func:`runner_of` of nano."""

    def make(
        numerics: str = "exact", *, deterministic: bool = False, dtype: torch.dtype | None = None, **sizes
    ) -> Runner:
        return runner_of(nano_model(numerics, deterministic=deterministic, dtype=dtype), **({"max_blocks": 8} | sizes))

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
