"""The poison of the GPU report, on graphs of CPU tensors: a sound engine is clean, and every planted read is found."""

from collections.abc import Callable

import pytest
import torch

from dsv4 import ops
from dsv4.engine import Engine
from dsv4.ops import _paged

from ..simulated_hardware import SimulatedHardware, make
from ..tiny_model import TinyCheckpoint, tiny_config
from . import gpu_poison

KINDS = {f"{how}{kind}" for how in ("", "draft of ") for kind in ("prefill", "mixed", "decode", "verify")}


def engine_of(numerics: str, storage: str, directory) -> Engine:
    config = tiny_config((4, 128), num_hash_layers=1, **({} if storage == "fp32" else {"head_dim": 512}))
    model = TinyCheckpoint.write(config, directory).model(numerics, deterministic=False)
    return make(
        model, SimulatedHardware("full"), numerics=numerics, cache_storage=storage, deterministic=False,
        token_budget=80, chunk_tokens=80, prefix_reuse=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return engine_of("exact", "fp32", tmp_path_factory.mktemp("tiny"))


def check_clean(found: dict[str, dict[str, int]]) -> None:
    assert found.keys() == KINDS | {"unowned"}
    assert gpu_poison.all_clean(found), found


@pytest.mark.parametrize("eager", [False, True], ids=["replayed", "eager"])
def test_poison_changes_nothing(engine, eager):
    check_clean(gpu_poison.poison_differences(engine, eager=eager))
    assert {step.inputs._pads.get("streams", 0) for step in engine.started.captured.values()} == {0}  # put back


def test_poison_in_fp8_pages_changes_nothing(tmp_path):
    made = engine_of("official", "fp8", tmp_path)
    check_clean(gpu_poison.poison_differences(made))
    index_rows = made.runner.caches.layers[0].index_entries
    gpu_poison.fill(made.runner.caches, gpu_poison.POISONS[1])
    assert all(
        torch.isnan(_paged.read(c, torch.arange(3), d)).all() for c, d in ((index_rows, 128), (window(made), 512))
    )


def window(engine: Engine) -> torch.Tensor:
    return engine.runner.caches.layers[0].window


def static(engine: Engine, function: str, tape, path: str) -> torch.Tensor:
    step = engine.started.captured[function]
    (bucket,) = (bucket for bucket, each in step._tapes.items() if each is tape)
    return step.inputs._buckets[bucket].buffers[path]


Memory = Callable[[Engine, object], torch.Tensor]
PLANTED: dict[str, tuple[str, Memory, set[str]]] = {  # function, what it reads besides, kinds that must differ
    "page of nobody": ("step", lambda e, _: window(e)[0, 0], {"prefill", "mixed", "decode", "verify"}),
    "last row of its own page": ("step", lambda e, _: window(e)[12 - 4, 127], {"prefill", "mixed", "decode", "verify"}),
    "page that left the window": ("step", lambda e, _: window(e)[4, 3], {"decode"}),
    "entry of an open window": ("step", lambda e, _: e.runner.caches.layers[1].entries[4, 0], {"decode"}),
    "index entry of later": ("step", lambda e, _: e.runner.caches.layers[0].index_entries[4, 63], {"verify"}),
    "free slot": ("step", lambda e, _: e.runner.caches.layers[1].state[0, 9], {"prefill", "verify"}),
    "window of the MTP block": ("draft", lambda e, _: e.runner.caches.mtp[0].window[0, 5], {"draft of verify"}),
    "float of a pad row": ("draft", lambda e, t: static(e, "draft", t, "streams")[-1, 0], {"draft of prefill"}),
    "length of a pad request": ("step", lambda e, t: static(e, "step", t, "seq_lens")[-1:], {"prefill", "mixed"}),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_read_is_found(engine, monkeypatch, bug):
    """One element more than a row may see, added to one element of the results."""
    function, memory, kinds = PLANTED[bug]
    for tape in engine.started.captured[function]._tapes.values():

        def read(tape=tape) -> None:
            tape.outputs[1][0, 0, 0].add_(memory(engine, tape)[0])

        monkeypatch.setattr(tape, "runs", [*tape.runs, read])
    found = gpu_poison.poison_differences(engine)
    assert {kind for kind in KINDS if found[kind]["differing"]} >= kinds, found


def test_an_op_that_reads_one_row_too_far_is_found(engine, monkeypatch):
    attention = ops.sparse_attention
    assert attention._schema.arguments[5].name == "positions"

    def too_far(*args, **numbers):
        return attention(*args[:5], args[5] + (args[5] >= 0), *args[6:], **numbers)

    monkeypatch.setattr(ops, "sparse_attention", too_far)
    found = gpu_poison.poison_differences(engine)
    assert all(found[kind]["not_finite"] and found[kind]["differing"] for kind in KINDS), found


def test_a_planted_write_is_found(engine, monkeypatch):
    tape = next(iter(engine.started.captured["step"]._tapes.values()))
    monkeypatch.setattr(tape, "runs", [*tape.runs, lambda: window(engine)[0, 0, :1].fill_(7)])
    assert gpu_poison.poison_differences(engine)["unowned"]["written"] > 0
