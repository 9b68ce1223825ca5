"""Settings of an engine: what is refused, and what a setting that is left open means."""

import pytest
import torch

from dsv4.engine_config import EngineConfig


def test_graphs_are_the_default_where_they_exist(monkeypatch):
    assert EngineConfig().graph_mode == "off"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert EngineConfig(device="cuda").graph_mode == "auto"
    for chosen in ("off", "piecewise", "full", "auto"):
        assert EngineConfig(device="cuda:1", graphs=chosen).graph_mode == chosen


@pytest.mark.parametrize("settings, message", [
    ({"graphs": "auto"}, "graphs must be 'off' on cpu, got 'auto'"),
    ({"graphs": "some"}, r"graphs must be one of \['off', 'piecewise', 'full', 'auto'\], got 'some'"),
    ({"mhc_backend": None}, "mhc_backend must be one of .*, got None"),
    ({"gpu_memory_utilization": 0}, r"gpu_memory_utilization must be a number in \(0, 1\], got 0"),
    ({"gpu_memory_utilization": 1.1}, r"gpu_memory_utilization must be a number in \(0, 1\], got 1.1"),
    ({"gpu_memory_utilization": True}, r"gpu_memory_utilization must be a number in \(0, 1\], got True"),
    ({"gpu_memory_utilization": "90%"}, r"gpu_memory_utilization must be a number in \(0, 1\], got '90%'"),
    ({"num_blocks": 0}, "num_blocks must be an integer of at least 1, got 0"),
    ({"device": "gpu"}, "device must be cpu, cuda or cuda:<index>, got 'gpu'"),
    ({"device": None}, "device must be cpu, cuda or cuda:<index>, got None"),
    ({"boundary_ops": (3,)}, r"boundary_ops must be a tuple of op names, got \(3,\)"),
    ({"boundary_ops": 3}, "boundary_ops must be a tuple of op names, got 3"),
    ({"compile_cache": 3}, "compile_cache must be a directory or None, got 3"),
])  # fmt: skip
def test_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**settings)


def test_graphs_of_pieces_need_pieces(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="graphs 'piecewise' must come with compile 'piecewise', got 'off'"):
        EngineConfig(device="cuda", graphs="piecewise", compile="off")


def test_most_rows_of_a_step():
    """A draft step adds a row per request that resumes a reused prefix."""
    base = {"token_budget": 100, "max_requests": 7}
    assert EngineConfig(**base).max_rows == 100
    assert EngineConfig(**base, draft_tokens=1).max_rows == 107
    assert EngineConfig(**base, draft_tokens=1, prefix_reuse=False).max_rows == 100
