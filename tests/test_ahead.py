"""Steps launched ahead: outputs do not change, and only the step that was planned is used."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dsv4.ahead import AheadStep
from dsv4.inputs import build_inputs
from dsv4.sampling import SamplingParams
from dsv4.transfer import Download, upload, upload_together

from .engines import greedy, make_engine, recorded_texts
from .tiny_model import place


def overwrite_outputs(engine) -> None:
    """Steps return views of one memory, as graphs do: the next one overwrites what this one returned."""
    run, memory = engine.runner.run, []

    def shared(segments, *, ready=None, **pads):
        given = run(segments, ready=ready, **pads)
        if not memory:
            memory.extend(torch.empty(512, *t.shape[1:], dtype=t.dtype) for t in given)
        return tuple(m[: len(t)].copy_(t) for m, t in zip(memory, given, strict=True))

    engine.runner.run = shared


class Served:
    """An engine serves a few prompts; what became of the steps launched ahead.

    Attributes:
        completions: what must not depend on the rest.
        steps, ran: steps of the loop, and steps that were run.
        taken, parts: launched steps whose outputs were taken, and those of which only some rows were.
        built: steps built ahead, not launched, and run later.
    """

    def __init__(self, nano_model, golden, *, ahead: bool, **settings) -> None:
        self.steps = self.ran = self.taken = self.parts = self.built = 0
        engine = make_engine(nano_model, **settings)
        engine.loop.launches_ahead = ahead
        overwrite_outputs(engine)
        run, step, run_plan = engine.runner.run, engine.loop.step, engine.loop._run

        def counted(segments, *, ready=None, **pads):
            self.ran += 1
            return run(segments, ready=ready, **pads)

        def taking(plan, segments):
            prepared, before = engine.loop._ahead, self.ran
            found = run_plan(plan, segments)
            if prepared is not None and prepared.outputs is not None and self.ran == before:
                self.taken += 1
                self.parts += len(plan.entries) < len(prepared.requests)
                self.check(engine, prepared, plan, segments)
            self.built += prepared is not None and prepared.outputs is None
            return found

        def stepping():
            self.steps += 1
            return step()

        engine.runner.run, engine.loop.step, engine.loop._run = counted, stepping, taking
        first, second = recorded_texts(golden)[:2]
        prompts = [first.prompt[:30], second.prompt, first.prompt[:7], first.prompt[:50]]
        params = [greedy(14), greedy(9, stop_token_ids=(second.continuation[4],)), greedy(1)]
        params.append(SamplingParams(max_new_tokens=12, temperature=0.8, top_p=0.9, seed=5))
        done = engine.generate(prompts, params)
        self.completions = [(c.token_ids, c.finish_reason, c.cached_tokens) for c in done]

    @staticmethod
    def check(engine, prepared, plan, segments) -> None:
        """Its inputs are those of a fresh build of the plan, rows of requests that ended aside."""
        fresh = build_inputs(segments, vocab_size=2048, max_blocks=engine.runner.max_blocks)
        rows = [prepared.requests.index(entry.request) for entry in plan.entries]
        for name in ("token_ids", "positions", "window_slots", "seq_lens", "block_tables", "state_slots"):
            built, wanted = getattr(prepared.inputs, name)[rows], getattr(fresh, name)
            if name == "block_tables":  # a page for the row after this one may have come since
                wanted = torch.where(built < 0, built, wanted)
            assert torch.equal(built, wanted), name


@pytest.mark.parametrize(
    "settings",
    [
        {"max_requests": 3},
        {"max_requests": 4, "prefix_reuse": False},
        {"num_blocks": 2, "max_seq_len": 256, "max_requests": 4, "chunk_tokens": 32},
    ],
    ids=["one waits", "no prefixes", "few pages"],
)
def test_outputs_do_not_change(nano_model, golden, settings):
    plain = Served(nano_model, golden, ahead=False, **settings)
    ahead = Served(nano_model, golden, ahead=True, **settings)
    assert ahead.completions == plain.completions and ahead.steps == plain.steps == plain.ran
    assert plain.taken == 0 and ahead.steps / 4 < ahead.taken < ahead.steps
    assert ahead.ran - ahead.steps <= 3  # launched for nothing: at most what a stop token and a new page cost
    assert ahead.parts or "num_blocks" in settings  # one stopped, the others' rows were taken


@pytest.mark.slow
def test_streams_of_a_snapshot_are_not_overwritten(nano_model, golden):
    """A block ends within the output: the step after it is built, not launched, and the prefix is reused."""
    first = recorded_texts(golden)[0]
    prompt, found = (first.prompt * 40)[:250], []
    for ahead in (False, True):
        engine = make_engine(nano_model, max_requests=1, max_seq_len=1024, num_blocks=4)
        engine.loop.launches_ahead = ahead
        overwrite_outputs(engine)
        one = engine.generate([prompt], greedy(20))[0]
        two = engine.generate([list(prompt) + list(one.token_ids)], greedy(6))[0]
        assert two.cached_tokens == 256
        found.append((one.token_ids, two.token_ids))
    assert found[0] == found[1]


def test_pages_come_early_enough(nano_model, golden):
    """A row that begins a window page (128) is launched ahead too; one that begins a page nobody could spare is not."""
    prompt = (recorded_texts(golden)[0].prompt * 40)[:120]
    for num_blocks, missed in ((8, 0), (1, 1)):
        engine = make_engine(nano_model, max_requests=1, max_seq_len=256, num_blocks=num_blocks, prefix_reuse=False)
        engine.loop.launches_ahead, run, alone = True, engine.runner.run, []
        engine.runner.run = lambda segments, *, ready=None, **pads: (
            alone.append(ready is None), run(segments, ready=ready, **pads)
        )[1]  # fmt: skip
        engine.generate([prompt], greedy(20))
        assert len(alone) == 20 and sum(alone) == 1 + missed  # the prompt, and the step behind the boundary


def requests(count: int) -> tuple[list, list]:
    made = [SimpleNamespace(number=n) for n in range(count)]
    segments = [
        replace(place(n).segment([7], (0,), start=140 + n), blocks=(n,), window_pages=(2 * n, 2 * n + 1))
        for n in range(count)
    ]
    return made, segments


def plan_of(*made) -> SimpleNamespace:
    return SimpleNamespace(entries=[SimpleNamespace(request=request) for request in made])


def test_other_plans_do_not_match():
    (one, two, three), segments = requests(3)
    logits, streams = torch.arange(6.0).view(3, 2), torch.arange(3.0)
    inputs = build_inputs(segments, vocab_size=99, max_blocks=1)
    ahead = AheadStep([one, two, three], segments, inputs, (logits, streams))
    assert ahead.rows_of(plan_of(one, two, three), segments) == [0, 1, 2]
    assert ahead.outputs_of([0, 1, 2])[0] is logits
    planned = [replace(s, token_ids=[10 + n], blocks=[n]) for n, s in enumerate(segments)]
    assert ahead.rows_of(plan_of(one, three), [planned[0], planned[2]]) == [0, 2]  # the second has ended
    assert ahead.outputs_of([0, 2])[0].tolist() == [[0.0, 1.0], [4.0, 5.0]] and ahead.outputs_of([2])[1].item() == 2
    assert ahead.rows_of(plan_of(two), [replace(segments[1], window_pages=(-1, 3))]) == [1]  # a page left the window
    assert ahead.rows_of(plan_of(two), [replace(segments[1], blocks=(1, 5), window_pages=(2, 3, 9))]) == [1]
    for change in (
        {"start": 142}, {"blocks": (5,)}, {"window_pages": (2, 4)}, {"window_pages": (2,)}, {"state_slot": 3},
        {"logit_offsets": ()}, {"token_ids": [7, 7]},
    ):  # fmt: skip
        assert ahead.rows_of(plan_of(two), [replace(segments[1], **change)]) is None, change
    stranger = SimpleNamespace(number=1)  # a new request in the pages of one that ended
    assert ahead.rows_of(plan_of(one, stranger), segments[:2]) is None


def test_transfers_on_the_cpu():
    values = upload([[1, -1], [2, 3]], torch.int32, "cpu")
    assert values.tolist() == [[1, -1], [2, 3]] and values.dtype == torch.int32
    down = Download(values)
    values.zero_()  # what is on its way does not see later writes
    assert down.wait().tolist() == [[1, -1], [2, 3]] and down.wait().tolist() == [[1, -1], [2, 3]]
    assert upload([], torch.int64, "meta").device.type == "meta"


def test_arrays_go_up_together():
    arrays = [np.arange(3), np.zeros((0, 2), np.int32), np.arange(6, dtype=np.int32).reshape(2, 3), np.array([-1])]
    up = upload_together(arrays, "cpu")
    assert [t.tolist() for t in up] == [a.tolist() for a in arrays]
    assert [t.shape for t in up] == [a.shape for a in arrays]
    assert [t.dtype for t in up] == [torch.int64, torch.int32, torch.int32, torch.int64]
    first = up[0].data_ptr()
    assert [t.data_ptr() - first for t in up if t.numel()] == [0, 32, 64]  # side by side, from multiples of 16 bytes
    assert all(t.storage_offset() == 0 for t in up)
    with pytest.raises(KeyError):
        upload_together([np.zeros(1)], "cpu")
