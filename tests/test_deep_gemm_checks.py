"""What an engine that asks for DeepGEMM hears before it loads: of its device, and of the library's release."""

import sys
from types import SimpleNamespace

import pytest
import torch

from dsv4 import prewarming
from dsv4.engine_config import EngineConfig
from dsv4.ops import _backends, _deep_gemm


@pytest.fixture
def library(monkeypatch):
    fake = SimpleNamespace(__version__=_deep_gemm.RELEASE)
    monkeypatch.setitem(sys.modules, "deep_gemm", fake)
    _deep_gemm.library.cache_clear()
    yield fake
    _deep_gemm.library.cache_clear()


def test_the_library_stays_on_one_device(library, monkeypatch):
    """Its table of kernels holds handles of the first device; an engine on another hears so before it loads."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(_deep_gemm, "_device", None)
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    settings = [EngineConfig(device=str(device), compile="off", gemm_backend="deep_gemm") for device in (first, second)]
    prewarming.check_backends(settings[1])
    _deep_gemm._settle_device(first)
    _deep_gemm._settle_device(first)
    prewarming.check_backends(settings[0])
    message = "deep_gemm must stay on one device, cuda:0 in this process, got cuda:1"
    with pytest.raises(NotImplementedError, match=message):
        _deep_gemm._settle_device(second)
    for call in (prewarming.check_backends, prewarming.choose_backends):
        with pytest.raises(NotImplementedError, match=message):
            call(settings[1])
    assert not _backends._chosen


def test_an_engine_hears_of_an_unknown_device_or_release_before_loading(library, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    settings = EngineConfig(device="cuda:0", compile="off", gemm_backend="deep_gemm")
    with pytest.raises(NotImplementedError, match="deep_gemm keys are known for SM90, got cuda:0 of SM100"):
        prewarming.check_backends(settings)
    monkeypatch.setattr(library, "__version__", "9.9")
    _deep_gemm.library.cache_clear()
    with pytest.raises(NotImplementedError, match="deep_gemm must be .*, whose kernel keys are known, got 9.9"):
        prewarming.check_backends(settings)
