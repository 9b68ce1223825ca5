"""Exact numerics in fp32 against the recorded values (Hugging Face and the official code agree with them to 2e-5)."""

import pytest
import torch

from dsv4 import evaluate
from dsv4.model import run_blocks
from dsv4.runner import Sequence

LOGITS_ATOL = 1e-4  # measured 1.5e-5; two public implementations agree to 2e-5
LAYERS_ATOL = 1e-4


def check_logits(got: torch.Tensor, want: torch.Tensor, atol: float = LOGITS_ATOL) -> None:
    assert got.isfinite().all()
    assert (got - want).abs().max().item() <= atol


@pytest.mark.parametrize("index", range(16))
def test_logits_in_one_go(make_runner, golden, index):
    runner = make_runner()
    got = evaluate.last_logits(runner, golden("prompts.json")[index])
    check_logits(got, golden("exact_logits.safetensors")[f"logits_{index}"])


# single rows, chunks across an end of a ratio-128 window, chunks that end with one; 8, 129, 128 and 300 tokens
QUICK_CHUNKS = {(6, 1), (9, 3), (8, 64), (8, 127), (12, 64), (12, 127), (12, 128), (12, 200)}


@pytest.mark.parametrize("index, chunk", [
    pytest.param(index, chunk, marks=() if (index, chunk) in QUICK_CHUNKS else pytest.mark.slow)
    for index in range(16) for chunk in (1, 3, 64, 127, 128, 200)
])  # fmt: skip
def test_logits_in_chunks(make_runner, golden, index, chunk):
    got = evaluate.last_logits(make_runner(), golden("prompts.json")[index], chunk=chunk)
    check_logits(got, golden("exact_logits.safetensors")[f"logits_{index}"])


@pytest.mark.slow
def test_packed_beside_other_requests(make_runner, golden):
    """All prompts up to 300 tokens advance together, in chunks of different sizes; each ends at its own golden."""
    prompts = [p for p in golden("prompts.json") if len(p) <= 300]
    runner = make_runner(num_requests=len(prompts), max_blocks=2)
    sequences = [Sequence(first_block=2 * i, first_page=4 * i, state_slot=i) for i in range(len(prompts))]
    chunks = [(37 * i) % 61 + 1 for i in range(len(prompts))]
    remaining = dict(enumerate(prompts))
    while remaining:
        segments, finished = [], []
        for index, tokens in remaining.items():
            part = tokens[sequences[index].length :][: chunks[index]]
            segments.append(sequences[index].segment(part, (len(part) - 1,)))
            if sequences[index].length == len(tokens):
                finished.append((len(segments) - 1, index))
        logits, _ = runner.run(segments, num_rows=sum(len(s.token_ids) for s in segments) + 3)
        for row, index in finished:
            check_logits(logits[row], golden("exact_logits.safetensors")[f"logits_{index}"])
            del remaining[index]


def test_decode_after_prefill(make_runner, golden):
    """Token by token from a prefill across both ratio-128 boundaries of 256 tokens, a chunk in between."""
    tokens = golden("prompts.json")[11]
    assert len(tokens) == 256
    runner, sequence = make_runner(), Sequence()
    runner.run([sequence.segment(tokens[:120])])
    for token in tokens[120:140]:
        runner.run([sequence.segment([token], (0,))])
    runner.run([sequence.segment(tokens[140:248])])
    for token in tokens[248:]:
        logits, _ = runner.run([sequence.segment([token], (0,))])
    check_logits(logits[-1], golden("exact_logits.safetensors")["logits_11"])


def test_nll_first_windows(make_runner, golden):
    record = golden("exact_nll.json")
    result = evaluate.score(make_runner(), record["tokens"][: 2 * 1024 + 3], window=1024)
    assert len(result.nll_per_window) == 2
    for got, want in zip(result.nll_per_window, record["nll_per_window"]):
        assert abs(got - want) <= 1e-4


@pytest.mark.slow
def test_nll_all_windows(make_runner, golden):
    record = golden("exact_nll.json")
    result = evaluate.score(make_runner(), record["tokens"], window=1024, mtp=True)
    assert len(result.nll_per_window) == record["windows"]
    assert abs(result.nll - record["nll"]) <= 1e-4
    assert abs(result.mtp_nll - record["mtp_nll"]) <= 1e-3


def test_mtp_layers(make_runner, golden):
    recorded = golden("layers_exact.safetensors")
    runner, sequence = make_runner(), Sequence()
    ids = recorded["p40.ids"].tolist()
    _, streams = runner.run([sequence.segment(ids, (len(ids) - 1,))])
    segment = sequence.segment(recorded["p40.mtp.next_ids"].tolist(), range(len(ids)), start=0)
    logits, out = runner.run_draft([segment], streams)
    check_logits(out, recorded["p40.mtp.out_streams"], LAYERS_ATOL)
    check_logits(logits, recorded["p40.mtp.logits"])


SLOW_GREEDY = [pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3)]  # test_engine has all


@pytest.mark.parametrize("index", [0, *SLOW_GREEDY])
def test_greedy(make_runner, golden, index):
    """Equal up to the first step whose recorded top-2 gap would be under 1e-3; no recorded prompt has one."""
    record = golden("exact_greedy.json")[index]
    assert record["min_top2_gap"] >= 1e-3
    runner, sequence = make_runner(), Sequence()
    prompt = record["prompt_ids"]
    logits, _ = runner.run([sequence.segment(prompt, (len(prompt) - 1,))])
    for want in record["continuation"]:
        token = logits[-1].argmax().item()
        assert token == want
        logits, _ = runner.run([sequence.segment([token], (0,))])


@torch.no_grad()
def test_layer_streams_and_selection(make_runner, golden):
    """Residual streams after layers 0, 2, 3 and 6, and what layer 2 computes on the way, on 40 recorded tokens."""
    recorded = golden("layers_exact.safetensors")
    runner = make_runner()
    model, caches = runner.model, runner.caches
    inputs = runner.inputs([Sequence().segment(recorded["p40.ids"].tolist())])

    def streams_after(count: int) -> torch.Tensor:
        streams = model.embed_tokens(inputs.token_ids)
        args = (inputs, caches.layers, caches.load_enabled, caches.load_counts)
        return run_blocks(model.blocks[:count], streams, *args)

    for layer in (0, 2, 3, 6):
        check_logits(streams_after(layer + 1), recorded[f"p40.layer{layer}.out_streams"], LAYERS_ATOL)
    block, cache = model.blocks[2], caches.layers[2]
    x, post, comb = block.attn_site.pre(streams_after(2))
    check_logits(post, recorded["p40.layer2.attn_hc.post"], LAYERS_ATOL)
    check_logits(comb, recorded["p40.layer2.attn_hc.comb"], LAYERS_ATOL)
    block.attn(x, inputs, cache)
    check_logits(cache.entries[0, :10], recorded["p40.layer2.attn.compressed_kv"], LAYERS_ATOL)
    want = recorded["p40.layer2.attn.indexer.score"]
    scores = block.attn.index_scores(x, inputs, cache)
    visible = want.isfinite()
    assert torch.equal(scores[:, :10].isfinite(), visible) and not scores[:, 10:].isfinite().any()
    assert (scores[:, :10][visible] - want[visible]).abs().max() <= LAYERS_ATOL
    picks = block.attn.index_picks(x, inputs, cache)
    assert torch.equal(picks[:, :10], recorded["p40.layer2.attn.indexer.topk"]) and (picks[:, 10:] == -1).all()
