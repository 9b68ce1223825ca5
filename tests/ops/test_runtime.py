import threading
import time
from contextlib import nullcontext

import pytest
import torch

from dsv4 import ops
from dsv4.ops import _registry, _runtime, _triton
from dsv4.ops.shapes import tiny

from . import contract


class Ranks:
    """A group as ops see it."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


@pytest.fixture
def pair():
    _runtime.register_group("pair", Ranks(2))
    yield "pair"
    _runtime.unregister_group("pair")


def test_group_sizes(pair):
    assert _runtime.group_size("") == 1
    assert _runtime.group_size(pair) == 2


def test_unregistered_name_is_an_error(pair):
    with pytest.raises(ValueError, match=r"group must be '' or one of \['pair'\], got 'self'"):
        _runtime.group_size("self")
    with pytest.raises(ValueError, match="got 'self'"):
        _runtime.unregister_group("self")


def test_names_are_used_once(pair):
    with pytest.raises(ValueError, match="group name must be unused, got 'pair'"):
        _runtime.register_group(pair, Ranks(4))
    with pytest.raises(ValueError, match="group name must not be empty"):
        _runtime.register_group("", Ranks(1))
    assert _runtime.group_size(pair) == 2
    _runtime.unregister_group(pair)
    _runtime.register_group(pair, Ranks(4))
    assert _runtime.group_size(pair) == 4


@pytest.mark.parametrize("name", ["ep_dispatch", "ep_combine", "pcp_moe_shard"])
def test_ops_refuse_several_ranks(name, pair):
    spec = ops.spec(name)
    args, kwargs = contract.example(spec, tiny, 3, torch.float32)
    with pytest.raises(NotImplementedError, match=f"dsv4::{name} needs a group of one rank, got 'pair' of 2 ranks"):
        spec.overload(*args, **(kwargs | {"group": pair}))


@pytest.mark.parametrize("name", ["ep_dispatch", "ep_combine", "pcp_moe_shard"])
def test_a_registered_group_of_one_is_this_rank(name):
    _runtime.register_group("one", Ranks(1))
    try:
        spec = ops.spec(name)
        args, kwargs = contract.example(spec, tiny, 3, torch.float32)
        alone = contract.run(spec, args, kwargs)
        named = contract.run(spec, args, kwargs | {"group": "one"})
    finally:
        _runtime.unregister_group("one")
    assert all(torch.equal(a, b) for a, b in zip(alone, named, strict=True))


def test_warm_keys():
    before = _runtime.warm_keys()
    key = ("test_warm_keys", 64, "bf16")
    assert not _runtime.is_warm(key) and key not in before
    _runtime.mark_warm(key)
    _runtime.mark_warm(key)
    assert _runtime.is_warm(key) and not _runtime.is_warm((*key, 1))
    assert _runtime.warm_keys() - before == {key}
    assert key not in before  # a snapshot does not change afterwards


def test_warm_keys_from_threads():
    """Keys are neither lost nor late in a snapshot while other threads add theirs."""
    failures = []

    def work(thread: int) -> None:
        try:
            for i in range(300):
                _runtime.mark_warm(("test_threads", thread, i))
                assert ("test_threads", thread, i) in _runtime.warm_keys()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len([key for key in _runtime.warm_keys() if key[0] == "test_threads"]) == 1200


def use_device(monkeypatch, index: int) -> None:
    """Make ``index`` the current one of several simulated devices."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: index)


def test_keys_are_warm_per_device(monkeypatch):
    """Triton compiles for the current device: what another one has does not serve a capture here."""
    monkeypatch.setattr(_runtime, "_warm", set())
    launched = []
    kernel = {(1,): lambda: launched.append(torch.cuda.current_device())}
    use_device(monkeypatch, 0)
    _triton.launch(("k",), kernel, (1,))
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_available", lambda: True)
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        _triton.launch(("k",), kernel, (1,))
        use_device(capture, 1)
        with pytest.raises(_runtime.ColdKernelError, match=r"got cold key \('k',\)"):
            _triton.launch(("k",), kernel, (1,))
    use_device(monkeypatch, 1)
    assert not _runtime.warm_keys()
    _triton.launch(("k",), kernel, (1,))
    assert launched == [0, 0, 1] and _runtime.warm_keys() == {("k",)}


def test_an_op_launches_on_the_device_of_its_tensors(monkeypatch):
    class Tensor:
        def get_device(self) -> int:
            return 1

    entered = []
    monkeypatch.setattr(torch.cuda, "device", lambda index: entered.append(index) or nullcontext())
    entry = _registry._cuda_entry("echo", lambda x: None, lambda x: x)
    x = Tensor()
    for current, expected in ((1, []), (0, [1])):
        use_device(monkeypatch, current)
        assert entry(x) is x and entered == expected


def test_a_cold_key_is_launched_by_one_thread_at_a_time(monkeypatch):
    """As Triton behaves: whoever launches before a kernel is compiled compiles it, too."""
    monkeypatch.setattr(_runtime, "_warm", set())
    compiled, ready = [], set()

    class Kernel:
        def __getitem__(self, grid):
            def run(name: str) -> None:
                if name not in ready:
                    time.sleep(0.05)
                    compiled.append(name)
                    ready.add(name)

            return run

    def launch(name: str) -> None:
        _triton.launch((name,), Kernel(), (1,), name)

    threads = [threading.Thread(target=launch, args=(name,)) for name in "abab" * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(compiled) == ["a", "b"] and _runtime.warm_keys() == {("a",), ("b",)}


def test_a_failed_launch_leaves_the_key_cold(monkeypatch):
    monkeypatch.setattr(_runtime, "_warm", set())
    outcomes = iter([ZeroDivisionError, None])

    class Kernel:
        def __getitem__(self, grid):
            def run() -> None:
                if (error := next(outcomes)) is not None:
                    raise error

            return run

    with pytest.raises(ZeroDivisionError):
        _triton.launch(("k",), Kernel(), (1,))
    assert not _runtime.is_warm(("k",))
    _triton.launch(("k",), Kernel(), (1,))
    assert _runtime.is_warm(("k",))
