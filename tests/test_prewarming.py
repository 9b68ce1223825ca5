"""The prewarm of a model: what it recognises, when it runs by itself, and that the ranks agree on what it warms.

Nothing here has a GPU. Where a model must be on one, ``_has_kernels`` says so, and the "kernels" are the references.
"""

import gc
import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import dsv4
from dsv4 import engine as engine_module, ops, prewarming
from dsv4.config import flash_config
from dsv4.engine import Engine
from dsv4.engine_config import EngineConfig
from dsv4.graphs.jit_monitor import JitReport, KeyCounts
from dsv4.graphs.warmer import PrewarmError
from dsv4.model import DeepseekV4
from dsv4.ops import _backends, _deep_gemm, _registry, _runtime

from .conftest import NANO
from .graphs.rank_programs import run_ranks, world_of_two
from .ops.test_runtime import use_device

graphs_prewarm = importlib.import_module("dsv4.graphs.prewarm")


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    for module, name, value in (
        (graphs_prewarm, "_done", {}), (prewarming, "_warm", set()),
        (prewarming, "_unwarmed", {}), (_runtime, "first_uses", {}), (_runtime, "_warm", set()),
        (_runtime, "_sealed", False), (_backends, "_chosen", {}),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def with_kernels(monkeypatch):
    monkeypatch.setattr(prewarming, "_has_kernels", lambda device: True)


@pytest.fixture
def calls(monkeypatch, with_kernels) -> list:
    """Calls of the prewarm, which warms nothing."""
    made = []

    def record(cases, **options):
        made.append(SimpleNamespace(cases=cases, **options))
        return made[-1]

    monkeypatch.setattr(prewarming, "prewarm", record)
    return made


@pytest.fixture
def first_call():
    """A first call of an op through the dispatcher's CUDA entry."""
    return lambda: _registry._cuda_entry("plus_one", lambda x: x, lambda x: x + 1)(torch.tensor(1))


def test_the_function_keeps_its_name():
    """A submodule called ``prewarm`` would take the function's place once it is imported."""
    assert callable(dsv4.prewarm) and not hasattr(dsv4.prewarm, "__path__")
    assert importlib.import_module("dsv4.prewarming").prewarm_model is prewarming.prewarm_model
    assert callable(dsv4.prewarm)


def test_warms_every_model_op(nano_model, with_kernels):
    report = dsv4.prewarm(nano_model("official"))
    assert report.enabled and not report.repeated and len(report.seconds) == len(report.keys)
    assert set(report.keys) == _runtime.warm_keys()
    assert {key[0] for key in report.keys} == {spec.name for spec in _registry.specs().values() if spec.role == "model"}
    assert report.jit is not None and "triton" in {*report.jit.libraries, *report.jit.absent}
    again = dsv4.prewarm(nn.Sequential(nano_model("official")))
    assert again.repeated and again.decision == report.decision


def test_a_model_that_is_not_recognised_is_an_error(nano_model, nano_config, with_kernels):
    message = "model must contain one DeepseekV4 to be prewarmed, got 0 in Linear: layers that are not recognised would"
    with pytest.raises(ValueError, match=message):
        dsv4.prewarm(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="got 2 in ModuleList"):
        dsv4.prewarm(nn.ModuleList([nano_model("official"), nano_model("exact")]))
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got ModelConfig"):
        dsv4.prewarm(nano_config)


def test_a_layer_that_is_not_recognised_is_an_error(nano_model, with_kernels, monkeypatch):
    model = nano_model("official")

    class OtherExperts(type(model.blocks[1].ffn)):
        pass

    monkeypatch.setattr(model.blocks[1].ffn, "__class__", OtherExperts)
    with pytest.raises(ValueError, match=r"prewarm recognises, got .*OtherExperts at blocks.1.ffn: it would stay cold"):
        dsv4.prewarm(model)
    assert not _runtime.warm_keys()


def test_refused_models_and_settings(nano_model, monkeypatch):
    with pytest.raises(ValueError, match="model must be on a GPU to be prewarmed, got cpu: its references have"):
        dsv4.prewarm(nano_model("exact"))
    monkeypatch.setattr(prewarming, "_has_kernels", lambda device: True)
    with pytest.raises(ValueError, match="settings must be for the model's device cpu, got meta"):
        dsv4.prewarm(nano_model("exact"), SimpleNamespace(device="meta"))


def test_no_key_is_an_error(nano_model, with_kernels, monkeypatch):
    monkeypatch.setattr(prewarming, "prewarm_cases", lambda *_: [])
    with pytest.raises(ValueError, match="prewarm must have at least 1 case, got 0: no op recognised the model"):
        dsv4.prewarm(nano_model("official"))


def test_refused_during_capture(nano_model, with_kernels, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="outside stream capture, .* call it after loading the weights"):
        dsv4.prewarm(nano_model("official"))


# ---- the second trigger ----------------------------------------------------------------------------------------------


def test_the_first_call_warms_once(nano_model, calls, first_call):
    prewarming.arm(nano_model("official"))
    prewarming.arm(nano_model("exact"))  # another numerics of the same shape needs the same kernels
    assert calls == []
    assert first_call() == first_call() == 2
    assert len(calls) == 2 and calls[0].cases() and not _runtime.first_uses
    prewarming.arm(nano_model("official"))
    first_call()
    assert len(calls) == 2


def test_a_prewarmed_model_is_not_armed(nano_model, calls, first_call):
    prewarming.arm(nano_model("official"))
    dsv4.prewarm(nano_model("official"))
    first_call()
    assert len(calls) == 1 and not _runtime.first_uses


def test_a_model_that_is_gone_stays_cold(nano_config, nano_model, calls, first_call):
    model = nano_model("exact")
    weights = {"embed.weight": model.embed}

    class Short(DeepseekV4):
        """Without layers, so that the object is cheap to make."""

        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.config, self.execution, self.blocks = nano_config, model.execution, model.blocks
            self.hold(embed=weights["embed.weight"])

    short = Short()
    prewarming.arm(short)
    del short
    gc.collect()
    assert first_call() == 2 and calls == []


def test_an_engine_that_switched_it_off_stays_cold(nano_model, calls, first_call):
    prewarming.arm(nano_model("official"))
    settings = EngineConfig()
    object.__setattr__(settings, "prewarm", False)  # the setting has no effect on the CPU and would be refused
    dsv4.prewarm(nano_model("official"), settings)
    assert first_call() == 2 and [call.enabled for call in calls] == [False]  # the ranks agreed on that
    prewarming.arm(nano_model("official"))  # another model, of no engine
    assert first_call() == 2 and [call.enabled for call in calls] == [False, True]


def test_the_switch_of_the_environment_still_compares(nano_model, calls, first_call, monkeypatch):
    monkeypatch.setenv("DSV4_PREWARM", "0")
    prewarming.arm(nano_model("official"))
    first_call()
    assert len(calls) == 1 and calls[0].enabled is False and not _runtime.first_uses


def test_models_on_the_cpu_arm_nothing(nano_model):
    prewarming.arm(nano_model("official"))
    assert not _runtime.first_uses


def test_references_are_not_warmed(nano_config):
    """They would run, and every key would count as warm."""
    case = prewarming.prewarm_cases(nano_config, torch.device("cpu"), 16)[0]
    with _runtime.use_references(), pytest.raises(RuntimeError, match="kernels must be in use to be warmed, got ref"):
        prewarming.run_case(case)


# ---- at the tail of loading ------------------------------------------------------------------------------------------


def test_order_of_start_up(monkeypatch):
    """Weights, prewarm, then start-up, which sizes the caches and captures."""
    order: list[str] = []

    def spied(name: str) -> None:
        original = getattr(engine_module, name)

        def call(*args, **kwargs):
            order.append(f"{name} begins")
            result = original(*args, **kwargs)
            order.append(f"{name} ends")
            return result

        monkeypatch.setattr(engine_module, name, call)

    for name in ("load_weights", "warm_loaded", "start_up"):
        spied(name)
    Engine.from_checkpoint(NANO, EngineConfig(compile="off", max_seq_len=256, max_requests=1), progress=False)
    names = ("load_weights", "warm_loaded", "start_up")
    assert order == [f"{name} {what}" for name in names for what in ("begins", "ends")]


def test_the_tail_of_loading_warms_on_a_gpu_alone(monkeypatch):
    made = []
    monkeypatch.setattr(prewarming, "warm_kernels", lambda config, settings, **_: made.append(settings.device))
    for device in ("cpu", "cuda", "cuda:1"):
        prewarming.warm_loaded(flash_config(), SimpleNamespace(device=device))
    assert made == ["cuda", "cuda:1"]


# ---- a second engine -------------------------------------------------------------------------------------------------


@pytest.fixture
def deep_gemm(monkeypatch):
    """The library without its kernels, where it serves; ops run their dispatch to it on the CPU."""
    fake = SimpleNamespace(__version__=_deep_gemm.RELEASE, get_num_sms=lambda: 132, fp8_gemm_nt=lambda *_, **__: None)
    monkeypatch.setattr(_deep_gemm, "library", lambda: fake)
    monkeypatch.setitem(_backends._chosen, "gemm", "deep_gemm")
    spec = ops.spec("fp8_linear")
    monkeypatch.setattr(prewarming.ops, "spec", lambda name: SimpleNamespace(overload=spec.cuda))

    def cases(config, device, rows, *_):
        return spec.cuda_cases(config.shape(), device, rows)

    monkeypatch.setattr(prewarming, "prewarm_cases", cases)
    return cases


def test_a_second_engine_warms_its_own_keys(nano_config, deep_gemm):
    """Of a process that the first one has sealed. What neither has warmed is refused, and the error says what to do."""
    settings = [EngineConfig(token_budget=rows, max_requests=1) for rows in (16, 512)]
    own, later = ({case.key: case for case in deep_gemm(nano_config, "cpu", each.max_rows)} for each in settings)
    (case, *_) = [case for key, case in later.items() if key not in own]
    args, options = case.arguments()
    prewarming.warm_kernels(nano_config, settings[0], progress=False)
    with pytest.raises(_runtime.ColdKernelError, match="once the process is ready, .*: prewarm with the sizes"):
        prewarming.ops.spec("fp8_linear").overload(*args, **options)
    report = prewarming.warm_kernels(nano_config, settings[1], progress=False)
    assert set(report.seconds) == later.keys() - own.keys() and set(report.skipped) == own.keys() & later.keys()
    prewarming.ops.spec("fp8_linear").overload(*args, **options)


def test_what_is_warm_on_another_device_is_not_skipped(nano_config, deep_gemm, monkeypatch):
    settings = EngineConfig(token_budget=16, max_requests=1)
    keys = {case.key for case in deep_gemm(nano_config, "cpu", settings.max_rows)}
    use_device(monkeypatch, 0)
    for key in keys:  # by steps without a prewarm
        _runtime.mark_warm(key)
    use_device(monkeypatch, 1)
    report = prewarming.warm_kernels(nano_config, settings, progress=False)
    assert set(report.seconds) == keys == _runtime.warm_keys() and report.skipped == ()


def test_a_second_engine_with_other_kernels_is_refused_before_it_loads(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(engine_module, "load_weights", lambda *_, **__: pytest.fail("weights were read"))
    monkeypatch.setitem(_backends._chosen, "mhc", "tilelang")
    with pytest.raises(ValueError, match="mhc kernels must stay 'tilelang' in this process, got 'triton'"):
        Engine.from_checkpoint(NANO, EngineConfig(device="cuda"), progress=False)


# ---- ranks -----------------------------------------------------------------------------------------------------------


def test_ranks_of_torch_distributed_agree(tmp_path: Path):
    found = run_ranks(world_of_two, 2, tmp_path)
    head = f"{PrewarmError.__name__}: every rank must prewarm the same as rank 0, got "
    assert {f["differs"] for f in found} == {head + "rank 1: settings.token_budget is 64, not 128"}
    assert {f["switched"] for f in found} == {
        head + "rank 1: enabled is false, not true; rank 1: settings.prewarm is false, not true"
    }
    assert found[0]["decision"] == found[1]["decision"] and [len(f["rank_seconds"]) for f in found] == [2, 2]
    assert all(f["armed"] == 0 for f in found)


# ---- the report ------------------------------------------------------------------------------------------------------


def test_counts_per_library():
    """Compiled and loaded per library; DeepGEMM shows only what it compiled, the rest of its keys were on disk."""
    triton = {"a": KeyCounts(1, 0, 2.0), "b": KeyCounts(0, 1, 0.1)}
    libraries = {"triton": triton, "deep_gemm": {"x": KeyCounts(1, 0, 3.0)}}
    jit = JitReport(libraries=libraries, absent={"tilelang": "not installed"}, unwatched={}, refused={})
    keys = {("deep_gemm", 1): 3.0, ("deep_gemm", 2): 0.5, ("rms_norm", 1): 2.0, ("linear", 2): 0.2}
    found = prewarming.library_counts(SimpleNamespace(jit=jit, seconds=keys))
    assert list(found) == ["triton", "tilelang", "deep_gemm", "inductor"]
    assert found["triton"] == {"keys": 2, "misses": 1, "hits": 1, "seconds": pytest.approx(2.1)}
    assert found["deep_gemm"] == {"keys": 2, "misses": 1, "hits": 1, "seconds": 3.5}
    assert found["tilelang"]["absent"] == "not installed"
    assert found["inductor"].pop("absent").endswith("in a later stage") and not any(found["inductor"].values())
    assert prewarming.library_counts(SimpleNamespace(jit=None)) == {}
