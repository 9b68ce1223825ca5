"""Start-up on two ranks, which are threads that share a store: a failure of one is an error of both, at every stage."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from dsv4 import engine as engine_module, start_up as start_up_module
from dsv4.cache_sizing import plan_cache
from dsv4.engine import Engine
from dsv4.graphs.capture import CapturedStep
from dsv4.graphs.pieces import CaptureError, CaptureMemoryError
from dsv4.graphs.ranks import Ranks

from .engines import greedy
from .simulated_hardware import SimulatedHardware, make, prompts, settings_of
from .tiny_model import TinyCheckpoint, tiny_config


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return TinyCheckpoint.write(tiny_config((4,)), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tiny(checkpoint):
    return checkpoint.model("exact")


def on_ranks(monkeypatch, call) -> list:
    """Results, or errors, of ``call(rank)`` in two threads that share a store."""
    store, results = dist.HashStore(), [None, None]
    threads = []
    for rank in range(2):

        def run(rank: int = rank) -> None:
            try:
                results[rank] = call(rank)
            except Exception as error:
                results[rank] = error

        threads.append(threading.Thread(target=run, name=f"rank {rank}"))
    ranks = threading.local()
    monkeypatch.setattr(
        Ranks, "of", classmethod(lambda cls, group, store_, timeout: cls(ranks.number, 2, store, timedelta(seconds=60)))
    )
    for number, thread in enumerate(threads):
        original = thread._target

        def numbered(number: int = number, original=original) -> None:
            ranks.number = number
            original()

        thread._target = numbered
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_ranks_agree_on_the_number_of_blocks(tiny, monkeypatch):
    free = (1 << 28, 1 << 27)

    def call(rank: int) -> tuple[int, int]:
        hardware = SimulatedHardware("off", free=free[rank], total=1 << 28, transient=0)
        engine = make(tiny, hardware, num_blocks=None)
        return engine.settings.num_blocks, plan_cache(
            tiny.config, settings_of(num_blocks=None), engine.started.caches.memory
        ).num_blocks

    first, second = on_ranks(monkeypatch, call)
    assert first[0] == second[0] == second[1] < first[1]


def test_a_rank_that_cannot_compile_fails_everywhere(tiny, monkeypatch):
    """And nobody waits for it at the next meeting, or runs a step without it."""
    hardware = [SimulatedHardware("off"), SimulatedHardware("off")]

    def compile_functions(runner, settings):
        if settings.max_seq_len == 256:
            raise ValueError("no compiler")
        return {}

    monkeypatch.setattr(start_up_module, "compile_functions", compile_functions)
    errors = on_ranks(
        monkeypatch, lambda rank: make(tiny, hardware[rank], compile="piecewise", max_seq_len=512 - 256 * rank)
    )
    assert str(errors[0]) == "every rank must start up, got rank 1: ValueError: no compiler"
    assert type(errors[1]) is ValueError and str(errors[1]) == "no compiler"
    assert all("watch the peak" not in h.events for h in hardware)


def fail_on_one(monkeypatch, owner, name: str, error: Exception) -> None:
    """Let ``owner.name`` raise in the thread that is rank 1; the other rank's call goes through."""
    original = getattr(owner, name)

    def call(*args, **kwargs):
        if threading.current_thread().name == "rank 1":
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("owner, name", [
    (start_up_module, "check_settings"), (CapturedStep, "warm_up"), (CapturedStep, "trial"),
    (start_up_module, "plan_cache"), (start_up_module, "cache_pages"), (start_up_module, "capture_all"),
    (Engine, "rehearse"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_no_rank_is_ready_when_one_has_failed(tiny, monkeypatch, owner, name):
    hardware = [SimulatedHardware("full"), SimulatedHardware("full")]
    fail_on_one(monkeypatch, owner, name, CaptureError("no such kernel"))
    errors = on_ranks(monkeypatch, lambda rank: make(tiny, hardware[rank]))
    assert type(errors[0]) is RuntimeError
    assert str(errors[0]) == "every rank must start up, got rank 1: CaptureError: no such kernel"
    assert type(errors[1]) is CaptureError
    assert not any(owner.arena.live for each in hardware for owner in each.made)


@pytest.mark.parametrize("name", ["check_settings", "load_weights"])
def test_a_checkpoint_that_one_rank_cannot_load(checkpoint, monkeypatch, name):
    fail_on_one(monkeypatch, engine_module, name, ValueError("shard 2 must be whole"))
    errors = on_ranks(
        monkeypatch, lambda rank: Engine.from_checkpoint(checkpoint.directory, settings_of(), progress=False)
    )
    assert str(errors[0]) == "every rank must start up, got rank 1: ValueError: shard 2 must be whole"
    assert type(errors[1]) is ValueError


@pytest.mark.parametrize("name", ["trial", "capture"])
def test_without_memory_on_one_rank_auto_is_eager_on_all(tiny, monkeypatch, name):
    """Ranks that take different paths through a step would meet in different collectives."""
    fail_on_one(monkeypatch, CapturedStep, name, CaptureMemoryError("bucket must fit into device memory"))
    want = Engine.from_model(tiny, settings_of()).generate(prompts(1), greedy(3))[0].token_ids
    hardware = [SimulatedHardware("auto"), SimulatedHardware("auto")]
    engines = on_ranks(monkeypatch, lambda rank: make(tiny, hardware[rank]))
    texts = [str(engine.started.capture_error) for engine in engines]
    assert texts == ["rank 1: bucket must fit into device memory", "bucket must fit into device memory"]
    assert not any(owner.arena.live for each in hardware for owner in each.made)
    tokens = [engine.generate(prompts(1), greedy(3))[0].token_ids for engine in engines]
    assert tokens == [want, want]
    assert {engine.started.captured["step"].last_path.kind for engine in engines} == {"eager"}
