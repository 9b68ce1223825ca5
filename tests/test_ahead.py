"""Inputs built ahead: outputs do not change, and only inputs of the very step that was planned are used."""

from dataclasses import fields, replace

import pytest
import torch

from dsv4.ahead import AheadInputs
from dsv4.inputs import build_inputs
from dsv4.sampling import SamplingParams
from dsv4.transfer import Download, upload

from .engines import greedy, make_engine, recorded_texts
from .tiny_model import place


def served(nano_model, golden, *, ahead: bool, **settings) -> tuple[list, int, int]:
    """Completions, steps, and steps whose inputs had been built ahead."""
    engine = make_engine(nano_model, **settings)
    engine.loop.plans_ahead = ahead
    run, used = engine.runner.run, []

    def counted(segments, *, ready=None, **pads):
        used.append(ready is not None)
        if ready is not None:  # the same tensors as a fresh build of these segments
            fresh = build_inputs(segments, vocab_size=2048, max_blocks=engine.runner.max_blocks)
            assert all(torch.equal(getattr(ready, f.name), getattr(fresh, f.name)) for f in fields(fresh))
        return run(segments, ready=ready, **pads)

    engine.runner.run = counted
    first, second = recorded_texts(golden)[:2]
    prompts = [first.prompt[:30], second.prompt, first.prompt[:7], first.prompt[:50]]
    params = [greedy(14), greedy(9, stop_token_ids=(second.continuation[4],)), greedy(1)]
    params.append(SamplingParams(max_new_tokens=12, temperature=0.8, top_p=0.9, seed=5))
    done = engine.generate(prompts, params)
    return [(c.token_ids, c.finish_reason, c.cached_tokens) for c in done], len(used), sum(used)


@pytest.mark.parametrize(
    "settings", [{"max_requests": 3}, {"num_blocks": 2, "max_seq_len": 256, "max_requests": 4, "chunk_tokens": 32}],
    ids=["one waits", "few pages"],
)  # fmt: skip
def test_outputs_do_not_change(nano_model, golden, settings):
    plain, steps, none = served(nano_model, golden, ahead=False, **settings)
    ahead, same_steps, used = served(nano_model, golden, ahead=True, **settings)
    assert ahead == plain and steps == same_steps
    assert none == 0 and steps / 4 < used < steps


def test_other_segments_do_not_match():
    segments = [replace(place(n).segment([7], (0,), start=40 + n), blocks=(n,), window_pages=(2 * n,)) for n in (0, 1)]
    ahead = AheadInputs(segments, build_inputs(segments, vocab_size=99, max_blocks=1))
    found = ahead.for_segments([replace(s, token_ids=[10 + n], blocks=[n]) for n, s in enumerate(segments)])
    assert found is not None and found.token_ids.tolist() == [10, 11] and found.positions.tolist() == [40, 41]
    one, two = segments
    for change in (
        {"start": 42}, {"blocks": (1, 5)}, {"window_pages": (-1,)}, {"state_slot": 3}, {"logit_offsets": ()},
        {"token_ids": [7, 7]},
    ):  # fmt: skip
        assert ahead.for_segments([one, replace(two, **change)]) is None, change
    assert ahead.for_segments([two, one]) is None and ahead.for_segments([one]) is None


def test_transfers_on_the_cpu():
    values = upload([[1, -1], [2, 3]], torch.int32, "cpu")
    assert values.tolist() == [[1, -1], [2, 3]] and values.dtype == torch.int32
    down = Download(values)
    values.zero_()  # what is on its way does not see later writes
    assert down.wait().tolist() == [[1, -1], [2, 3]] and down.wait().tolist() == [[1, -1], [2, 3]]
    assert upload([], torch.int64, "meta").device.type == "meta"
