"""The sweep of the GPU report on graphs of CPU tensors: which steps it makes, and that it sees what it looks for."""

import pytest

from dsv4.graphs.jit_libraries import WATCHES
from dsv4.graphs.jit_monitor import JitMonitor, KeyCounts
from tools.gpu_check import jit
from tools.gpu_check.models import random_weights, wide_config
from tools.gpu_check.place import Place
from tools.gpu_check.runs import SWEEP_ROWS

from .simulated_hardware import make
from .tiny_model import TinyCheckpoint, tiny_config

NOTHING = dict.fromkeys(WATCHES, "not part of this test")


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    tiny = TinyCheckpoint.write(tiny_config((4,), vocab_size=2048), tmp_path_factory.mktemp("tiny")).model("exact")
    return make(tiny)  # at most 6 rows of 3 requests


def test_steps_have_the_rows_they_are_named_after():
    for kind, sizes in SWEEP_ROWS.items():
        for rows in sizes:
            segments = jit._segments(kind, rows)
            lengths = [len(segment.token_ids) for segment in segments]
            assert sum(lengths) == rows and len(segments) <= jit.MAX_REQUESTS
            assert len({segment.state_slot for segment in segments}) == len(segments)
            pages = [page for segment in segments for page in segment.window_pages]
            assert len(set(pages)) == len(pages)
            if kind == "mixed":
                assert lengths[0] == 1 and (lengths[-1] > 1 or rows == 2)
            else:
                assert set(lengths) == {{"prefill": rows, "decode": 1, "verify": 2}[kind]}


@pytest.mark.parametrize("kind, rows", [("prefill", 5), ("decode", 3), ("mixed", 4), ("verify", 6)])
def test_a_compilation_is_counted_where_it_happens(engine, monkeypatch, kind, rows):
    """One kernel is compiled while the draft after the step is replayed, another while the model is called eagerly."""
    total: dict[str, KeyCounts] = {}

    def compiling(key: str, call):
        def late(*args):
            total[key] = total.get(key, KeyCounts()) + KeyCounts(compilations=1)
            return call(*args)

        return late

    monkeypatch.setattr(engine.runner, "draft", compiling("a", engine.runner.draft))
    monkeypatch.setattr(engine.runner.model, "forward_streams", compiling("b", engine.runner.model.forward_streams))
    compilations, loads = {}, {}
    with JitMonitor(libraries=NOTHING, counters={"some": lambda: total}) as monitor:
        jit._Steps(engine, "full").run(kind, rows, jit._Counts(monitor, compilations, loads).note)
    assert {name: found[str(rows)] for name, found in compilations.items()} == {
        kind: 0, f"draft of {kind}": 1, f"unpadded {kind}": 1
    }  # fmt: skip
    assert all(found == {str(rows): 0} for found in loads.values())


def test_a_step_that_is_not_replayed_is_refused(engine):
    with pytest.raises(RuntimeError, match="a step of .* must be replayed, got eager: the step is beyond the largest"):
        jit._Steps(engine, "full").run("prefill", 7, lambda kind, rows: None)
    with pytest.raises(RuntimeError, match="a step of .* must be replayed, got full"):
        jit._Steps(engine, "piecewise").run("prefill", 5, lambda kind, rows: None)


def test_a_monitor_that_saw_nothing_of_start_up_is_refused():
    seen = {"a": KeyCounts(loads=1)}
    monitor = JitMonitor(libraries=NOTHING, counters={"some": lambda: dict(seen), "none": dict})
    with monitor:
        seen["b"] = KeyCounts(loads=1)
    jit._require_seen(monitor.report(), {"some"})
    with pytest.raises(RuntimeError, match="must compile or load kernels of none that are counted"):
        jit._require_seen(monitor.report(), {"none", "some"})


def test_layers_may_share_one_set_of_experts():
    place = Place(dry=True)
    config = wide_config("flash", place, layers=3, ratios=(0, 4, 128), experts=8)
    weights = random_weights(config, place.device, share_experts=True)
    experts = {name: w for name, w in weights.items() if ".experts." in name}
    others = {w.data_ptr() for name, w in weights.items() if name not in experts and w.numel()}
    assert len({w.data_ptr() for w in experts.values()}) == len({n.partition(".experts.")[2] for n in experts}) == 4
    assert len(others) == sum(w.numel() > 0 for name, w in weights.items() if name not in experts)
