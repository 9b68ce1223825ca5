"""The choice of kernels: once per process, among what exists, with a library that can be imported."""

import pytest

from dsv4.ops import _backends


@pytest.fixture(autouse=True)
def _unchosen(monkeypatch):
    monkeypatch.setattr(_backends, "_chosen", {})


def test_the_first_choice_is_the_default():
    assert _backends.backend("mhc") == "triton" and _backends.backend("gemm") == "triton"


def test_a_choice_can_be_repeated_but_not_changed(monkeypatch):
    monkeypatch.setattr(_backends.importlib, "import_module", lambda name: None)
    _backends.choose({"mhc": "tilelang"})
    _backends.choose({"mhc": "tilelang"})
    assert _backends.backend("mhc") == "tilelang" and _backends.backend("gemm") == "triton"
    with pytest.raises(ValueError, match="mhc kernels must stay 'tilelang' in this process, got 'triton'"):
        _backends.choose({"mhc": "triton"})


def test_an_unknown_choice_is_refused():
    with pytest.raises(ValueError, match=r"gemm kernels must be one of \['triton', 'deep_gemm'\], got 'cublas'"):
        _backends.choose({"gemm": "cublas"})


def test_a_missing_library_is_refused_with_its_remedy(monkeypatch):
    def fail(name):
        raise ImportError(f"No module named {name}")

    monkeypatch.setattr(_backends.importlib, "import_module", fail)
    with pytest.raises(NotImplementedError, match=r"pip install 'dsv4\[deep_gemm\]'\), got: No module named deep_gemm"):
        _backends.choose({"gemm": "deep_gemm"})
    assert _backends.backend("gemm") == "triton"


def test_of_two_choices_both_or_none_are_made(monkeypatch):
    """An engine that is refused for one must not bind the next engine to the other."""
    monkeypatch.setattr(_backends.importlib, "import_module", lambda name: None)
    _backends.choose({"gemm": "deep_gemm"})
    for refuse in (_backends.check, _backends.choose):
        with pytest.raises(ValueError, match="gemm kernels must stay 'deep_gemm'"):
            refuse({"mhc": "tilelang", "gemm": "triton"})
    assert _backends.backend("mhc") == "triton"
    _backends.check({"mhc": "tilelang", "gemm": "deep_gemm"})
    _backends.choose({"mhc": "triton"})


def test_using_ends_with_its_block(monkeypatch):
    monkeypatch.setattr(_backends.importlib, "import_module", lambda name: None)
    with _backends.using("mhc", "tilelang"):
        assert _backends.backend("mhc") == "tilelang"
    assert _backends.backend("mhc") == "triton"
