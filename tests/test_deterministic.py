"""Deterministic mode: a row's results are bitwise the same alone, packed beside other requests and in any chunking."""

import copy
import sys
from collections.abc import Iterator

import pytest
import torch

from dsv4.model import DeepseekV4

from . import tiny_model
from .tiny_model import (
    Outputs,
    TinyCheckpoint,
    as_bits,
    different_rows,
    joined,
    place,
    random_tokens,
    run_chunks,
    run_parts,
)

ROWS = 64
NUMERICS = ("exact", "official")
CHUNKS = (1, 3, 64, 127, 128, 200)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> dict[str, DeepseekV4]:
    """Ratios 0, 4, 128, two hash layers and the MTP block, deterministic, by numerics."""
    checkpoint = TinyCheckpoint.write(tiny_model.tiny_config(), tmp_path_factory.mktemp("tiny") / "checkpoint")
    return {numerics: checkpoint.model(numerics) for numerics in NUMERICS}


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def in_step(
    model: DeepseekV4, prefix: list[int], rows: list[int], others: list[int], first: int, *, mtp: bool
) -> Outputs:
    """``rows`` (and the token after them) behind ``prefix``, in one step with fresh requests of the given sizes.

    ``first`` of the other requests come before the rows, the rest after them.
    """
    runner = tiny_model.runner_of(model, num_requests=len(others) + 1)
    own = place(first)
    if prefix:
        run_parts(runner, [(own, [*prefix, rows[0]])], mtp=mtp)
    vocab = model.config.vocab_size
    parts = [(place(i + (i >= first)), random_tokens(size + 1, vocab, 50 + i)) for i, size in enumerate(others)]
    parts.insert(first, (own, rows))
    return run_parts(runner, parts, mtp=mtp)[first]


def check_total(model: DeepseekV4, total: int, *, places: tuple[int, ...], prefix: int = 0, mtp: bool = True) -> None:
    """The same 64 rows alone, and inside a step of ``total`` rows behind each of ``places`` other requests."""
    tokens = random_tokens(prefix + ROWS + 1, model.config.vocab_size, 1)
    rest = total - ROWS
    others = {1: [1], 65: [1, 61, 3], 4161: [57] * 73}[rest]
    assert sum(others) == rest
    alone = in_step(model, tokens[:prefix], tokens[prefix:], [], 0, mtp=mtp)
    for first in places:
        packed = in_step(model, tokens[:prefix], tokens[prefix:], others, first, mtp=mtp)
        assert different_rows(packed, alone) == {}, f"behind {first} of {len(others)} other requests"


@pytest.mark.parametrize("total", [65, 129])
@pytest.mark.parametrize("numerics", NUMERICS)
def test_rows_in_a_step(tiny, numerics, total):
    """From position 140: the rows read a finished ratio-128 entry, pick among 35 entries, and complete more."""
    check_total(tiny[numerics], total, places=(0, 1), prefix=140)


@pytest.mark.slow
@pytest.mark.parametrize("numerics", NUMERICS)
def test_rows_in_a_step_two_threads(tiny, two_threads, numerics):
    """At 129 rows the streams are large enough for torch to split loops over them between threads."""
    check_total(tiny[numerics], 129, places=(2,), mtp=False)


@pytest.mark.slow
@pytest.mark.parametrize("numerics", NUMERICS)
def test_rows_in_a_large_step(tiny, numerics):
    check_total(tiny[numerics], 4225, places=(36,), mtp=False)


@pytest.mark.parametrize("numerics, total", [("exact", 65), ("official", 129)])
def test_rows_in_a_step_nano(nano_model, numerics, total):
    check_total(nano_model(numerics, deterministic=True), total, places=(1,))


@pytest.mark.parametrize("numerics", NUMERICS)
def test_decode_rows_of_many_requests(tiny, numerics):
    """One decode row of each of 64 requests in one step; of every fourth also in a step of its own."""
    model = tiny[numerics]
    prompts = [random_tokens(5 + i % 4, model.config.vocab_size, i) for i in range(ROWS)]
    sequences = [place(i, max_blocks=1) for i in range(ROWS)]
    runner = tiny_model.runner_of(model, num_requests=ROWS, max_blocks=1)
    run_parts(runner, [(s, p[:-1]) for s, p in zip(sequences, prompts, strict=True)])
    before = copy.deepcopy((runner.caches, sequences))
    packed = run_parts(runner, [(s, p[-2:]) for s, p in zip(sequences, prompts, strict=True)])
    runner.caches, sequences = before
    for index in range(0, ROWS, 4):
        (alone,) = run_parts(runner, [(sequences[index], prompts[index][-2:])])
        assert different_rows(packed[index], alone) == {}, f"request {index}"


@pytest.mark.parametrize("numerics", NUMERICS)
def test_index_scores(nano_model, numerics):
    """The scores behind the picks, which hide most differences: 40 rows together and one by one."""
    model = nano_model(numerics, deterministic=True)
    runner, sequence = tiny_model.runner_of(model), place(0)
    tokens = random_tokens(140, model.config.vocab_size, 5)
    runner.run([sequence.segment(tokens)])
    attention, cache = model.blocks[2].attn, runner.caches.layers[2]
    x = torch.randn(40, model.config.hidden_size, generator=torch.Generator().manual_seed(6)).to(model.execution.dtype)

    def scores(first: int, last: int) -> torch.Tensor:
        inputs = runner.inputs([sequence.segment(tokens[100 + first : 100 + last], start=100 + first)])
        return attention.index_scores(x[first:last], inputs, cache)

    together, alone = scores(0, 40), torch.cat([scores(row, row + 1) for row in range(40)])
    assert torch.equal(together.isfinite().sum(1), torch.arange(101, 141) // 4)
    assert torch.equal(as_bits(together), as_bits(alone))


@pytest.mark.parametrize("numerics", [pytest.param("exact", marks=pytest.mark.slow), "official"])
def test_chunks(tiny, numerics):
    """A prompt of 205 tokens in one go and in chunks (fewer of them in the smallest chunks)."""
    model = tiny[numerics]
    tokens = random_tokens(206, model.config.vocab_size, 2)
    whole = run_chunks(tiny_model.runner_of(model), place(0), tokens, len(tokens))
    for chunk in (1, 3, 127, 128):  # of a ratio-128 window: pieces, one row less, all
        part = tokens[: {1: 31, 3: 67}.get(chunk, len(tokens))]
        got = run_chunks(tiny_model.runner_of(model), place(0), part, chunk, mtp=chunk in (3, 127))
        want = {name: whole[name][: len(part) - 1] for name in got}
        assert different_rows(got, want) == {}, f"chunks of {chunk}"


@pytest.mark.parametrize("numerics, size", [
    ("exact", "nano"), ("official", "tiny"), pytest.param("official", "nano", marks=pytest.mark.slow)
])  # fmt: skip
def test_decode_equals_prefill(nano_model, tiny, numerics, size):
    """Token by token across the ends of ratio-4 windows and of a ratio-128 window."""
    model = tiny[numerics] if size == "tiny" else nano_model(numerics, deterministic=True)
    tokens = random_tokens(133, model.config.vocab_size, 3)
    whole = run_chunks(tiny_model.runner_of(model), place(0), tokens, len(tokens))
    runner, sequence = tiny_model.runner_of(model), place(0)
    steps = run_parts(runner, [(sequence, tokens[:125])])
    steps += [run_parts(runner, [(sequence, tokens[t : t + 2])])[0] for t in range(124, 132)]
    assert different_rows(joined(steps), whole) == {}


@pytest.mark.slow
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("numerics", NUMERICS)
def test_chunks_nano(nano_model, numerics, chunk):
    model = nano_model(numerics, deterministic=True)
    tokens = random_tokens(301, model.config.vocab_size, 4)
    whole = run_chunks(tiny_model.runner_of(model), place(0), tokens, len(tokens))
    got = run_chunks(tiny_model.runner_of(model), place(0), tokens, chunk)
    assert different_rows(got, whole) == {}


@pytest.mark.slow
@pytest.mark.parametrize("numerics", NUMERICS)
def test_rows_in_a_large_step_two_threads(tiny, two_threads, numerics):
    check_total(tiny[numerics], 4225, places=(73,))


def test_detects_a_batch_dependent_product(tiny, monkeypatch):
    """The comparison sees a product that splits its sum by the number of rows, as split-K heuristics do."""

    def split_by_rows(x: torch.Tensor, weight: torch.Tensor, *, deterministic: bool) -> torch.Tensor:
        half = weight.shape[1] // (2 if x.shape[0] > ROWS else 3)
        x, weight = x.float(), weight.float()
        return x[:, :half] @ weight[:, :half].t() + x[:, half:] @ weight[:, half:].t()

    monkeypatch.setattr(sys.modules["dsv4.ops.linear"], "product", split_by_rows)
    with pytest.raises(AssertionError, match="other requests"):
        check_total(tiny["exact"], 65, places=(0,))
