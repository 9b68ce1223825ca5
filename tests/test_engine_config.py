"""Settings of an engine: what is refused, and what a setting that is left open means."""

import dataclasses

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
    ({"graphs": "some"}, r"graphs must be one of \['off', 'piecewise', 'full', 'auto'\], got 'some'"),
    ({"mhc_backend": None}, "mhc_backend must be one of .*, got None"),
    ({"gpu_memory_utilization": 0}, r"gpu_memory_utilization must be a number in \(0, 1\], got 0"),
    ({"gpu_memory_utilization": 1.1}, r"gpu_memory_utilization must be a number in \(0, 1\], got 1.1"),
    ({"gpu_memory_utilization": True}, r"gpu_memory_utilization must be a number in \(0, 1\], got True"),
    ({"gpu_memory_utilization": "90%"}, r"gpu_memory_utilization must be a number in \(0, 1\], got '90%'"),
    ({"max_seq_len": 1}, "max_seq_len must be an integer of at least 2, a prompt and a new token, got 1"),
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


WITHOUT_EFFECT = [  # beside, what was set, where it has no effect
    ({}, {"graphs": "full"}, "on cpu"),
    ({}, {"graphs": "piecewise"}, "on cpu"),
    ({}, {"debug_graphs": True}, "on cpu"),
    ({}, {"prewarm": False}, "on cpu"),
    ({}, {"prewarm_workers": 4}, "on cpu"),
    ({}, {"mhc_backend": "tilelang"}, "on cpu"),
    ({}, {"gemm_backend": "deep_gemm"}, "on cpu"),
    ({}, {"gpu_memory_utilization": 0.5}, "on cpu"),
    ({}, {"expert_weights": "fp8"}, "with numerics 'exact'"),
    ({"compile": "off"}, {"compile_cache": "pieces"}, "with compile 'off'"),
    ({"compile": "full"}, {"boundary_ops": ("dsv4::router",)}, "with compile 'full'"),
    ({"device": "cuda", "graphs": "off"}, {"debug_graphs": True}, "with graphs 'off'"),
    ({"device": "cuda", "prewarm": False}, {"prewarm_workers": 4}, "with prewarm False"),
    ({"device": "cuda", "num_blocks": 4}, {"gpu_memory_utilization": 0.5}, "with num_blocks"),
]


@pytest.mark.parametrize("beside, option, where", WITHOUT_EFFECT, ids=str)
def test_an_option_without_effect_is_refused(monkeypatch, beside, option, where):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    ((name, value),) = option.items()
    with pytest.raises(ValueError) as error:
        EngineConfig(**beside, **option)
    assert str(error.value) == f"{name} must be left out {where}, where it has no effect, got {value!r}"
    EngineConfig(**beside)
    has_effect = {"device": "cuda", "numerics": "official"} if where in ("on cpu", "with numerics 'exact'") else beside
    without = has_effect.keys() - {"compile", "graphs", "prewarm", "num_blocks"}
    EngineConfig(**{key: has_effect[key] for key in without}, **option)


def test_what_asks_for_nothing_is_fine_anywhere(monkeypatch):
    defaults = {f.name: f.default for f in dataclasses.fields(EngineConfig)}
    assert EngineConfig(**defaults) == EngineConfig()
    for graphs in ("off", "auto", None):
        assert EngineConfig(graphs=graphs).graph_mode == "off"


def test_blocks_that_start_up_decided_on(monkeypatch):
    """They replace the share of memory that they were computed from, which a caller may not give beside them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    asked = EngineConfig(device="cuda", gpu_memory_utilization=0.5)
    decided = asked.with_blocks(7)
    assert (decided.num_blocks, decided.gpu_memory_utilization, asked.num_blocks) == (7, 0.5, None)


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
