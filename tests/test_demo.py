"""The demo's GPU path on simulated hardware: the start-up report, the figures, and the bound on the NLL."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dsv4.engine import Engine
from dsv4.sampling import SamplingParams
from dsv4.tokenizer import Tokenizer

from .conftest import NANO, ROOT
from .simulated_hardware import SimulatedHardware, settings_of

SPEC = importlib.util.spec_from_file_location("demo", Path(ROOT) / "tools" / "demo.py")
demo = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(demo)


@pytest.fixture
def on_simulated_gpu(monkeypatch, nano_model, golden):
    """``main()`` on an engine that replays graphs of CPU tensors; the NLL is what the returned list says."""
    nll = [golden("exact_nll.json")["nll"]]

    def start(cache: str, device: str) -> tuple[Engine, float]:
        assert device == "cuda"
        settings = settings_of(deterministic=False, draft_tokens=0, token_budget=32, chunk_tokens=32, max_requests=4)
        engine = Engine.from_model(
            nano_model("exact"), settings, Tokenizer.from_dir(NANO), progress=False, hardware=SimulatedHardware()
        )
        return engine, 1.5

    report = SimpleNamespace(graph_breaks=0, num_pieces=15, num_distinct_pieces=7, num_recompiles=0)
    monkeypatch.setattr(Engine, "compile_reports", {"step": report})
    monkeypatch.setattr(demo, "start", start)
    monkeypatch.setattr(demo, "cold_start", lambda cache, device: 9.25)
    monkeypatch.setattr(demo.evaluate, "score", lambda runner, tokens, window: SimpleNamespace(nll=nll[0]))
    monkeypatch.setattr(demo, "SamplingParams", lambda max_new_tokens: SamplingParams(max_new_tokens=3))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a simulated GPU")
    monkeypatch.setattr(sys, "argv", ["demo.py", "--device", "cuda"])
    return nll


def test_shows_the_start_up_stage_by_stage(on_simulated_gpu, capsys):
    demo.main()
    lines = capsys.readouterr().out.splitlines()
    assert any("a simulated GPU, torch" in line for line in lines)
    table = [[cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")] for line in lines]
    rows = {row[0]: row[1:] for row in table if len(row) > 1}
    assert rows["stage"] == ["seconds", "keys", "graphs", "MiB"]
    stages = ["prewarm", "warm", "trial", "empty", "caches", "capture step"]
    assert [name for name in rows if name in stages] == stages
    assert int(rows["capture step"][2]) > 1 and float(rows["capture step"][3]) >= 0 and float(rows["caches"][3]) > 0
    assert rows["start, cold / warm"] == ["9.2 s / 1.5 s"] and rows["pieces / distinct"] == ["15 / 7"]
    assert "full" in rows["steps by path"][0] and rows["kernels compiled or loaded since"] == ["0"]


def test_another_nll_is_an_error(on_simulated_gpu):
    on_simulated_gpu[0] += 0.006
    with pytest.raises(SystemExit, match="NLL must be within 0.005 of 2.714642, got 2.720642"):
        demo.main()


@pytest.mark.parametrize("usable, capability, device", [
    (False, (9, 0), "cpu"), (True, (8, 6), "cpu"), (True, (9, 0), "cuda"), (True, (10, 0), "cuda"),
])  # fmt: skip
def test_which_device(monkeypatch, usable, capability, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert demo.choose_device() == device
