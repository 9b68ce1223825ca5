"""Launches of TileLang kernels: guard during capture, one build per key, and what is passed on."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dsv4.ops import _runtime, _tilelang
from dsv4.ops._aligned import aligned

from .test_runtime import use_device


class Kernels:
    """Stands for the compiler: counts builds and calls."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.built, self.calls, self.running = seconds, [], [], []
        self.active, self.most_active = 0, 0
        self.lock = threading.Lock()

    def compile(self, build, arch):
        with self.lock:
            self.active += 1
            self.most_active = max(self.most_active, self.active)
        time.sleep(self.seconds)
        name = build()
        with self.lock:
            self.active -= 1
            self.built.append((name, arch))
        return lambda *args: self.run(name, args)

    def run(self, name, args):
        """A first call must not meet another call of the same kernel."""
        with self.lock:
            first = all(called != name for called, _ in self.calls)
            self.running.append(name)
            assert not first or self.running.count(name) == 1
        time.sleep(self.seconds / 4)
        with self.lock:
            self.running.remove(name)
            self.calls.append((name, args))


@pytest.fixture
def kernels(monkeypatch):
    fake = Kernels()
    monkeypatch.setattr(_tilelang, "_kernels", {})
    monkeypatch.setattr(_runtime, "_warm", set())
    monkeypatch.setattr(_tilelang, "compile_program", fake.compile)
    monkeypatch.setattr(_tilelang, "architecture", lambda device: "sm_90a")
    return fake


def capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_builds_once_and_runs_every_time(kernels):
    x = torch.randn(3)
    for scalar in (1, 2):
        _tilelang.launch(("a",), lambda: "a", (3,), x, scalar)
    assert kernels.built == [("a", "sm_90a")]
    assert [args[1] for _, args in kernels.calls] == [1, 2] and kernels.calls[0][1][0] is x
    assert _runtime.is_warm(("a",))


def test_a_cold_key_during_capture_raises_before_anything_is_built(kernels, monkeypatch):
    capture(monkeypatch)
    with pytest.raises(_runtime.ColdKernelError, match=r"got cold key \('a', 64\)"):
        _tilelang.launch(("a", 64), lambda: "a", (3,), torch.randn(3))
    assert not kernels.built and not kernels.calls and not _tilelang._kernels


def test_a_warm_key_runs_during_capture(kernels, monkeypatch):
    _tilelang.launch(("a",), lambda: "a", (3,), torch.randn(3))
    capture(monkeypatch)
    _tilelang.launch(("a",), lambda: "a", (3,), torch.randn(3))
    assert len(kernels.built) == 1 and len(kernels.calls) == 2


def test_an_empty_grid_does_nothing(kernels, monkeypatch):
    capture(monkeypatch)
    _tilelang.launch(("a",), lambda: "a", (4, 0), torch.randn(0))
    assert not kernels.built and not _runtime.is_warm(("a",))


def test_threads_that_need_one_key_build_it_once_and_other_keys_beside_it(kernels):
    kernels.seconds = 0.2
    keys = [("a",), ("b",)] * 4
    start = threading.Barrier(len(keys))

    def one(key):
        start.wait()
        _tilelang.launch(key, lambda: key[0], (1,), torch.randn(1))

    with ThreadPoolExecutor(len(keys)) as pool:
        list(pool.map(one, keys))
    assert sorted(kernels.built) == [("a", "sm_90a"), ("b", "sm_90a")]
    assert len(kernels.calls) == len(keys) and kernels.most_active == 2


def test_a_failed_build_leaves_the_key_cold_and_can_be_repeated(kernels):
    def fail():
        raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError, match="no compiler"):
        _tilelang.launch(("a",), fail, (1,), torch.randn(1))
    assert not _runtime.is_warm(("a",))
    _tilelang.launch(("a",), lambda: "a", (1,), torch.randn(1))
    assert _runtime.is_warm(("a",)) and len(kernels.calls) == 1


def test_another_architecture_is_another_build(kernels, monkeypatch):
    _tilelang.launch(("a",), lambda: "a", (1,), torch.randn(1))
    monkeypatch.setattr(_tilelang, "architecture", lambda device: "sm_100a")
    _tilelang.launch(("a",), lambda: "a", (1,), torch.randn(1))
    assert [arch for _, arch in kernels.built] == ["sm_90a", "sm_100a"]


def test_another_device_loads_what_was_built(kernels, monkeypatch):
    """Built once for both, but cold on the second until it has run there."""
    use_device(monkeypatch, 0)
    _tilelang.launch(("a",), lambda: "a", (1,), torch.randn(1))
    use_device(monkeypatch, 1)
    with monkeypatch.context() as during:
        capture(during)
        with pytest.raises(_runtime.ColdKernelError, match=r"got cold key \('a',\)"):
            _tilelang.launch(("a",), lambda: "a", (1,), torch.randn(1))
    _tilelang.launch(("a",), lambda: "a", (1,), torch.randn(1))
    assert _runtime.is_warm(("a",)) and len(kernels.built) == 1 and len(kernels.calls) == 2


def test_recorded_launches_do_not_run(kernels):
    with _tilelang.recording() as calls:
        _tilelang.launch(("a",), lambda: "a", (0,), torch.randn(0), 7)
    assert [(c.key, c.grid, c.args[1]) for c in calls] == [(("a",), (0,), 7)]
    assert not kernels.built and not kernels.calls


def test_aligned_copies_only_what_must_be_copied():
    x = torch.randn(4, 8)
    assert aligned(x) is x
    for odd in (x.flatten()[1:5], x[:, ::2], x.t()):
        copy = aligned(odd)
        assert torch.equal(copy, odd) and copy.is_contiguous() and copy.data_ptr() % 16 == 0
