"""Start-up: the order of its stages, what is left when capture fails, what close frees, and agreement of ranks.

Everything here runs on simulated hardware; that a device does what it is asked is shown by ``graphs/test_gpu_engine``.
"""

import gc
import logging
import weakref
from functools import partial

import pytest

from dsv4 import compile_stage, start_up as start_up_module
from dsv4.capture_stage import draft_ladder, step_ladder
from dsv4.engine import Engine
from dsv4.graphs.jit_monitor import JitMonitor, KeyCounts
from dsv4.graphs.pieces import CapturedPieces, CaptureError, CaptureMemoryError
from dsv4.graphs.ranks import Ranks
from dsv4.start_up import LateCompilation

from .engines import greedy
from .graphs.gpu_measure import placed
from .simulated_hardware import SimulatedHardware, eager_pieces, make, prompts, settings_of
from .tiny_model import TinyCheckpoint, tiny_config


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return TinyCheckpoint.write(tiny_config((4,)), tmp_path_factory.mktemp("tiny")).model("exact")


# ---- order -----------------------------------------------------------------------------------------------------------


def spied(monkeypatch, hardware: SimulatedHardware) -> None:
    """Record the stages of start-up, warm-ups and captures among the events of ``hardware``."""
    events = hardware.events

    def spy(owner, name: str, text) -> None:
        original = getattr(owner, name)

        def call(*args, **kwargs):
            events.append(text(*args, **kwargs))
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    def rows(args) -> int:
        return len((args[0]).positions)

    spy(start_up_module, "compile_functions", lambda runner, settings: "compile")
    spy(Ranks, "exchange", lambda self, name, value: f"meet: {name}")
    spy(CapturedPieces, "problems", lambda self, args: f"warm-up {rows(args)}")
    spy(CapturedPieces, "capture", lambda self, label, mode, args, watched: f"{mode} {rows(args)}")
    spy(Engine, "rehearse", lambda self: "rehearse")
    spy(start_up_module, "allocate_caches", lambda *args, num_blocks, **sizes: f"allocate {num_blocks}")


@pytest.mark.parametrize("graph_mode", ["full", "piecewise"])
def test_order_of_the_stages(tiny, monkeypatch, graph_mode):
    hardware = SimulatedHardware(graph_mode)
    spied(monkeypatch, hardware)
    monkeypatch.setattr(compile_stage, "compile_model", eager_pieces)
    compiled = graph_mode == "piecewise"
    engine = make(tiny, hardware, compile="piecewise" if compiled else "off")
    step, draft = ([b.tokens for b in ladder(engine.settings).largest_first] for ladder in (step_ladder, draft_ladder))
    kinds = ("capture", "settle", "reset", "release")  # of graphs, in between
    events = [e for e in hardware.events if e not in kinds]
    assert step[0] == 6 and draft[0] == 9
    assert events == [
        "allocate 1",
        "meet: settings",
        "prewarm",
        *(["compile"] if compiled else []),
        "meet: compiled",
        "watch the peak",
        *(f"warm-up {n}" for n in (*step, *draft)),
        "read the peak",
        f"{graph_mode} 6",
        f"{graph_mode} 9",
        "release cached",
        "measure",
        "meet: caches",
        "allocate 6",
        *(f"{graph_mode} {n}" for n in (*step, *draft)),
        "meet: captured",
        "rehearse",
        "meet: ready",
    ]
    first_capture = hardware.events.index("capture")
    assert hardware.events.index("prewarm") < first_capture
    assert hardware.events.count("release") == 2  # what the trials captured is gone before anything is measured
    assert max(i for i, e in enumerate(hardware.events) if e == "release") < hardware.events.index("measure")


def test_the_table(tiny):
    engine = make(tiny)
    started, rows = engine.started, engine.started.table()
    stages = ["prewarm", "barrier", "warm", "trial", "empty", "caches", "capture step", "capture draft", "rehearse"]
    assert sorted(row.stage for row in rows) == sorted(stages)
    assert all(row.seconds >= 0 for row in rows)
    found = {row.stage: row for row in rows}
    for name, report in started.capture_reports.items():
        assert found[f"capture {name}"].graphs == report.graphs == len(started.captured[name].ladder.buckets)
        assert found[f"capture {name}"].mib == report.mib > 0
    assert found["caches"].mib == engine.runner.caches.bytes() / 2**20
    assert started.late_compilations == () and started.ready_at > 0
    cpu = Engine.from_model(tiny, settings_of())
    assert [row.stage for row in cpu.started.table()] == ["barrier", "caches"] and cpu.started.captured == {}


@pytest.mark.slow
def test_late_compilations_are_listed(tiny, monkeypatch, caplog):
    """What the monitor saw between the meeting of the ranks and ready; slow ones are a warning."""

    class Seen(JitMonitor):
        def __enter__(self):
            hardware.events.append("monitor opens")
            return super().__enter__()

        def __exit__(self, *error):
            hardware.events.append("monitor closes")
            self._record("some", "fast", KeyCounts(loads=2, seconds=0.2))
            self._record("some", "slow", KeyCounts(compilations=1, seconds=1.5))
            return super().__exit__(*error)

    hardware = SimulatedHardware()
    monkeypatch.setattr(Engine, "rehearse", lambda self: hardware.events.append("rehearse"))
    monkeypatch.setattr(start_up_module, "JitMonitor", partial(Seen, counters={"some": dict}))
    with caplog.at_level(logging.WARNING, logger=start_up_module.__name__):
        engine = make(tiny, hardware)
    assert engine.started.late_compilations == (
        LateCompilation("some", "fast", 0, 2, 0.2),
        LateCompilation("some", "slow", 1, 0, 1.5),
    )
    assert [r.getMessage() for r in caplog.records] == ["some compiled or loaded slow late, in 1.50 s"]
    events = hardware.events
    assert events.index("prewarm") < events.index("monitor opens") < events.index("watch the peak")
    assert max(i for i, e in enumerate(events) if e == "capture") < events.index("rehearse")
    assert events.index("rehearse") < events.index("monitor closes")


@pytest.mark.slow
def test_capture_progress(tiny, capsys):
    settings = settings_of()
    Engine.from_model(tiny, settings, hardware=SimulatedHardware())
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("capture")]
    assert len(lines) == len(step_ladder(settings).buckets) + len(draft_ladder(settings).buckets)
    assert lines[0].startswith(f"capture 1/{len(lines)} done step: 6 tokens, 3 requests, 6 logit rows, full ")
    assert lines[-1].startswith(f"capture {len(lines)}/{len(lines)} done draft: 1 tokens, ")


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pools", [
    pytest.param((2000, 1 << 26), id="step", marks=pytest.mark.slow), pytest.param((1 << 26, 2000), id="draft"),
])  # fmt: skip
def test_auto_without_memory_serves_eagerly_and_says_so(tiny, caplog, pools):
    eager = Engine.from_model(tiny, settings_of())
    with caplog.at_level(logging.ERROR, logger=start_up_module.__name__):
        engine = make(tiny, SimulatedHardware("auto", pools=pools))
    assert "steps will run eagerly, which is slow, because their capture failed" in caplog.text
    error = engine.started.capture_error
    assert isinstance(error, CaptureMemoryError) and "must fit into device memory" in str(error)
    assert engine.started.capture_reports == {}
    assert [(r.graphs, r.mib) for r in engine.started.table() if r.stage == "capture"] in ([(0, 0.0)], [])
    batch = prompts(2)
    got, want = (e.generate(batch, greedy(4)) for e in (engine, eager))
    assert [c.token_ids for c in got] == [c.token_ids for c in want]
    path = engine.started.captured["step"].last_path
    assert path.kind == "eager" and path.reason == f"capture failed: {error}"


@pytest.mark.parametrize("mode", ["full", pytest.param("piecewise", marks=pytest.mark.slow)])
def test_a_chosen_mode_without_memory_raises_and_leaves_the_model_usable(tiny, monkeypatch, mode):
    monkeypatch.setattr(compile_stage, "compile_model", eager_pieces)
    hardware = SimulatedHardware(mode, pools=(2000,))
    made: list[weakref.ref] = []
    allocate = start_up_module.allocate_caches

    def watched(*args, **kwargs):
        caches = allocate(*args, **kwargs)
        made.extend(weakref.ref(t) for t in caches.tensors())
        return caches

    monkeypatch.setattr(start_up_module, "allocate_caches", watched)
    with pytest.raises(CaptureMemoryError, match="must fit into device memory, got arena of") as error:
        make(tiny, hardware, compile="off" if mode == "full" else "piecewise")
    assert made and all(ref() is None for ref in made)  # although the error, with its frames, is still there
    assert hardware.events[-1] == "release cached" and not any(len(g.arena.live) for g in hardware.made)
    assert error.value.__cause__ is not None
    engine = Engine.from_model(tiny, settings_of())
    assert engine.generate(prompts(1), greedy(2))[0].error is None


def test_another_failure_is_never_eager(tiny, monkeypatch):
    """A kernel that is cold under capture is a fault of ours: ``auto`` does not hide it."""

    def cold(self, *args):
        raise CaptureError("bucket of 16 tokens: cold key ('rms_norm', 96)")

    monkeypatch.setattr(CapturedPieces, "capture", cold)
    with pytest.raises(CaptureError, match=r"cold key \('rms_norm', 96\)"):
        make(tiny, SimulatedHardware("auto"))


def test_a_failed_rehearsal_leaves_nothing(tiny, monkeypatch):
    def failing(self):
        raise ValueError("a kernel is wrong")

    monkeypatch.setattr(Engine, "rehearse", failing)
    hardware = SimulatedHardware()
    with pytest.raises(ValueError, match="a kernel is wrong"):
        make(tiny, hardware)
    assert hardware.made and not any(owner.arena.live for owner in hardware.made)
    assert hardware.events[-1] == "release cached"


@pytest.mark.slow
def test_caches_of_another_engine_are_refused(tiny):
    engine, other = make(tiny), Engine.from_model(tiny, settings_of())
    inputs = engine.runner.inputs([placed(engine, 0).segment([7], (0,))])
    with pytest.raises(ValueError, match="caches of a captured step must be those of the capture, got others"):
        engine.runner.step(inputs, other.runner.caches)


# ---- several engines, and the end of one -----------------------------------------------------------------------------


@pytest.mark.slow
def test_two_engines_in_turn(tiny):
    engines = [make(tiny), make(tiny, draft_tokens=0, token_budget=4, chunk_tokens=4)]
    alone = Engine.from_model(tiny, settings_of()).generate(prompts(1), greedy(6))[0].token_ids
    for _ in range(2):
        for engine in engines:
            assert engine.generate(prompts(1), greedy(6))[0].token_ids == alone
    engines[0].close()
    assert engines[1].generate(prompts(1), greedy(6))[0].token_ids == alone


@pytest.mark.slow
def test_close_frees_graphs_pools_and_caches(tiny):
    hardware = SimulatedHardware()
    with make(tiny, hardware) as engine:
        engine.generate(prompts(2), greedy(4))
        caches = [weakref.ref(t) for t in engine.runner.caches.tensors()]
        graphs = [weakref.ref(g) for owner in hardware.made for g in owner.graphs]
        assert len(graphs) == sum(r.graphs for r in engine.started.capture_reports.values())
    gc.collect()
    assert all(ref() is None for ref in (*caches, *graphs))
    assert not any(owner.arena.live for owner in hardware.made) and hardware.events[-1] == "release cached"
    with pytest.raises(RuntimeError, match="an engine must be open to serve prompts, got one that was closed"):
        engine.generate(prompts(1), greedy(1))
    with pytest.raises(RuntimeError, match="a step must run on a runner that is open, got one that was closed"):
        engine.runner.run([placed(engine, 0).segment([7])])
    engine.close()


def test_an_error_inside_the_block_ends_what_is_served(tiny):
    hardware = SimulatedHardware()
    with pytest.raises(KeyError, match="mine"):
        with make(tiny, hardware) as engine:
            stream = engine.stream(prompts(1), greedy(4))
            next(stream)
            raise KeyError("mine")
    stream.close()
    assert not any(owner.arena.live for owner in hardware.made) and not engine.loop.has_work
    with pytest.raises(RuntimeError, match="an engine must be open to serve prompts, got one that was closed"):
        engine.generate(prompts(1), greedy(1))


def test_an_engine_that_serves_is_not_closed(tiny):
    engine = make(tiny)
    stream = engine.stream(prompts(1), greedy(4))
    next(stream)
    with pytest.raises(RuntimeError, match="an engine must be idle to be closed, got one with unfinished prompts"):
        engine.close()
    stream.close()
    engine.close()
