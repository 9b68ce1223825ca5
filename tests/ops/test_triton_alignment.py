"""A tensor off a boundary of 16 bytes: Triton compiles another binary for it, so the warm key must be another too."""

import pytest
import torch

from dsv4.ops import _runtime, _triton


@pytest.fixture
def launched(monkeypatch) -> list[tuple]:
    monkeypatch.setattr(_runtime, "_warm", set())
    return []


@pytest.fixture
def launch(launched):
    kernel = {(1,): lambda *args: launched.append(args)}
    return lambda *args: _triton.launch(("k", 4), kernel, (1,), *args)


def capture(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_a_capture_refuses_what_triton_would_compile(launch, launched, monkeypatch):
    numbers = torch.arange(9)
    launch(numbers, 3, numbers)
    assert _runtime.warm_keys() == {("k", 4)}
    with monkeypatch.context() as capturing:
        capture(capturing)
        launch(numbers, 3, numbers[2:])  # 16 bytes on
        with pytest.raises(_runtime.ColdKernelError, match=r"got cold key \('k', 4, 'off 16 bytes', 4\)"):
            launch(numbers, 3, numbers[1:])
    assert len(launched) == 2
    launch(numbers, 3, numbers[1:])
    launch(numbers[1:], 3, numbers[1:])
    assert _runtime.warm_keys() == {("k", 4), ("k", 4, "off 16 bytes", 4), ("k", 4, "off 16 bytes", 5)}
    capture(monkeypatch)
    launch(numbers, 3, numbers[3:])  # of the same kind as the one that is warm
    assert len(launched) == 5


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_triton_asks_the_same_question(dtype):
    """Its specialiser tells pointers apart by 16 bytes, and by nothing else of a tensor."""
    from triton._C.libtriton import native_specialize_impl as specialize
    from triton.backends.nvidia.compiler import CUDABackend

    def specialised(tensor: torch.Tensor) -> object:
        return specialize(CUDABackend, tensor, False, True, True)

    numbers = torch.zeros(64, dtype=dtype)
    kinds = {}
    for first in range(33):
        tensor = numbers[first:]
        kinds.setdefault(_triton._off_boundary((tensor,)), set()).add(specialised(tensor))
    assert set(kinds) == {0, 1} and all(len(kind) == 1 for kind in kinds.values()) and kinds[0] != kinds[1]
