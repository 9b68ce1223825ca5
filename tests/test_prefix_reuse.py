"""A prompt that begins like an earlier one gives the logits it would have given cold, from shared or private pages."""

import pytest
import torch

from dsv4.ops.shapes import BLOCK_TOKENS, WINDOW_PAGE_TOKENS

from .engines import LOGITS_ATOL, greedy, logits_by_position, make_engine, record_steps

NEW = 5


def donor_and_follower(golden, shared: int) -> tuple[list[int], list[int]]:
    """Two prompts with exactly ``shared`` first tokens in common; the follower goes on for 9 tokens."""
    text, other = golden("prompts.json")[15], golden("prompts.json")[14]
    donor = text[: shared + 3]
    follower = text[:shared] + other[400:409]
    assert follower[shared] != donor[shared]
    return donor, follower


def record_drafts(engine) -> list[torch.Tensor]:
    """Logits of every MTP call from now on, in a list that grows."""
    found, run_draft = [], engine.runner.run_draft

    def recorded(segments, streams, **options):
        logits, out = run_draft(segments, streams, **options)
        found.append(logits.clone())
        return logits, out

    engine.runner.run_draft = recorded
    return found


def run_alone(engine, prompt):
    """The completion, the logits of every computed position of the output, and the MTP logits that led to drafts."""
    steps, drafts = record_steps(engine), record_drafts(engine)
    (completion,) = engine.generate([prompt], greedy(NEW))
    return completion, logits_by_position(steps), [logits for logits in drafts if logits.shape[0]]


@pytest.mark.parametrize("shared, draft_tokens", [(255, 2), (256, 0), (256, 2), (257, 0), (257, 2), (513, 0), (513, 2)])
def test_hit_equals_cold(nano_model, golden, shared, draft_tokens):
    donor, follower = donor_and_follower(golden, shared)
    settings = {"draft_tokens": draft_tokens, "max_requests": 1}
    cold, cold_logits, cold_drafts = run_alone(make_engine(nano_model, **settings, prefix_reuse=False), follower)
    engine = make_engine(nano_model, **settings)
    engine.generate([donor], greedy(1))
    hit, hit_logits, hit_drafts = run_alone(engine, follower)
    assert cold.cached_tokens == 0
    assert hit.cached_tokens == shared // BLOCK_TOKENS * BLOCK_TOKENS
    assert hit.token_ids == cold.token_ids
    assert set(hit_logits) == set(cold_logits) and len(follower) - 1 in hit_logits
    for position, want in cold_logits.items():
        assert (hit_logits[position] - want).abs().max().item() <= LOGITS_ATOL
    assert (hit.drafted_tokens, hit.accepted_tokens) == (cold.drafted_tokens, cold.accepted_tokens)
    assert (cold.drafted_tokens > 0) == (draft_tokens > 0)
    for got, want in zip(hit_drafts, cold_drafts, strict=True):
        assert (got - want).abs().max().item() <= LOGITS_ATOL


def cached_node(engine, depth: int):
    (node,) = [node for node in engine.loop.scheduler.prefix.nodes() if node.depth == depth]
    assert node.resumable
    return node


def page_copies(engine, page: int) -> list[torch.Tensor]:
    caches = engine.runner.caches
    return [layer.window[page].clone() for layer in (*caches.layers, *caches.mtp)]


def block_copies(engine, block: int) -> list[torch.Tensor]:
    layers = engine.runner.caches.layers
    return [t[block].clone() for layer in layers for t in (layer.entries, layer.index_entries) if t.shape[0]]


@pytest.mark.parametrize("draft_tokens", [0, 1])
def test_cached_pages_stay_intact(nano_model, golden, draft_tokens):
    """A hit writes nothing to the pages it reuses: with drafts, the MTP row at the boundary goes to a private copy."""
    donor, follower = donor_and_follower(golden, 256)
    engine = make_engine(nano_model, draft_tokens=draft_tokens)
    engine.generate([donor], greedy(1))
    node = cached_node(engine, 1)
    pages, blocks = page_copies(engine, node.window_page), block_copies(engine, node.block)
    assert len(blocks) == 8 and all(t.any() for t in (*pages[: 7 + draft_tokens], *blocks))
    steps = record_steps(engine)
    (hit,) = engine.generate([follower], greedy(NEW))
    assert hit.cached_tokens == 256
    for before, after in ((pages, page_copies(engine, node.window_page)), (blocks, block_copies(engine, node.block))):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    used = steps[0].segments[0]
    assert list(used.blocks)[0] == node.block and used.start == 256
    first, last = used.window_pages[:2]
    assert first == -1, "one page covers the window"
    assert (last == node.window_page) == (draft_tokens == 0)
    if draft_tokens:
        private = page_copies(engine, last)
        *backbone, (mtp_before, mtp_after) = zip(pages, private, strict=True)
        assert all(torch.equal(a, b) for a, b in backbone)
        changed = (mtp_before != mtp_after).any(-1).nonzero().flatten().tolist()
        assert changed == [WINDOW_PAGE_TOKENS - 1], "the row whose next token is another one, and no other"


def test_concurrent_sharing(nano_model, golden):
    """Three prompts share one prefix at once, and a fourth that does not runs beside them."""
    donor, follower = donor_and_follower(golden, 256)
    prompts = [follower, follower[:260], donor[:256] + follower[258:], golden("prompts.json")[6]]
    settings = {"max_requests": 4, "draft_tokens": 1}
    cold = make_engine(nano_model, **settings, prefix_reuse=False).generate(prompts, greedy(NEW))
    engine = make_engine(nano_model, **settings)
    engine.generate([donor], greedy(1))
    steps = record_steps(engine)
    hits = engine.generate(prompts, greedy(NEW))
    assert [c.token_ids for c in hits] == [c.token_ids for c in cold]
    assert [c.cached_tokens for c in hits] == [256, 256, 256, 0]
    assert len(steps[0].segments) == 4
    assert len({segment.blocks[0] for segment in steps[0].segments[:3]}) == 1
    assert engine.generate([follower], greedy(NEW))[0].token_ids == cold[0].token_ids


def test_output_is_reusable(nano_model, golden):
    """Blocks completed while decoding, drafts included, serve the next turn of a conversation."""
    prompt = golden("prompts.json")[14][:250]
    engine = make_engine(nano_model, draft_tokens=3, max_requests=1)
    (first,) = engine.generate([prompt], greedy(12))
    follow_up = prompt + first.token_ids + [54, 89, 1020]
    hit, hit_logits, _ = run_alone(engine, follow_up)
    cold, cold_logits, _ = run_alone(make_engine(nano_model, prefix_reuse=False), follow_up)
    assert hit.cached_tokens == 256
    assert hit.token_ids == cold.token_ids
    for position, want in cold_logits.items():
        assert (hit_logits[position] - want).abs().max().item() <= LOGITS_ATOL


def test_a_chunk_over_several_blocks(nano_model, golden):
    """Only the end of a chunk can be resumed from: rows of the earlier blocks' ends have left the compressor ring."""
    text, tail = golden("prompts.json")[15], golden("prompts.json")[14][400:405]
    engine = make_engine(nano_model, chunk_tokens=512)
    engine.generate([text[:515]], greedy(1))
    fresh = make_engine(nano_model, prefix_reuse=False)
    for shared, cached in ((300, 0), (512, 512)):
        hit, hit_logits, _ = run_alone(engine, text[:shared] + tail)
        _, cold_logits, _ = run_alone(fresh, text[:shared] + tail)
        assert hit.cached_tokens == cached
        for position, want in cold_logits.items():
            assert (hit_logits[position] - want).abs().max().item() <= LOGITS_ATOL


def test_eviction_under_pressure(nano_model, golden):
    """Three prefixes do not fit into three blocks beside a request: the oldest goes, and nothing else goes wrong."""
    text = golden("prompts.json")[15]
    prompts = [text[150 * n : 150 * n + 258] for n in range(3)]
    engine = make_engine(nano_model, num_blocks=3, max_requests=1)
    first = [engine.generate([prompt], greedy(2))[0] for prompt in prompts]
    assert [c.cached_tokens for c in first] == [0, 0, 0]
    assert len(engine.loop.scheduler.prefix) == 2
    again = [engine.generate([prompts[n]], greedy(2))[0] for n in (2, 0)]
    assert [c.cached_tokens for c in again] == [256, 0]
    assert [c.token_ids for c in again] == [first[2].token_ids, first[0].token_ids]
    (cold,) = make_engine(nano_model, prefix_reuse=False).generate(prompts[2:], greedy(2))
    assert cold.token_ids == first[2].token_ids


def test_switched_off(nano_model, golden):
    engine, prompt = make_engine(nano_model, prefix_reuse=False), golden("prompts.json")[12][:258]
    first, second = (engine.generate([prompt], greedy(2))[0] for _ in range(2))
    assert (first.cached_tokens, second.cached_tokens) == (0, 0)
    assert first.token_ids == second.token_ids
    assert len(engine.loop.scheduler.prefix) == 0
