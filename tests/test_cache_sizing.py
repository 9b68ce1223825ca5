"""How many blocks the caches get: every byte of the device has its place, and what does not fit is named."""

import json
from dataclasses import replace

import pytest
import torch

from dsv4.cache_sizing import DeviceMemory, cache_bytes, plan_cache
from dsv4.config import flash_config
from dsv4.engine import Engine
from dsv4.engine_config import EngineConfig

from .simulated_hardware import SimulatedHardware, make
from .tiny_model import TinyCheckpoint, tiny_config

GIB = 2**30
FLASH = flash_config()


def flash_settings(**changes) -> EngineConfig:
    return EngineConfig(**{"numerics": "official", "cache_storage": "fp8", "max_seq_len": 8192} | changes)


@pytest.fixture
def on_gpu(monkeypatch) -> dict[str, str]:
    """Settings of an engine on a GPU, which this machine need not have."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return {"device": "cuda"}


def test_caches_take_what_is_left(on_gpu):
    """Free memory is shared out to within a block and the allocator's rounding, never beyond."""
    memory = DeviceMemory(free=100 * GIB, total=140 * GIB, graphs=3 * GIB, transient=2 * GIB)
    for changes in ({}, {"gpu_memory_utilization": 0.5}, {"draft_tokens": 2}, {"max_requests": 64}):
        settings = flash_settings(**on_gpu, **changes)
        plan = plan_cache(FLASH, settings, memory)
        room = memory.free - memory.graphs - memory.transient - memory.total * (1 - settings.gpu_memory_utilization)
        per_block = cache_bytes(FLASH, settings, 11) - cache_bytes(FLASH, settings, 10)
        rounding = (5 * 44 + 10) * 2**21  # 44 layers of 5 tensors, each rounded up to 2 MiB
        assert plan.source == "measured" and plan.memory is memory
        assert plan.cache_bytes == cache_bytes(FLASH, settings, plan.num_blocks)
        assert room - rounding - per_block < plan.cache_bytes <= room - rounding


def test_blocks_that_no_prefix_needs_are_left_alone():
    memory = DeviceMemory(free=100 * GIB, total=140 * GIB, graphs=0, transient=0)
    settings = flash_settings(prefix_reuse=False, max_requests=3)
    assert plan_cache(FLASH, settings, memory).num_blocks == 3 * settings.max_blocks
    assert plan_cache(FLASH, settings, None).num_blocks == 3 * settings.max_blocks


def test_caches_larger_than_the_machine_are_refused(monkeypatch):
    settings = flash_settings(max_seq_len=2**20)
    need = cache_bytes(FLASH, settings, 8 * settings.max_blocks)
    monkeypatch.setattr("dsv4.cache_sizing._host_bytes", lambda: need)
    assert plan_cache(FLASH, settings, None).cache_bytes == need
    monkeypatch.setattr("dsv4.cache_sizing._host_bytes", lambda: need - 1)
    too_many = "caches must fit into host memory of .* GiB for 32768 blocks of 256 tokens: lower"
    with pytest.raises(ValueError, match=rf"{too_many} max_seq_len \(1048576\) or max_requests \(8\)"):
        plan_cache(FLASH, settings, None)
    with pytest.raises(ValueError, match=f"{too_many} num_blocks"):
        plan_cache(FLASH, settings.with_blocks(32768), None)


def test_caches_larger_than_the_machine_are_refused_before_weights_are_read(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config((4,)).to_dict()))  # and no weights
    monkeypatch.setattr("dsv4.cache_sizing._host_bytes", lambda: 1000)
    with pytest.raises(ValueError, match="caches must fit into host memory of 0.00 GiB"):
        Engine.from_checkpoint(tmp_path, EngineConfig(compile="off", max_seq_len=64), progress=False)


def test_given_blocks_must_fit():
    """They may use the share that gpu_memory_utilization leaves alone, not more."""
    settings = flash_settings(num_blocks=400)
    need = cache_bytes(FLASH, settings, 400)
    memory = DeviceMemory(free=need + 3 * GIB, total=140 * GIB, graphs=2 * GIB, transient=GIB)
    assert plan_cache(FLASH, settings, memory).num_blocks == 400
    message = (
        rf"num_blocks must fit into free memory, {memory.free / GIB - 0.1:.2f} GiB free less 2.00 GiB for graphs and "
        rf"1.00 GiB for buffers of a step, got 400 blocks of {need / GIB:.2f} GiB in all"
    )
    with pytest.raises(ValueError, match=message):
        plan_cache(FLASH, settings, replace(memory, free=round(memory.free - 0.1 * GIB)))


def test_memory_must_hold_one_sequence(on_gpu):
    memory = DeviceMemory(free=20 * GIB, total=140 * GIB, graphs=5 * GIB, transient=GIB)
    message = (
        r"free memory must hold the cache of one sequence of max_seq_len 8192, 32 blocks of \d+\.\d+ MiB, within "
        r"gpu_memory_utilization 0.9 of 140.00 GiB, got 20.00 GiB free less 5.00 GiB for graphs and 1.00 GiB for"
    )
    with pytest.raises(ValueError, match=message):
        plan_cache(FLASH, flash_settings(), memory)
    assert plan_cache(FLASH, flash_settings(**on_gpu, gpu_memory_utilization=1.0), memory).num_blocks >= 32


def test_caches_are_sized_by_what_the_trial_took(tmp_path):
    """The trial's pools and the driver's bytes of every graph to come, and the step's peak, are kept free."""
    hardware = SimulatedHardware(free=1 << 28, total=1 << 28, transient=1 << 22)
    engine = make(TinyCheckpoint.write(tiny_config((4,)), tmp_path).model("exact"), hardware, num_blocks=None)
    plan, trials = engine.started.caches, engine.started.trials
    assert plan.source == "measured" and engine.settings.num_blocks == plan.num_blocks > 8
    expected = sum(
        trial.pool_bytes + 1000 * len(engine.started.captured[name].ladder.buckets) for name, trial in trials.items()
    )
    assert plan.memory == DeviceMemory(free=1 << 28, total=1 << 28, graphs=expected, transient=1 << 22)
    assert engine.runner.caches.bytes() == plan.cache_bytes
    for name, report in engine.started.capture_reports.items():
        assert report.mib * 2**20 >= trials[name].pool_bytes > 0
        assert report.device_mib * 2**20 <= trials[name].expected_bytes(len(report.buckets))
