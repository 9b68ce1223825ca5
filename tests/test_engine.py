"""The engine on the nano checkpoint: batches, limits, events, sampling, refusals, and use after failures."""

import json
import re

import pytest

from dsv4 import evaluate
from dsv4.chat import encode_messages
from dsv4.engine import Engine
from dsv4.engine_config import EngineConfig
from dsv4.sampling import SamplingParams

from .conftest import NANO
from .engines import LOGITS_ATOL, greedy, make_engine, record_preemptions, record_steps, recorded_texts


def tokens_of(completions) -> list[list[int]]:
    assert [c.error for c in completions] == [None] * len(completions)
    return [c.token_ids for c in completions]


# ---- batches and limits ----------------------------------------------------------------------------------------------


def test_greedy_batch_equals_recorded(nano_model, golden):
    engine, records = make_engine(nano_model), golden("exact_greedy.json")
    completions, stats = engine.generate_with_stats([r["prompt_ids"] for r in records], greedy(48))
    assert tokens_of(completions) == [r["continuation"] for r in records]
    assert [c.text for c in completions] == [r["text"].removeprefix(r["prompt"]) for r in records]
    assert [(c.finish_reason, c.prompt_tokens, c.cached_tokens) for c in completions] == [
        ("length", len(r["prompt_ids"]), 0) for r in records
    ]
    assert stats.steps == 48  # one prefill step for all, then one row of each
    assert stats.rows == sum(len(r["prompt_ids"]) for r in records) + 47 * 4
    assert (stats.generated_tokens, stats.drafted_tokens, stats.acceptance_rate) == (48 * 4, 0, None)
    assert stats.seconds > 0 and stats.tokens_per_second == stats.generated_tokens / stats.seconds


def test_more_prompts_than_requests(nano_model, golden):
    """Eleven prompts of different lengths and limits share two slots, and state of earlier ones, without a trace."""
    engine = make_engine(nano_model, max_requests=2, token_budget=12, chunk_tokens=5)
    steps = record_steps(engine)
    texts = [text.split(known) for known in (0, 29, 8) for text in recorded_texts(golden)][:11]
    limits = [1 + 3 * n % 7 for n in range(len(texts))]
    completions = engine.generate([t.prompt for t in texts], [greedy(limit) for limit in limits])
    assert tokens_of(completions) == [t.continuation[:limit] for t, limit in zip(texts, limits, strict=True)]
    assert max(len(step.segments) for step in steps) == 2
    assert max(step.num_rows for step in steps) == 10  # two chunks of five
    assert any({len(s.token_ids) for s in step.segments} == {1, 5} for step in steps), "prefill beside decode"


@pytest.mark.parametrize("chunk, budget", [(13, 1024), (100, 1024), (256, 33)])
def test_chunked_prefill(nano_model, golden, chunk, budget):
    engine = make_engine(nano_model, chunk_tokens=chunk, token_budget=budget)
    steps = record_steps(engine)
    prompts = [golden("prompts.json")[index] for index in (12, 4)]  # 300 and 5 tokens
    wanted = [golden("exact_logits.safetensors")[f"logits_{index}"] for index in (12, 4)]
    completions = engine.generate(prompts, greedy(1))
    assert tokens_of(completions) == [[want.argmax().item()] for want in wanted]
    last = {s.start + len(s.token_ids): step.logits for step in steps for s in step.segments if s.logit_offsets}
    assert set(last) == {300, 5}
    for prompt, want in zip(prompts, wanted, strict=True):
        assert (last[len(prompt)][-1] - want).abs().max().item() <= LOGITS_ATOL
    assert max(len(s.token_ids) for step in steps for s in step.segments) == min(chunk, budget)
    assert max(step.num_rows for step in steps) <= budget


def test_limits_of_each_request(nano_model, golden):
    """Length, a stop token, and a stop token that never comes, each on its own request."""
    engine, (first, second, *_) = make_engine(nano_model), recorded_texts(golden)
    assert first.continuation.index(first.continuation[3]) == 0, "a stop token ends the output where it first appears"
    stop = second.continuation[4]
    assert stop not in second.continuation[:4]
    unused = next(token for token in range(7, 2048) if token not in second.continuation)
    completions = engine.generate(
        [first.prompt, second.prompt, second.prompt, first.prompt],
        [greedy(6), greedy(20, stop_token_ids=(unused, stop)), greedy(7, stop_token_ids=(unused,)),
         greedy(9, stop_token_ids=(first.continuation[3],))],
    )  # fmt: skip
    assert tokens_of(completions) == [
        first.continuation[:6], second.continuation[:5], second.continuation[:7], first.continuation[:1]
    ]  # fmt: skip
    assert [c.finish_reason for c in completions] == ["length", "stop", "length", "stop"]


@pytest.fixture(scope="module")
def nano_with_eos(golden, tmp_path_factory):
    """``nano_with_eos(token)``: the nano checkpoint with another end-of-sentence id."""

    def make(token: int):
        directory = tmp_path_factory.mktemp("nano_eos")
        for path in NANO.iterdir():
            (directory / path.name).symlink_to(path)
        config = json.loads((NANO / "config.json").read_text()) | {"eos_token_id": token}
        (directory / "config.json").unlink()
        (directory / "config.json").write_text(json.dumps(config))
        return directory

    return make


def test_end_of_sentence(nano_with_eos, golden):
    text = recorded_texts(golden)[1]
    eos = text.continuation[5]
    assert eos not in text.continuation[:5]
    settings = EngineConfig(compile="off", max_seq_len=256, draft_tokens=2)
    engine = Engine.from_checkpoint(nano_with_eos(eos), settings, progress=False)
    ended, ignored = engine.generate([text.prompt] * 2, [greedy(12), greedy(12, ignore_eos=True)])
    assert (ended.token_ids, ended.finish_reason) == (text.continuation[:6], "stop")
    assert (ignored.token_ids, ignored.finish_reason) == (text.continuation[:12], "length")
    assert engine.timings.load_seconds > 0 and engine.compile_reports == {}


# ---- events ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_events_concatenate_to_the_text(nano_model, golden, draft_tokens):
    """Also for random ids, most of which are no whole characters, and with several tokens committed in a step."""
    engine = make_engine(nano_model, draft_tokens=draft_tokens)
    texts = recorded_texts(golden)
    prompts = [texts[n].prompt for n in (0, 0, 1, 2)]
    params = [
        *(SamplingParams(temperature=50.0, seed=seed, max_new_tokens=14) for seed in (8, 0)),
        greedy(12),
        greedy(12, stop_token_ids=(texts[2].continuation[8],)),
    ]
    events = list(engine.stream(prompts, params))
    called: list = []
    completions = engine.generate(prompts, params, on_token=called.append)
    assert called == events
    for index, completion in enumerate(completions):
        own = [event for event in events if event.prompt_idx == index]
        assert [event.token_id for event in own] == completion.token_ids
        assert "".join(event.text for event in own) == completion.text
        assert completion.text == engine.tokenizer.decode(completion.token_ids)
        assert [event.finish_reason for event in own] == [None] * (len(own) - 1) + [completion.finish_reason]
    assert completions[0].text.endswith("\ufffd"), "seed 8 ends within a character"
    assert "" in [event.text for event in events if event.prompt_idx == 1], "seed 0 has an unfinished character"
    assert [c.finish_reason for c in completions] == ["length", "length", "length", "stop"]


# ---- prompts ---------------------------------------------------------------------------------------------------------


def test_text_prompts(nano_model, golden):
    """BOS is prepended unless the text spells it."""
    engine, record = make_engine(nano_model), golden("exact_greedy.json")[1]
    assert record["prompt_ids"][0] == engine.tokenizer.bos_id
    bos = engine.tokenizer.decode([engine.tokenizer.bos_id], skip_special=False)
    completions = engine.generate([record["prompt"], bos + record["prompt"]], greedy(8))
    assert tokens_of(completions) == [record["continuation"][:8]] * 2
    assert [c.prompt_tokens for c in completions] == [len(record["prompt_ids"])] * 2


def test_chat_prompts(nano_model):
    engine = make_engine(nano_model)
    text = encode_messages([{"role": "user", "content": "Who begat Isaac?"}], thinking=False)
    steps = record_steps(engine)
    (completion,) = engine.generate([text], greedy(4))
    ids = list(steps[0].segments[0].token_ids)
    assert ids == engine.tokenizer.encode(text) and ids.count(engine.tokenizer.bos_id) == 1
    assert completion.prompt_tokens == len(ids) and len(completion.token_ids) == 4


def test_bad_prompts_do_not_disturb_others(nano_model, golden):
    engine, text = make_engine(nano_model, max_seq_len=300), recorded_texts(golden)[3]
    good = (text.prompt, greedy(6))
    batch = [
        good,
        ([], greedy(6)),
        ([5, 2048], greedy(6)),
        ([5, -1], greedy(6)),
        ([True, 5], greedy(6)),
        ([3] * 301, greedy(1)),
        good,
        ([3] * 290, greedy(11)),
        ("", greedy(6)),
        (7, greedy(6)),
        ([5], greedy(6, stop_token_ids=(2048,))),
        good,
    ]
    rules = {
        1: "prompt must have at least 1 token, got 0",
        2: "prompt: token id at index 1 must be an integer in [0, 2048), got 2048",
        3: "prompt: token id at index 1 must be an integer in [0, 2048), got -1",
        4: "prompt: token id at index 0 must be an integer in [0, 2048), got True",
        5: "prompt and max_new_tokens must be at most 300 tokens together, got 301 + 1",
        7: "prompt and max_new_tokens must be at most 300 tokens together, got 290 + 11",
        8: "prompt must have at least 1 character, got an empty text",
        9: "prompt must be a text or token ids: a list, or a one-dimensional array or tensor of integers, got 7",
        10: "stop_token_ids: token id at index 0 must be an integer in [0, 2048), got 2048",
    }
    completions, stats = engine.generate_with_stats([p for p, _ in batch], [s for _, s in batch])
    assert len({c.request_id for c in completions}) == len(batch)
    for index, completion in enumerate(completions):
        if index not in rules:
            assert (completion.token_ids, completion.error) == (text.continuation[:6], None)
            continue
        assert completion.error.endswith(rules[index]), completion.error
        assert completion.error in (rules[index], f"request {completion.request_id!r}: {rules[index]}")
        assert (completion.token_ids, completion.text, completion.finish_reason) == ([], "", None)
    assert stats.generated_tokens == 18
    assert tokens_of(engine.generate([[3] * 290], greedy(10)))[0], "the longest sequence is served"


def test_wrong_batches(nano_model):
    engine = make_engine(nano_model)
    with pytest.raises(ValueError, match="prompts must be a list of prompts, got one text: 'abc'"):
        engine.generate("abc", greedy(1))
    for prompts in (b"abc", 7, {"a": 1}):
        with pytest.raises(ValueError, match=re.escape(f"prompts must be a list of prompts, got {prompts!r}")):
            engine.generate(prompts, greedy(1))
    with pytest.raises(ValueError, match="params must have one entry per prompt, 2, got 1"):
        engine.generate([[1], [2]], [greedy(1)])
    assert engine.generate([], greedy(1)) == []
    assert tokens_of(engine.generate([[0, 9]], greedy(1)))


# ---- sampling --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_seeded_output_depends_on_nothing_else(nano_model, golden):
    """Alone, in a batch, with drafts, and after a preemption: the same sampled tokens."""
    prompts = [golden("prompts.json")[11][:251], golden("prompts.json")[13][:253], *golden("prompts.json")[3:5]]
    params = [SamplingParams(temperature=0.8, top_p=0.9, seed=100 + n, max_new_tokens=9 - 2 * n) for n in range(4)]
    single = make_engine(nano_model)
    alone = [single.generate([p], s)[0].token_ids for p, s in zip(prompts, params, strict=True)]
    assert len({tuple(tokens) for tokens in alone}) == len(alone)
    for draft_tokens, prefix_reuse in ((0, False), (3, True)):  # resumed from scratch, or from the prefix
        engine = make_engine(nano_model, draft_tokens=draft_tokens, num_blocks=3, prefix_reuse=prefix_reuse)
        preempted = record_preemptions(engine)
        completions, stats = engine.generate_with_stats(prompts, params)
        assert tokens_of(completions) == alone
        assert preempted, "two requests that outgrow one block each do not fit into three"
        assert (stats.accepted_tokens > 0) == (draft_tokens > 0)
    other = engine.generate(prompts[3:], SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_new_tokens=6))
    assert other[0].token_ids != alone[3]


def test_unseeded_outputs_differ(nano_model):
    engine = make_engine(nano_model)
    outputs = tokens_of(engine.generate([[0, 54, 89]] * 3, SamplingParams(temperature=2.0, max_new_tokens=12)))
    assert len({tuple(tokens) for tokens in outputs}) == 3


# ---- use after closing and failing -----------------------------------------------------------------------------------


def test_a_closed_stream_frees_everything(nano_model, golden):
    engine, texts = make_engine(nano_model, draft_tokens=2), recorded_texts(golden)
    prompts = [t.prompt for t in texts]
    stream = engine.stream(prompts, greedy(20))
    first = [next(stream) for _ in range(7)]
    assert len(first) == 7
    with pytest.raises(RuntimeError, match="must serve one batch at a time"):
        engine.generate(prompts, greedy(1))
    stream.close()
    check_nothing_held(engine)
    assert tokens_of(engine.generate(prompts, greedy(10))) == [t.continuation[:10] for t in texts]


def check_nothing_held(engine):
    scheduler, prefix = engine.loop.scheduler, engine.loop.scheduler.prefix
    assert not scheduler.has_work
    assert scheduler.blocks.num_free == scheduler.blocks.num_pages - len(prefix)
    assert prefix.num_evictable == len(prefix)


def test_a_refused_stream_runs_nothing(nano_model, golden):
    engine, text = make_engine(nano_model), recorded_texts(golden)[0]
    steps = record_steps(engine)
    with pytest.raises(ValueError, match="prompt 1 was refused: .*must have at least 1 token, got 0"):
        engine.stream([text.prompt, [], text.prompt], greedy(4))
    with pytest.raises(ValueError, match="params must have one entry per prompt, 1, got 2"):
        engine.stream([text.prompt], [greedy(4)] * 2)
    with pytest.raises(ValueError, match="prompt 0 was refused: .* at most 1024 tokens together"):
        engine.stream([text.prompt], greedy(1024))
    assert steps == []
    check_nothing_held(engine)
    assert tokens_of(engine.generate([text.prompt], greedy(4))) == [text.continuation[:4]]


def test_a_stream_that_nobody_reads_holds_nothing(nano_model, golden):
    engine, text = make_engine(nano_model), recorded_texts(golden)[0]
    first, second = (engine.stream([text.prompt], greedy(3)) for _ in range(2))
    assert tokens_of(engine.generate([text.prompt], greedy(4))) == [text.continuation[:4]]
    next(first)
    with pytest.raises(RuntimeError, match="must serve one batch at a time"):
        next(second)
    with pytest.raises(RuntimeError, match="must serve one batch at a time"):
        engine.stream([text.prompt], greedy(3))
    assert [event.token_id for event in first] == text.continuation[1:3]
    unread = engine.stream([text.prompt], greedy(3))
    engine.close()
    for late in (lambda: next(unread), lambda: engine.stream([text.prompt], greedy(3))):
        with pytest.raises(RuntimeError, match="an engine must be open to serve prompts"):
            late()


@pytest.mark.parametrize("at", ["run", "run_draft", "on_token"])
def test_use_after_a_failure(nano_model, golden, monkeypatch, at):
    """A step that raises half-way, or a callback that does, ends its batch and nothing else."""
    engine, texts = make_engine(nano_model, draft_tokens=1), recorded_texts(golden)
    prompts, on_token = [t.prompt for t in texts], None
    calls = 0

    def fail_third(call=lambda *args, **kwargs: None):
        def wrapped(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == 3:
                raise ZeroDivisionError
            return call(*args, **kwargs)

        return wrapped

    with monkeypatch.context() as patch:
        if at == "on_token":
            on_token = fail_third()
        else:
            patch.setattr(engine.runner, at, fail_third(getattr(engine.runner, at)))
        with pytest.raises(ZeroDivisionError):
            engine.generate(prompts, greedy(8), on_token=on_token)
    check_nothing_held(engine)
    assert tokens_of(engine.generate(prompts, greedy(8))) == [t.continuation[:8] for t in texts]


def test_evaluation_between_batches(nano_model, golden):
    """evaluate writes into the engine's pages, so nothing cached before it may be reused after it."""
    engine, prompt = make_engine(nano_model), golden("prompts.json")[12]
    cold = engine.generate([prompt], greedy(2))
    assert engine.generate([prompt], greedy(2))[0].cached_tokens == 256
    evaluate.last_logits(engine.runner, golden("prompts.json")[6])
    again = engine.generate([prompt], greedy(2))
    assert again[0].cached_tokens == 0 and again[0].token_ids == cold[0].token_ids
    assert engine.generate([prompt], greedy(2))[0].cached_tokens == 256
    stream = engine.stream([prompt], greedy(2))
    next(stream)
    evaluate.last_logits(engine.runner, prompt[:5])
    with pytest.raises(RuntimeError, match="runner must be left alone while prompts are being served"):
        next(stream)
    assert tokens_of(engine.generate([prompt], greedy(2))) == [cold[0].token_ids]


@pytest.mark.parametrize("params", [None, {"temperature": 1}, [5], 7], ids=repr)
def test_params_of_another_type_are_refused(nano_model, params):
    engine = make_engine(nano_model)
    with pytest.raises(ValueError, match="params must be SamplingParams, or one per prompt, got"):
        engine.generate([[5, 6]], params)
