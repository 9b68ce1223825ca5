"""Drafting: the MTP block proposes what it should, and neither right nor wrong drafts change anything else."""

import itertools

import pytest
import torch

from dsv4 import step_loop
from dsv4.drafting import DraftRows, draft
from dsv4.engine import Engine
from dsv4.engine_config import EngineConfig
from dsv4.runner import Sequence

from .engines import greedy, logits_by_position, make_engine, record_steps, recorded_texts
from .tiny_checkpoint import write_tiny

# ---- what is proposed ------------------------------------------------------------------------------------------------


def draft_rows(start, next_tokens, *, pages, num_drafts=1, first_row=0, carried=None, carried_token=0) -> DraftRows:
    return DraftRows(
        first_row=first_row, start=start, next_tokens=next_tokens, window_pages=range(pages), blocks=range(8),
        state_slot=0, carried=carried, carried_token=carried_token, num_drafts=num_drafts,
    )  # fmt: skip


@pytest.mark.parametrize("chunks", [(40,), (1, 13, 26), (39, 1)])
def test_first_draft_equals_recorded(make_runner, golden, chunks):
    """Whatever the steps, the draft after position j is the recorded MTP argmax of row j."""
    recorded = golden("layers_exact.safetensors")
    ids, following = recorded["p40.ids"].tolist(), recorded["p40.mtp.next_ids"].tolist()
    runner, sequence = make_runner(), Sequence()
    for end in itertools.accumulate(chunks):
        start = sequence.length
        _, streams = runner.run([sequence.segment(ids[start:end])])
        proposed = draft(runner, [draft_rows(start, following[start:end], pages=1)], streams)
        assert proposed == [[recorded["p40.mtp.logits"][end - 1].argmax().item()]]


def test_a_carried_row_replaces_the_one_before(make_runner, golden):
    """The row before the step, first written with another next token, is written again with the right one."""
    recorded = golden("layers_exact.safetensors")
    ids, following = recorded["p40.ids"].tolist(), recorded["p40.mtp.next_ids"].tolist()
    runner, sequence = make_runner(), Sequence()
    _, first = runner.run([sequence.segment(ids[:39])])
    wrong = [*following[:38], (following[38] + 1) % 2048]
    draft(runner, [draft_rows(0, wrong, pages=1, num_drafts=0)], first)
    _, streams = runner.run([sequence.segment(ids[39:])])
    window = runner.caches.mtp[0].window[0]
    written = window[38].clone()
    rows = draft_rows(39, following[39:40], pages=1, carried=first[38], carried_token=following[38])
    assert draft(runner, [rows], streams) == [[recorded["p40.mtp.logits"][39].argmax().item()]]
    assert not torch.equal(window[38], written)
    fresh = make_runner()
    _, streams = fresh.run([Sequence().segment(ids)])
    fresh.run_draft([Sequence().segment(following)], streams)
    assert (window[:40] - fresh.caches.mtp[0].window[0, :40]).abs().max().item() <= 2e-4  # as the recorded layers


def test_further_drafts_feed_on_their_own_streams(make_runner, golden):
    """Draft d + 1 is the block's prediction after draft d, computed here with one call per row."""
    ids = golden("prompts.json")[7]  # 127 tokens
    runner, by_hand = make_runner(), make_runner()
    following = [*ids[1:], 54]
    _, streams = runner.run([Sequence().segment(ids)])
    (proposed,) = draft(runner, [draft_rows(0, following, pages=2, num_drafts=4)], streams)
    _, streams = by_hand.run([Sequence().segment(ids)])
    sequence, expected = Sequence(), []
    tokens = following
    for _ in range(4):
        logits, streams = by_hand.run_draft([sequence.segment(tokens, (len(tokens) - 1,))], streams)
        streams = streams[-1:]
        tokens = [logits[0].argmax().item()]
        expected += tokens
    assert proposed == expected and len(set(proposed)) > 1
    written = runner.caches.mtp[0].window.flatten(0, 1)
    assert written[: len(ids) + 3].any(-1).all() and not written[len(ids) + 3 :].any(), "three drafts were fed back"
    assert (written - by_hand.caches.mtp[0].window.flatten(0, 1)).abs().max().item() <= 2e-4  # as the recorded layers


def test_drafts_end_with_the_last_page(make_runner, golden):
    """More drafts than rows left on the last window page: as many as fit, equal to those of a sequence with room."""
    ids = golden("prompts.json")[9]  # 129 tokens
    for length, fitting in ((126, 3), (127, 2), (128, 1)):
        runner = make_runner()
        _, streams = runner.run([Sequence().segment(ids[:length])])
        rows = [draft_rows(0, ids[1 : length + 1], pages=pages, num_drafts=7) for pages in (2, 1)]
        roomy, cut = (draft(runner, [each], streams)[0] for each in rows)
        assert len(roomy) == 7 and cut == roomy[:fitting]


def test_requests_drafted_together(make_runner, golden):
    """A prompt within its prefill, one that drafts twice and one that drafts once: as if each were alone."""
    prompts = [golden("prompts.json")[index] for index in (6, 5, 4)]
    num_drafts = (0, 2, 1)

    def proposals(chosen):
        runner = make_runner(num_requests=3)
        sequences = [Sequence(first_block=8 * n, first_page=16 * n, state_slot=n) for n in range(len(chosen))]
        _, streams = runner.run([s.segment(prompts[n]) for s, n in zip(sequences, chosen, strict=True)])
        rows, first = [], 0
        for sequence, n in zip(sequences, chosen, strict=True):
            placed = sequence.segment([], start=sequence.length)
            rows.append(
                DraftRows(
                    first_row=first, start=0, next_tokens=[*prompts[n][1:], 20], window_pages=placed.window_pages,
                    blocks=placed.blocks, state_slot=placed.state_slot, carried=None, carried_token=0,
                    num_drafts=num_drafts[n],
                )
            )  # fmt: skip
            first += len(prompts[n])
        return draft(runner, rows, streams)

    together = proposals((0, 1, 2))
    assert [len(tokens) for tokens in together] == list(num_drafts)
    assert together == [proposals((n,))[0] for n in range(3)]


def test_a_model_without_mtp_refuses_drafts(tmp_path):
    path = write_tiny(tmp_path / "tiny", num_nextn_predict_layers=0)
    with pytest.raises(ValueError, match="draft_tokens must be 0 for a model without an MTP block, got 2"):
        Engine.from_checkpoint(path, EngineConfig(compile="off", max_seq_len=64, draft_tokens=2), progress=False)
    engine = Engine.from_checkpoint(path, EngineConfig(compile="off", max_seq_len=64), progress=False)
    assert engine.tokenizer is None
    assert "needs a tokenizer.json" in engine.generate(["text"], greedy(1))[0].error
    completion = engine.generate([[5, 7, 60]], greedy(4))[0]
    assert len(completion.token_ids) == 4 and completion.text == ""


# ---- what it changes: nothing ----------------------------------------------------------------------------------------


def test_greedy_with_drafts_equals_recorded(nano_model, golden):
    texts = recorded_texts(golden)
    engine = make_engine(nano_model, draft_tokens=3)
    completions, stats = engine.generate_with_stats([t.prompt for t in texts], greedy(48))
    assert [c.token_ids for c in completions] == [t.continuation for t in texts]
    assert sum(c.accepted_tokens for c in completions) == stats.accepted_tokens
    assert sum(c.drafted_tokens for c in completions) == stats.drafted_tokens
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert stats.acceptance_rate == stats.accepted_tokens / stats.drafted_tokens
    assert stats.generated_tokens == 4 * 48
    assert stats.rows == sum(len(t.prompt) for t in texts) + 4 * 47 + stats.drafted_tokens - stats.accepted_tokens
    assert stats.steps == 1 + max(47 - c.accepted_tokens for c in completions)


def expected_acceptance(runner, text, new: int) -> tuple[int, int]:
    """Drafted and accepted tokens with one draft per step, from the MTP argmax of every row of the finished text."""
    tokens = text.prompt + text.continuation[:new]
    _, streams = runner.run([Sequence().segment(tokens[:-1])])
    logits, _ = runner.run_draft([Sequence().segment(tokens[1:], range(len(tokens) - 1))], streams)
    predicted = logits.argmax(-1).tolist()  # predicted[j] is the guess for token j + 2
    computed, drafted, accepted = len(text.prompt), 0, 0  # the token after the computed ones is known
    while computed < len(tokens) - 1:
        guess = computed + 1 < len(tokens) - 1  # the last token is never drafted: no row would follow it
        right = guess and predicted[computed - 1] == tokens[computed + 1]
        drafted, accepted = drafted + guess, accepted + right
        computed += 1 + right
    return drafted, accepted


def test_acceptance_equals_the_blocks_own_predictions(nano_model, make_runner, golden):
    texts = [recorded_texts(golden)[n].split(known) for n, known in ((1, 0), (3, 5))]
    engine = make_engine(nano_model, draft_tokens=1, chunk_tokens=9)
    completions = engine.generate([t.prompt for t in texts], greedy(25))
    for text, completion in zip(texts, completions, strict=True):
        assert completion.token_ids == text.continuation[:25]
        found = completion.drafted_tokens, completion.accepted_tokens
        assert found == expected_acceptance(make_runner(), text, 25) and found[1] > 0


@pytest.mark.slow
def test_long_texts_with_drafts(nano_model, golden):
    """Across the boundaries at 128 and 256 tokens, with as many drafts as there may be."""
    prompts = [golden("prompts.json")[8][:119], golden("prompts.json")[11][:247]]
    outputs = [
        [c.token_ids for c in make_engine(nano_model, draft_tokens=n, max_requests=2).generate(prompts, greedy(18))]
        for n in (0, 7)
    ]
    assert outputs[0] == outputs[1]
    full = make_engine(nano_model, draft_tokens=7, max_requests=1, max_seq_len=256)  # no page beyond the last token
    assert full.generate(prompts[1:], greedy(9))[0].token_ids == outputs[0][1][:9]


def test_a_stop_token_among_accepted_drafts(nano_model, golden, monkeypatch):
    """Right drafts beyond the end of an output are neither in it nor counted."""
    text = recorded_texts(golden)[3]
    stop = next(n for n in range(2, 48) if text.continuation[n] not in text.continuation[:n])
    plant_drafts(monkeypatch, text.prompt + text.continuation, itertools.repeat(7))
    engine = make_engine(nano_model, draft_tokens=7)
    params = greedy(20, stop_token_ids=(text.continuation[stop],))
    completions, stats = engine.generate_with_stats([text.prompt], params)
    assert completions[0].token_ids == text.continuation[: stop + 1]
    assert completions[0].finish_reason == "stop" and completions[0].accepted_tokens == stop
    assert stats.accepted_tokens == stop and stats.steps == 1 + -(-stop // 8)


def plant_drafts(monkeypatch, tokens, num_right) -> None:
    """After each step propose the next ``num_right`` of ``tokens``, then wrong ones; the MTP block still runs."""

    def planted(runner, rows, streams):
        real = draft(runner, rows, streams)
        (only,) = rows
        if not only.num_drafts:
            return real
        right, following = next(num_right), [*tokens[only.end + 1 :], *[0] * 8]
        return [[t if n < right else (t + 1) % 2048 for n, t in enumerate(following[: only.num_drafts])]]

    monkeypatch.setattr(step_loop, "draft", planted)


def future_state(engine, segment, length: int) -> dict[str, torch.Tensor]:
    """Everything in the caches that a row at position ``length`` or later can read."""
    caches, found = engine.runner.caches, {}
    window = range(max(length - 128, 0), length)
    for index, layer in enumerate(caches.layers):
        ratio = {64: 4, 2: 128}.get(layer.entries.shape[1], 0) if layer.entries.shape[0] else 0
        found[f"window {index}"] = torch.stack([layer.window[segment.window_pages[p // 128], p % 128] for p in window])
        if not ratio:
            continue
        needed = range(max(length // 4 * 4 - 4, 0) if ratio == 4 else length // 128 * 128, length)
        for name, entries, state in (
            ("", layer.entries, layer.state), ("index ", layer.index_entries, layer.index_state),
        ):  # fmt: skip
            if entries.shape[0]:
                rows = [entries[segment.blocks[w * ratio // 256], w % (256 // ratio)] for w in range(length // ratio)]
                found[f"{name}entries {index}"] = torch.stack(rows) if rows else entries[:0]
                kept = [state[segment.state_slot, p % state.shape[1]] for p in needed]
                found[f"{name}state {index}"] = torch.stack(kept) if kept else state[:0, 0]
    return found


NONE_RIGHT, SOME_RIGHT = "none right", "some right"


@pytest.mark.parametrize(
    "length, num_drafts, pattern, new",
    [
        (119, 3, NONE_RIGHT, 16),
        (122, 7, SOME_RIGHT, 16),
        pytest.param(121, 1, NONE_RIGHT, 132, marks=pytest.mark.slow),  # a rejection at every phase mod 128
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            (119, 1, NONE_RIGHT, 16), (121, 2, SOME_RIGHT, 16), (122, 7, NONE_RIGHT, 16), (249, 3, NONE_RIGHT, 16),
            (249, 3, SOME_RIGHT, 16), (250, 6, SOME_RIGHT, 16),
        )),
    ],
)  # fmt: skip
def test_rejected_drafts_leave_no_trace(nano_model, golden, monkeypatch, length, num_drafts, pattern, new):
    """On both sides of 128 and 256: after every row all drafts wrong, or in turn 0, 1, 2, … of them right.

    In deterministic mode every logit, and whatever the future can read of the caches, is bitwise that of a run
    without drafts.
    """
    prompt = golden("prompts.json")[11][:length]
    settings = {"deterministic": True, "max_requests": 1, "max_seq_len": 512}
    plain = make_engine(nano_model, **settings)
    plain_steps = record_steps(plain)
    (expected,) = plain.generate([prompt], greedy(new))
    assert len(expected.token_ids) == new and length + new > (length // 128 + 1) * 128

    engine = make_engine(nano_model, draft_tokens=num_drafts, **settings)
    num_right = itertools.repeat(0) if pattern == NONE_RIGHT else itertools.cycle(range(num_drafts))
    plant_drafts(monkeypatch, prompt + expected.token_ids, num_right)
    steps = record_steps(engine)
    (completion,) = engine.generate([prompt], greedy(new))
    assert completion.token_ids == expected.token_ids
    assert completion.drafted_tokens - completion.accepted_tokens >= num_drafts
    if pattern == NONE_RIGHT:
        assert completion.accepted_tokens == 0 and len(steps) == new, "every position starts a step"
    else:
        assert completion.accepted_tokens > 0

    got_logits = logits_by_position(steps)
    for position, want in logits_by_position(plain_steps).items():
        assert torch.equal(got_logits[position], want), position
    want_state = future_state(plain, plain_steps[-1].segments[0], length + new - 1)
    got_state = future_state(engine, steps[-1].segments[0], length + new - 1)
    assert len(want_state) == 23, "7 windows; entries and state of 2 ratio-128 layers; both kinds of 3 ratio-4 layers"
    for key, want in want_state.items():
        assert want.numel() and torch.equal(got_state[key], want), key


@pytest.mark.slow
def test_official_numerics(nano_model, make_runner, golden):
    """FP8 caches, drafts, and a reused prefix: deterministic mode makes them equal to a plain loop, bitwise."""
    settings = {"deterministic": True, "cache_storage": "fp8", "max_seq_len": 512, "max_requests": 1}
    engine = make_engine(nano_model, "official", draft_tokens=2, **settings)
    steps = record_steps(engine)
    prompt = recorded_texts(golden)[3].prompt
    (completion,) = engine.generate([prompt], greedy(6))
    assert completion.drafted_tokens > 0
    got = logits_by_position(steps)
    runner, sequence = make_runner("official", deterministic=True, storage="fp8"), Sequence()
    tokens = prompt
    for position, token in enumerate(completion.token_ids, start=len(prompt) - 1):
        logits, _ = runner.run([sequence.segment(tokens, (len(tokens) - 1,))])
        assert torch.equal(got[position], logits[0]) and logits[0].argmax().item() == token
        tokens = [token]

    long = golden("prompts.json")[12][:260]
    outputs = []
    for cached in (0, 256):
        steps.clear()
        (completion,) = engine.generate([long], greedy(2))
        assert completion.cached_tokens == cached
        outputs.append((completion.token_ids, logits_by_position(steps)))
    (cold, cold_logits), (hit, hit_logits) = outputs
    assert hit == cold and {259, 260} <= hit_logits.keys()
    assert all(torch.equal(hit_logits[position], cold_logits[position]) for position in (259, 260))
