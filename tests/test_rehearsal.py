"""The rehearsal at the end of start-up leaves nothing behind but warm paths; on simulated hardware."""

import pytest

from dsv4 import engine as engine_module
from dsv4.engine import Engine

from .engines import greedy
from .graphs.cpu_graphs import CpuGraph
from .simulated_hardware import SimulatedHardware, make, prompts, settings_of
from .tiny_model import TinyCheckpoint, tiny_config


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return TinyCheckpoint.write(tiny_config((4,)), tmp_path_factory.mktemp("tiny")).model("exact")


@pytest.mark.parametrize("graph_mode", ["full", "off"])
@pytest.mark.parametrize(
    "sizes", [{}, {"num_blocks": 1, "max_seq_len": 8, "prefix_reuse": False}], ids=["roomy", "narrow"]
)
def test_it_runs_last_and_is_forgotten(tiny, monkeypatch, graph_mode, sizes):
    seen, replayed = [], set()
    replay = CpuGraph.replay
    monkeypatch.setattr(CpuGraph, "replay", lambda graph: (replayed.add(graph), replay(graph))[1])

    def watched(generate, loop, started, **options):
        before = loop.runner.num_inputs
        rehearse(generate, loop, started, **options)
        graphs = [graph for step in started.captured.values() for tape in step._tapes.values() for graph in tape.graphs]
        assert set(graphs) <= replayed and bool(graphs) == (graph_mode == "full")  # no first launch is left
        seen.append((loop.runner.num_inputs - before, loop.has_work, started.ready_at))

    rehearse = engine_module.rehearse
    monkeypatch.setattr(engine_module, "rehearse", watched)
    engine = make(tiny, SimulatedHardware(graph_mode), **sizes)
    ((steps, has_work, ready_before),) = seen
    assert steps >= 4 and not has_work and engine.started.ready_at >= ready_before
    assert list(engine.started.seconds)[-1] == "rehearse"
    assert all(not s.path_counts and s.last_path is None for s in engine.started.captured.values())
    prompt = [prompts(1)[0][:3]]
    done = engine.generate(prompt, greedy(3))[0]
    assert (
        done.request_id == "r1"
        and done.cached_tokens == 0
        and done.token_ids == Engine.from_model(tiny, settings_of()).generate(prompt, greedy(3))[0].token_ids
    )


@pytest.mark.parametrize("longest", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_short_sequences_are_no_reason_not_to_start(tiny, longest):
    engine = make(tiny, num_blocks=1, max_seq_len=longest, prefix_reuse=False)
    assert list(engine.started.seconds)[-1] == "rehearse" and not engine.loop.has_work


def test_the_cpu_has_nothing_to_rehearse(tiny):
    assert "rehearse" not in Engine.from_model(tiny, settings_of()).started.seconds
