"""An engine on graphs of CPU tensors: tokens, drafts, padded replays; and that the measurements see faults.

The same measurements run on a GPU in ``test_gpu_engine.py``.
"""

import dataclasses

import pytest
import torch

from dsv4 import compile_stage
from dsv4.capture_stage import draft_ladder, step_ladder
from dsv4.engine import Engine
from dsv4.graphs.pieces import StaleAddressError

from ..engines import greedy
from ..simulated_hardware import SimulatedHardware, eager_pieces, make, prompts, settings_of
from ..tiny_model import TinyCheckpoint, tiny_config
from . import gpu_measure


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return TinyCheckpoint.write(tiny_config((4, 128)), tmp_path_factory.mktemp("tiny")).model("exact")


@pytest.mark.parametrize("draft_tokens, length", [
    (0, 21), (2, 21), pytest.param(1, 300, marks=pytest.mark.slow), pytest.param(3, 300, marks=pytest.mark.slow),
])  # fmt: skip
def test_tokens_are_those_of_an_eager_engine(tiny, draft_tokens, length):
    """Also the drafts: they read streams of the step, and of each other, from memory that the next replay overwrites.

    Prompts of 300 tokens come twice, so that the second draws on the prefix of the first.
    """
    changes = {"draft_tokens": draft_tokens, "token_budget": 12}
    eager = Engine.from_model(tiny, settings_of(**changes))
    with make(tiny, **changes) as engine:
        for tensor in (*engine.runner.caches.tensors(), *eager.runner.caches.tensors()):
            tensor.zero_()  # the rehearsal of one of them has been here
        for batch in [prompts(3, length)] if length < 256 else [prompts(2, length)] * 2:
            got, want = (e.generate(batch, greedy(8, ignore_eos=True)) for e in (engine, eager))
            assert [c.token_ids for c in got] == [c.token_ids for c in want]
            assert [c.drafted_tokens for c in got] == [c.drafted_tokens for c in want]
        assert (got[0].cached_tokens, got[0].drafted_tokens > 0) == (256 * (length > 256), draft_tokens > 0)
        for step in engine.started.captured.values():
            assert set(step.path_counts) == {"full"}
        pairs = zip(engine.runner.caches.tensors(), eager.runner.caches.tensors(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_a_draft_that_kept_a_view_would_be_seen(tiny, monkeypatch):
    """What a captured function returns is overwritten by its next replay: the reason why drafting copies."""
    engine = make(tiny)
    a, b = (engine.runner.inputs([gpu_measure.placed(engine, n).segment([7 + n], (0,))]) for n in range(2))
    first = engine.runner.step(a, engine.runner.caches)[1]
    kept = first.clone()
    engine.runner.draft(a, engine.runner.caches, first)  # has a pool of its own
    assert torch.equal(first, kept)
    engine.runner.step(b, engine.runner.caches)
    assert not torch.equal(first, kept)


@pytest.mark.parametrize("mode", ["full", pytest.param("piecewise", marks=pytest.mark.slow)])
def test_debug_graphs_finds_a_stale_pointer(tiny, monkeypatch, mode):
    """Pieces are compared with what the model gives them, full graphs with weights and caches; without, nothing is."""
    monkeypatch.setattr(compile_stage, "compile_model", eager_pieces)
    batch, tokens = prompts(1, 5), {}
    for debug in (False, True):
        settings = settings_of(compile="piecewise" if mode == "piecewise" else "off", draft_tokens=0, token_budget=4)
        object.__setattr__(settings, "debug_graphs", debug)  # which settings of the CPU, which has no graphs, refuse
        with Engine.from_model(tiny, settings, progress=False, hardware=SimulatedHardware(mode)) as engine:
            tokens[debug] = [c.token_ids for c in engine.generate(batch, greedy(2))]
            step, caches = engine.started.captured["step"], engine.runner.caches
            assert set(step.path_counts) == {mode}
            inputs = engine.runner.inputs([gpu_measure.placed(engine, 0).segment([7, 8, 9], (2,))])
            own = step.inputs._buckets[step.ladder.bucket_for(3, 1, 1)]
            moved = dataclasses.replace(
                own, views=dataclasses.replace(own.views, positions=own.views.positions.clone())
            )
            if mode == "piecewise":
                monkeypatch.setitem(step.inputs._buckets, step.ladder.bucket_for(3, 1, 1), moved)
                message = r"bucket of 4 tokens, .*piece \d+ .*: input \w+ must be"
            else:
                caches.layers[1].entries = caches.layers[1].entries.clone()
                message = r"bucket of 4 tokens, .*: watched tensor 6 must be"
            if debug:
                with pytest.raises(StaleAddressError, match=message):
                    engine.runner.step(inputs, caches)
            else:
                engine.runner.step(inputs, caches)
    assert tokens[True] == tokens[False]


@pytest.fixture(scope="module")
def measured(tiny):
    return make(tiny)


@pytest.mark.parametrize("padded", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["padded", "unpadded"])
def test_replays_equal_eager_calls(measured, padded):
    found = gpu_measure.replay_differences(measured, padded=padded)
    for function, ladder in (("step", step_ladder), ("draft", draft_ladder)):
        assert found[function]["prefill"].keys() == {str(b.tokens) for b in ladder(measured.settings).buckets}
        kinds = {"prefill", "decode", "mixed"} | ({"verify"} if function == "step" else set())
        assert found[function].keys() == kinds
    assert gpu_measure.total(found) == 0


def test_a_wrong_replay_is_measured(measured, monkeypatch):
    """The measurement itself: outputs of which one element is off, in one bucket."""
    step = measured.started.captured["step"]
    bucket = step.ladder.buckets[2]
    tape = step._tapes[bucket]
    monkeypatch.setattr(tape, "runs", [*tape.runs, lambda: tape.outputs[1][0, 0, 0].add_(1)])
    found = gpu_measure.replay_differences(measured, padded=True, functions=("step",))["step"]
    assert {n for sizes in found.values() for n, errors in sizes.items() if errors} == {str(bucket.tokens)}


def test_rows_alone_and_among_others(tiny):
    engine = make(tiny, max_requests=2, draft_tokens=3, num_blocks=4, token_budget=8)
    assert gpu_measure.rows_alone_and_among(engine, 8, rows=4, history=20) == 0
