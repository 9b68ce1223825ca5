"""Expert-load counters of a model: every valid row counts once per chosen expert in every layer, pads never."""

import pytest
import torch

from dsv4 import ops
from dsv4.compile import compile_model
from dsv4.compile_stage import mark_step_sizes
from dsv4.runner import Runner, Sequence

from .tiny_model import random_tokens

ROWS, PADDED, TOPK = 64, 96, 6  # of nano, as in the published models


def counts_of(runner: Runner) -> torch.Tensor:
    """``[layers, experts]``, the MTP block last."""
    return torch.stack([*runner.caches.load_counts, *runner.caches.mtp_load_counts])


def step(runner: Runner, tokens: list[int], *, padded: int = PADDED) -> None:
    """One step of all tokens, then the MTP block on the same rows."""
    sequence = Sequence()
    inputs = runner.inputs([sequence.segment(tokens, (len(tokens) - 1,))], num_rows=padded, num_requests=3)
    with torch.no_grad():
        _, streams = runner.step(inputs, runner.caches)
        runner.draft(inputs, runner.caches, streams)


def test_counters_of_many_layers():
    """43 layers of 256 experts, one step of 64 rows padded to 96: counts equal a plain count of the ids."""
    g = torch.Generator().manual_seed(0)
    enabled = torch.ones(1, dtype=torch.int32)
    for _ in range(43):
        ids = torch.rand(PADDED, 256, generator=g).topk(TOPK).indices.int()
        ids[ROWS:] = -1
        counts = torch.zeros(256, dtype=torch.int64)
        ops.record_expert_load(ids, enabled, counts)
        assert counts.sum() == 384
        assert torch.equal(counts, torch.bincount(ids[:ROWS].flatten(), minlength=256))


@pytest.mark.parametrize("numerics", ["exact", "official"])
def test_every_layer_counts_valid_rows(make_runner, numerics):
    runner = make_runner(numerics)
    runner.caches.load_enabled.fill_(1)
    tokens = random_tokens(ROWS, 2048, seed=1)
    step(runner, tokens)
    counts = counts_of(runner)
    assert counts.sum(1).tolist() == [384] * 8
    for layer in range(3):  # hash layers: the table says which experts each token takes
        table = runner.model.blocks[layer].ffn.router.selector
        assert torch.equal(counts[layer], torch.bincount(table[tokens].flatten(), minlength=16))
    assert (counts.max(1).values <= ROWS).all()  # an expert is chosen at most once per row
    step(runner, tokens[:5], padded=5)
    assert counts_of(runner).sum(1).tolist() == [384 + 30] * 8


def test_counts_are_those_of_unpadded_rows(make_runner):
    padded, plain = make_runner(), make_runner()
    tokens = random_tokens(ROWS, 2048, seed=2)
    for runner, rows in ((padded, PADDED), (plain, ROWS)):
        runner.caches.load_enabled.fill_(1)
        step(runner, tokens, padded=rows)
    assert torch.equal(counts_of(padded), counts_of(plain))


def test_nothing_is_counted_while_disabled(make_runner):
    """The switch works between steps, both ways, and does not change the results."""
    runner = make_runner()
    tokens = random_tokens(ROWS, 2048, seed=3)
    off, _ = runner.run([Sequence().segment(tokens, range(ROWS))])
    step(runner, tokens)
    assert counts_of(runner).sum() == 0
    runner.caches.load_enabled.fill_(1)
    on, _ = runner.run([Sequence().segment(tokens, range(ROWS))])
    assert counts_of(runner).sum(1).tolist() == [384] * 7 + [0]
    runner.caches.load_enabled.zero_()
    step(runner, tokens)
    assert counts_of(runner).sum(1).tolist() == [384] * 7 + [0]
    assert torch.equal(on, off)


def test_a_trace_counts_like_eager(make_runner):
    """Traced while disabled: the switch is data, so the trace obeys it later."""
    eager, traced = make_runner(), make_runner()
    inputs = traced.inputs([Sequence().segment([5, 6, 7], (2,))], num_rows=4, num_requests=2)
    mark_step_sizes(inputs, traced.caches)
    traced.step = compile_model(traced.model.forward_streams, ops.boundary_ops(), backend="eager")
    traced.step.prepare(inputs, traced.caches)
    tokens = random_tokens(ROWS, 2048, seed=4)
    for runner in (eager, traced):
        step(runner, tokens[:9])
        assert counts_of(runner).sum() == 0
        runner.caches.load_enabled.fill_(1)
        step(runner, tokens)
    assert counts_of(traced).sum(1).tolist() == [384] * 8
    assert torch.equal(counts_of(traced), counts_of(eager))
