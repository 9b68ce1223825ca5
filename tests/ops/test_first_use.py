"""The second trigger of the prewarm: the first CUDA call of an op runs the armed callbacks, once, on one rank.

The dispatcher's CUDA entry is called with CPU tensors: what it does before it launches does not depend on the device.
"""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4 import ops
from dsv4.ops import _registry, _runtime
from dsv4.ops.shapes import tiny

from . import contract
from .test_runtime import Ranks


@pytest.fixture(autouse=True)
def nothing_armed(monkeypatch):
    monkeypatch.setattr(_runtime, "first_uses", {})


@pytest.fixture
def entry():
    """The CUDA entry of an op whose kernel adds one."""
    return _registry._cuda_entry("plus_one", lambda x: x + 1000, lambda x: x + 1)


def test_runs_once_before_the_first_call(entry):
    calls = []
    _runtime.arm_first_use("a", lambda: calls.append("a"))
    _runtime.arm_first_use("a", lambda: calls.append("a again"))
    _runtime.arm_first_use("b", lambda: calls.append("b"))
    assert calls == []
    assert [entry(torch.tensor(n)).item() for n in range(3)] == [1, 2, 3]
    assert calls == ["a", "b"] and not _runtime.first_uses


def test_what_was_disarmed_does_not_run(entry):
    _runtime.arm_first_use("a", lambda: 1 / 0)
    _runtime.disarm_first_use("a")
    _runtime.disarm_first_use("never armed")
    assert entry(torch.tensor(1)) == 2


def test_the_callback_may_call_ops_from_its_own_threads(entry):
    calls = []

    def worker() -> None:
        with _runtime.in_prewarm():
            calls.append(entry(torch.tensor(1)).item())

    def callback() -> None:
        calls.append(entry(torch.tensor(2)).item())
        threads = [threading.Thread(target=worker) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=10)

    _runtime.arm_first_use("a", callback)
    entry(torch.tensor(0))
    assert calls == [3, 2, 2, 2]


def test_first_calls_of_other_threads_wait(entry):
    started, order = threading.Event(), []

    def callback() -> None:
        started.set()
        time.sleep(0.2)
        order.append("warm")

    def other() -> None:
        started.wait(10)
        entry(torch.tensor(0))
        order.append("other")

    _runtime.arm_first_use("a", callback)
    thread = threading.Thread(target=other)
    thread.start()
    entry(torch.tensor(0))
    thread.join(timeout=10)
    assert order == ["warm", "other"]


def test_a_failure_stays_armed(entry):
    outcomes = iter([RuntimeError("ptxas died"), None])

    def callback() -> None:
        if (error := next(outcomes)) is not None:
            raise error

    _runtime.arm_first_use("a", callback)
    with pytest.raises(RuntimeError, match="ptxas died"):
        entry(torch.tensor(0))
    assert entry(torch.tensor(0)) == 1 and not _runtime.first_uses


def test_several_ranks_are_an_error(entry, monkeypatch):
    message = (
        "kernels must be warm on every rank before the first op, got a first call of dsv4::plus_one in a process of "
        r"{} ranks: call dsv4.prewarm\(model\) on every rank"
    )
    _runtime.arm_first_use("a", lambda: None)
    _runtime.register_group("pair", Ranks(2))
    try:
        with pytest.raises(RuntimeError, match=message.format(2)):
            entry(torch.tensor(0))
    finally:
        _runtime.unregister_group("pair")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    with pytest.raises(RuntimeError, match=message.format(4)):
        entry(torch.tensor(0))
    assert list(_runtime.first_uses) == ["a"]
    _runtime.disarm_first_use("a")  # what a prewarm on every rank does
    assert entry(torch.tensor(0)) == 1


def test_not_while_a_stream_is_captured(entry, monkeypatch):
    _runtime.arm_first_use("a", lambda: 1 / 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert entry(torch.tensor(0)) == 1
    assert list(_runtime.first_uses) == ["a"]


def test_not_for_references_nor_in_a_trace(entry, monkeypatch):
    _runtime.arm_first_use("a", lambda: 1 / 0)
    with _runtime.use_references():
        assert entry(torch.tensor(0)) == 1000
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert entry(torch.tensor(0)) == 1


def test_not_for_fake_cuda_tensors():
    """Fakes of CUDA tensors reach the op's fake alone, in a trace as well as outside of one."""
    _runtime.arm_first_use("a", lambda: 1 / 0)
    with FakeTensorMode():
        x, weight = torch.empty(3, 256, device="cuda"), torch.empty(256, device="cuda")
        assert ops.rms_norm(x, weight, eps=1e-6).device.type == "cuda"
    assert list(_runtime.first_uses) == ["a"]


def test_not_on_the_cpu():
    _runtime.arm_first_use("a", lambda: 1 / 0)
    spec = ops.spec("rms_norm")
    contract.run(spec, *contract.example(spec, tiny, 3, torch.float32))
    assert list(_runtime.first_uses) == ["a"]
