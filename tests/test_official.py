"""Official numerics: every quantisation point of the official code, against its recorded values.

The real test feeds recorded inputs to single sublayers (``official_measure.py``; ``test_planted_bugs.py`` shows what
it catches). Whole-model logits can only be compared loosely: one FP8 code that rounds the other way changes every
output of a product by about 0.4 %, and the next quantiser multiplies the flips. For the same reason a prompt in chunks
only roughly repeats the prompt in one go. The loose bounds are those of ``tests/golden/README.md``, section (b).
"""

import pytest
import torch

from dsv4 import evaluate
from dsv4.ops import _formats
from dsv4.runner import Sequence
from tests.official_measure import exceeded, measure

ROWS_MEAN, ROW, TOP1 = 0.15, 0.45, 0.93  # mean absolute logit difference over rows, of 99 % of rows; equal argmax
NLL_WINDOW, NLL_SPLIT = 0.02, 0.003


def check_rows(got: torch.Tensor, want: torch.Tensor) -> None:
    """Loose agreement of logit rows ``[rows, vocab]``."""
    assert got.isfinite().all() and got.shape == want.shape
    rows = (got - want).abs().mean(dim=1)
    assert rows.mean().item() <= ROWS_MEAN
    assert (rows <= ROW).double().mean().item() >= 0.99
    assert (got.argmax(1) == want.argmax(1)).double().mean().item() >= TOP1


@pytest.fixture(scope="module")
def recorded(golden):
    return golden("layers_official.safetensors"), golden("named_official.safetensors")


def test_forced_inputs(make_runner, recorded):
    """With every cache format: rows are quantised before they are stored, so FP8 loses nothing that bf16 keeps."""
    measured = [measure(make_runner("official", max_blocks=2, storage=s), *recorded) for s in ("bf16", "fp8", "fp32")]
    assert not exceeded(measured[0]), measured[0]
    assert measured[0] == measured[1] == measured[2]


def test_forced_inputs_deterministic(make_runner, recorded):
    measured = measure(make_runner("official", max_blocks=2, deterministic=True), *recorded, layers={2, 3})
    assert not exceeded(measured), measured


@pytest.mark.parametrize(
    ("name", "simulate"),
    [
        ("layer2.attn.window_kv", lambda x: _formats.simulate_kv(x, 64)),
        ("layer3.attn.window_kv", lambda x: _formats.simulate_kv(x, 64)),
        ("layer2.attn.compressed_kv", lambda x: _formats.simulate_kv(x, 64)),
        ("layer3.attn.compressed_kv", lambda x: _formats.simulate_kv(x, 64)),
        ("layer2.attn.indexer.q", _formats.simulate_fp4),
        ("layer2.attn.indexer.k", _formats.simulate_fp4),
    ],
)
def test_recorded_quantised_values_are_fixed_points(recorded, name, simulate):
    """Bit-exact: the official quantisers wrote values that ours leave alone, and ours do move other values."""
    value = (recorded[0] | recorded[1])[f"p140.{name}"]
    assert value.dtype == torch.bfloat16 and value.float().std() > 0.1
    assert torch.equal(simulate(value), value)
    other = (value.float() * 1.03).bfloat16()
    assert (simulate(other) != other).double().mean().item() > 0.5


@pytest.mark.slow
def test_last_logits_of_prompts(make_runner, golden):
    prompts, want = golden("prompts.json"), golden("official_logits.safetensors")
    runner = make_runner("official")
    got = torch.stack([evaluate.last_logits(runner, prompt) for prompt in prompts])
    check_rows(got, torch.stack([want[f"logits_{i}"] for i in range(len(prompts))]))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [33, 127])
def test_chunks_agree_loosely(make_runner, golden, chunk):
    prompt = golden("prompts.json")[12]  # 300 tokens: selection and two ratio-128 entries
    whole = torch.cat([logits for logits, _ in evaluate.prefill(make_runner("official"), prompt, all_logits=True)])
    runner = make_runner("official", storage="fp8")
    parts = torch.cat([logits for logits, _ in evaluate.prefill(runner, prompt, chunk=chunk, all_logits=True)])
    check_rows(parts, whole)


@pytest.mark.slow
def test_packed_decode_agrees_loosely(make_runner, golden):
    """Six requests decode their last 25 tokens side by side; every row is compared with its prefill in one go."""
    steps, prompts = 25, [golden("prompts.json")[i][:300] for i in range(10, 16)]
    whole = make_runner("official")
    want = [torch.cat([part for part, _ in evaluate.prefill(whole, p, all_logits=True)])[-steps:] for p in prompts]
    runner = make_runner("official", max_blocks=2, num_requests=len(prompts), storage="fp8")
    sequences = [Sequence(first_block=2 * i, first_page=4 * i, state_slot=i) for i in range(len(prompts))]
    runner.run([s.segment(p[:-steps]) for s, p in zip(sequences, prompts, strict=True)])
    got = []
    for step in range(-steps, 0):
        got.append(runner.run([s.segment([p[step]], (0,)) for s, p in zip(sequences, prompts, strict=True)])[0])
    check_rows(torch.stack(got, dim=1).flatten(0, 1), torch.cat(want))


def check_windows(got: list[float], want: list[float]) -> None:
    assert len(got) == len(want)
    assert max(abs(a - b) for a, b in zip(got, want, strict=True)) <= NLL_WINDOW


def test_nll_first_windows(make_runner, golden):
    tokens = golden("exact_nll.json")["tokens"]
    result = evaluate.score(make_runner("official", storage="fp8"), tokens[: 2 * 1024 + 3], window=1024)
    check_windows(result.nll_per_window, golden("official.json")["nll_per_window"][:2])


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["bf16", "fp8"])
def test_nll_all_windows(make_runner, golden, storage):
    record = golden("official.json")
    runner = make_runner("official", storage=storage)
    result = evaluate.score(runner, golden("exact_nll.json")["tokens"], window=1024, mtp=True)
    check_windows(result.nll_per_window, record["nll_per_window"])
    check_windows(result.mtp_nll_per_window, record["mtp_nll_per_window"])
    assert abs(result.nll - record["nll"]) <= NLL_SPLIT
    assert abs(result.mtp_nll - record["mtp_nll"]) <= NLL_SPLIT
