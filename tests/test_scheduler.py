"""The scheduler against the simulated engine of ``simulated_engine.py``."""

import subprocess
import sys

import pytest
from hypothesis import given, settings, strategies as st

from .simulated_engine import EOS, Engine, expected_output, prompt_of, request_of

# ---- any load finishes with the right output -------------------------------------------------------------------------

loads = st.lists(
    st.tuples(
        st.integers(0, 2),  # family: requests of a family share the beginning of their prompts
        st.integers(1, 620),  # prompt tokens from the family
        st.integers(0, 40),  # prompt tokens of its own
        st.integers(1, 40),  # max_new_tokens
        st.booleans(),  # ignore_eos
        st.integers(0, 25),  # steps after which it arrives
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=60, deadline=None)
@given(
    loads,
    st.integers(1, 4),
    st.integers(0, 300),
    st.integers(1, 300),
    st.integers(3, 9),
    st.integers(2, 12),
    st.booleans(),
    st.booleans(),
    st.integers(0, 4),
)
def test_every_request_finishes(
    load, max_requests, extra, chunk, num_blocks, num_pages, prefix_reuse, private_page, num_drafts
):
    engine = Engine(
        token_budget=max_requests + extra,
        max_requests=max_requests,
        chunk_tokens=chunk,
        num_blocks=num_blocks,
        num_window_pages=num_pages,
        prefix_reuse=prefix_reuse,
        private_page=private_page,
        num_drafts=num_drafts,
    )
    arrivals = []
    for number, (family, shared, own, new, ignore_eos, after) in enumerate(load):
        prompt = prompt_of(shared, family) + prompt_of(own, 100 + number)
        arrivals.append((after, request_of(str(number), prompt, max_new_tokens=new, ignore_eos=ignore_eos)))
    pending = sorted(arrivals, key=lambda arrival: arrival[0])
    while pending or engine.scheduler.has_work:
        while pending and (pending[0][0] <= len(engine.plans) or not engine.scheduler.has_work):
            engine.scheduler.add(pending.pop(0)[1])
        engine.step()
        assert len(engine.plans) < 20_000
    for _, request in arrivals:
        assert request.generated == expected_output(request.prompt_ids, request.params)
        assert request.state == "finished" and request.finish_reason in ("stop", "length")
    scheduler = engine.scheduler
    scheduler.prefix.evict(num_blocks)
    assert (scheduler.blocks.num_free, scheduler.window_pages.num_free) == (num_blocks, num_pages)


# ---- rules -----------------------------------------------------------------------------------------------------------


def test_scheduling_needs_no_torch():
    subprocess.run([sys.executable, "-c", "import sys, dsv4.scheduler; sys.exit('torch' in sys.modules)"], check=True)


def test_decode_rows_come_first_and_chunks_fill_the_budget():
    engine = Engine(token_budget=40, chunk_tokens=30, prefix_reuse=False)
    first, second, third = (request_of(n, prompt_of(50, i), ignore_eos=True) for i, n in enumerate("abc"))
    engine.scheduler.add(first)
    sizes = [[len(entry.token_ids) for entry in engine.step().entries] for _ in range(2)]
    assert sizes == [[30], [20]] and first.decoding
    engine.scheduler.add(second)
    engine.scheduler.add(third)
    plan = engine.step()
    assert [(e.request.id, len(e.token_ids)) for e in plan.entries] == [("a", 1), ("b", 30), ("c", 9)]
    assert [e.logit_offsets for e in plan.entries] == [(0,), (), ()]
    assert [(e.request.id, e.start) for e in engine.step().entries] == [("a", 51), ("b", 30), ("c", 9)]


@pytest.mark.parametrize(("prefix_reuse", "starts"), [(True, [0, 256, 512, 768]), (False, [0, 300, 600])])
def test_chunks_end_on_block_boundaries_when_prefixes_are_reused(prefix_reuse, starts):
    engine = Engine(token_budget=300, chunk_tokens=300, prefix_reuse=prefix_reuse)
    engine.scheduler.add(request_of("a", prompt_of(800), max_new_tokens=1))
    engine.run()
    assert [plan.entries[0].start for plan in engine.plans] == starts


def test_a_prompt_resumes_from_a_cached_prefix():
    engine = Engine(token_budget=512, chunk_tokens=512)
    long = prompt_of(600)
    first, second = request_of("a", long), request_of("b", long[:520] + prompt_of(30, 7))
    engine.scheduler.add(first)
    engine.run()
    engine.scheduler.add(second)
    plan = engine.step()
    assert second.cached_tokens == 512 and first.cached_tokens == 0
    assert plan.entries[0].start == 512 and sorted(plan.entries[0].restore) == [508, 509, 510, 511]
    engine.run()
    assert engine.plans[-1].entries[0].restore is None
    assert second.generated == expected_output(second.prompt_ids, second.params)


def test_the_last_page_of_a_reused_prefix_can_be_private():
    engine = Engine(token_budget=512, chunk_tokens=512, private_page=True)
    for name, suffix in (("a", 3), ("b", 4), ("c", 5)):
        prompt = prompt_of(512) + prompt_of(60, suffix)
        engine.scheduler.add(request_of(name, prompt, max_new_tokens=2, ignore_eos=True))
    engine.run()
    resumed = [entry.request.id for plan in engine.plans for entry in plan.entries if entry.restore]
    assert resumed == ["b", "c"]


def test_text_computed_twice_is_kept_once():
    engine = Engine(token_budget=512, chunk_tokens=256)
    for name in "ab":
        engine.scheduler.add(request_of(name, prompt_of(300)))
    engine.step()
    first, second = engine.scheduler.running
    assert first.block_ids == second.block_ids and first.node is second.node
    assert engine.scheduler.blocks.num_free == 63
    engine.run()


def test_pages_out_preempts_the_youngest():
    engine = Engine(num_blocks=3, max_requests=2, prefix_reuse=False, token_budget=300, chunk_tokens=256)
    old = request_of("old", prompt_of(250, 1), max_new_tokens=300, ignore_eos=True)
    young = request_of("young", prompt_of(250, 2), max_new_tokens=300, ignore_eos=True)
    engine.scheduler.add(old)
    engine.scheduler.add(young)
    engine.run()
    assert old.num_preemptions == 0 and young.num_preemptions > 0
    assert [r.id for plan in engine.plans for r in plan.preempted] == ["young"] * young.num_preemptions
    assert young.generated == expected_output(young.prompt_ids, young.params) and len(young.generated) == 300


def test_a_request_waits_until_its_text_fits_beside_the_running_ones():
    engine = Engine(num_blocks=4, max_requests=2, prefix_reuse=False, token_budget=600, chunk_tokens=600)
    first, second = (request_of(name, prompt_of(500, ord(name)), max_new_tokens=8) for name in "ab")
    engine.scheduler.add(first)
    engine.scheduler.add(second)
    engine.step()
    assert second.state == "waiting"  # its 2 blocks and one more for the running request exceed the 2 free ones
    engine.run()
    assert second.num_preemptions == 0 and second.state == "finished"


def test_own_blocks_found_after_preemption_are_not_reported_as_cached():
    engine = Engine(num_blocks=4, max_requests=2, token_budget=600, chunk_tokens=600)
    old = request_of("old", prompt_of(250, 1), max_new_tokens=400, ignore_eos=True)
    young = request_of("young", prompt_of(400, 2), max_new_tokens=200, ignore_eos=True)
    engine.scheduler.add(old)
    engine.scheduler.add(young)
    engine.run()
    assert young.num_preemptions > 0 and young.cached_tokens == 0
    assert any(entry.restore for plan in engine.plans for entry in plan.entries if entry.request is young)


def test_a_preempted_request_goes_before_younger_ones():
    engine = Engine(num_blocks=3, max_requests=2, prefix_reuse=False, token_budget=300, chunk_tokens=256)
    for name in "abc":
        engine.scheduler.add(request_of(name, prompt_of(250, ord(name)), max_new_tokens=270, ignore_eos=True))
    while not any(plan.preempted for plan in engine.plans):
        engine.step()
    assert [request.id for request in engine.scheduler.waiting] == ["b", "c"]
    engine.run()


def test_drafts_are_verified_and_bounded():
    engine = Engine(prefix_reuse=False)
    scheduler = engine.scheduler
    request = request_of("a", prompt_of(5), max_new_tokens=6, ignore_eos=True)
    scheduler.add(request)
    engine.step()
    scheduler.propose(request, [7, 8, 9])
    (entry,) = scheduler.schedule().entries
    assert (entry.start, entry.num_drafts, entry.logit_offsets) == (5, 3, (0, 1, 2, 3))
    assert entry.token_ids == (request.generated[0], 7, 8, 9)
    scheduler.commit(request, 30, 2)
    assert request.generated[1:] == [7, 8, 30] and request.num_computed == 8
    scheduler.propose(request, [1, 2, 3, 4])
    (entry,) = scheduler.schedule().entries
    assert entry.num_drafts == 1  # with the token after it, the sixth
    scheduler.commit(request, 31, 1)
    assert (request.finish_reason, request.generated[4:]) == ("length", [1, 31])


def test_drafts_leave_half_the_budget_to_prefills():
    engine = Engine(prefix_reuse=False, token_budget=16, max_requests=2)
    decoding = request_of("a", prompt_of(5), max_new_tokens=100, ignore_eos=True)
    engine.scheduler.add(decoding)
    engine.step()
    engine.scheduler.add(request_of("b", prompt_of(500, 1)))
    engine.scheduler.propose(decoding, [1] * 40)
    assert [len(entry.token_ids) for entry in engine.scheduler.schedule().entries] == [8, 8]


def test_a_stop_among_accepted_drafts_ends_the_output():
    engine = Engine(prefix_reuse=False)
    scheduler, request = engine.scheduler, request_of("a", [5], max_new_tokens=20, stop_token_ids=(9,), ignore_eos=True)
    scheduler.add(request)
    scheduler.schedule()
    scheduler.commit(request, 3)
    scheduler.propose(request, [4, 9, 6])
    scheduler.schedule()
    scheduler.commit(request, 7, 3)
    assert (request.generated, request.finish_reason) == ([3, 4, 9], "stop")
    assert not scheduler.has_work and scheduler.blocks.num_free == 64


def test_accepted_drafts_after_a_stop_do_not_count_as_cached_text():
    engine = Engine(token_budget=512, chunk_tokens=512)
    scheduler, request = engine.scheduler, request_of("a", prompt_of(509), max_new_tokens=9, stop_token_ids=(77,))
    scheduler.add(request)
    while not request.decoding:
        engine.step()
    scheduler.propose(request, [77, 6, 6])  # the stop is token 510, the last draft token 512
    scheduler.schedule()
    scheduler.commit(request, 7, 3)
    assert (request.finish_reason, request.num_computed, len(scheduler.prefix)) == ("stop", 511, 1)


def test_end_of_sentence():
    for ignore, reason in ((False, "stop"), (True, "length")):
        scheduler = Engine().scheduler
        request = request_of("a", [5], max_new_tokens=2, ignore_eos=ignore)
        scheduler.add(request)
        while scheduler.has_work:
            scheduler.schedule()
            scheduler.commit(request, EOS)
        assert (request.finish_reason, len(request.generated)) == (reason, 1 + ignore)


def test_abort_frees_everything():
    engine = Engine(max_requests=1)
    running, waiting = request_of("a", prompt_of(300)), request_of("b", prompt_of(3))
    engine.scheduler.add(running)
    engine.scheduler.add(waiting)
    engine.step()
    engine.scheduler.abort(waiting)
    engine.scheduler.abort(running)
    assert not engine.scheduler.has_work and engine.scheduler.window_pages.num_free == 64
    assert {running.finish_reason, waiting.finish_reason} == {"aborted"}
    with pytest.raises(ValueError, match="a request must be unfinished and between steps to be aborted, got 'a'"):
        engine.scheduler.abort(running)


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [
        ([], 4, "request 'x': prompt must have at least 1 token, got 0"),
        ([1] * 500, 13, r"request 'x': prompt and max_new_tokens must be at most 512 tokens together, got 500 \+ 13"),
    ],
)
def test_a_refused_request_does_not_disturb_others(prompt, new, message):
    engine = Engine(num_blocks=2)
    other = request_of("other", prompt_of(500), max_new_tokens=12)
    engine.scheduler.add(other)
    engine.step()
    with pytest.raises(ValueError, match=message):
        engine.scheduler.add(request_of("x", prompt, max_new_tokens=new))
    engine.run()
    assert other.generated == expected_output(other.prompt_ids, other.params)


def test_wrong_calls():
    engine = Engine(num_drafts=0)
    scheduler, request = engine.scheduler, request_of("a", prompt_of(70))
    scheduler.add(request)
    with pytest.raises(ValueError, match="request 'a' must be new to be added, got a waiting one"):
        scheduler.add(request)
    with pytest.raises(ValueError, match="request id must be unique among unfinished requests, got 'a'"):
        scheduler.add(request_of("a", [1]))
    with pytest.raises(ValueError, match="drafts must be for a decoding request between steps, got 'a'"):
        scheduler.propose(request, [1])
    scheduler.schedule()
    with pytest.raises(ValueError, match=r"every entry of the last plan must be committed first, got \['a'\] left"):
        scheduler.schedule()
    with pytest.raises(ValueError, match="request 'a': token must be None after rows without logits, got 3"):
        scheduler.commit(request, 3)
    with pytest.raises(ValueError, match=r"request 'a': num_accepted must be in \[0, 0\], got 1"):
        scheduler.commit(request, None, 1)
    scheduler.commit(request)
    with pytest.raises(ValueError, match="a committed request must be in the last plan, got 'a'"):
        scheduler.commit(request)
    scheduler.schedule()
    with pytest.raises(ValueError, match="request 'a': token must be given after rows with logits, got None"):
        scheduler.commit(request)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_requests", 0, "max_requests must be at least 1, got 0"),
        ("token_budget", 3, "token_budget must be at least 4, got 3"),
        ("chunk_tokens", 0, "chunk_tokens must be at least 1, got 0"),
        ("max_length", 1, "max_length must be at least 2, got 1"),
        ("num_blocks", 0, "num_blocks must be at least 1, got 0"),
        ("num_window_pages", 1, "num_window_pages must be at least 2, got 1"),
        ("window", 0, "window must be at least 1, got 0"),
        ("window", 129, "window must be at most 128 with prefix reuse, got 129"),
    ],
)
def test_wrong_settings(field, value, message):
    with pytest.raises(ValueError, match=message):
        Engine(**{field: value})


@pytest.mark.parametrize("window", [1, 100, 300])
def test_other_windows(window):
    engine = Engine(window=window, num_window_pages=5, prefix_reuse=False, token_budget=200, chunk_tokens=150)
    requests = [request_of(str(seed), prompt_of(400, seed), max_new_tokens=150, ignore_eos=True) for seed in range(2)]
    for request in requests:
        engine.scheduler.add(request)
    engine.run()
    assert all(request.generated == expected_output(request.prompt_ids, request.params) for request in requests)
