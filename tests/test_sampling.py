import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from dsv4.sampling import SamplingParams, probabilities, sample, uniform

VOCABULARY = 61


def random_logits(rows: int, seed: int, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -0.5, "temperature must be a finite number >= 0, got -0.5"),
        ("temperature", math.nan, "temperature must be a finite number >= 0, got nan"),
        ("temperature", math.inf, "temperature must be a finite number >= 0, got inf"),
        ("top_p", 0.0, r"top_p must be in \(0, 1\], got 0.0"),
        ("top_p", 1.01, r"top_p must be in \(0, 1\], got 1.01"),
        ("seed", -1, r"seed must be None or in \[0, 2\*\*63\), got -1"),
        ("seed", True, "seed must be None or in .* got True"),
        ("max_new_tokens", 0, "max_new_tokens must be an int >= 1, got 0"),
        ("stop_token_ids", [3], r"stop_token_ids must be a tuple of ints >= 0, got \[3\]"),
        ("stop_token_ids", (3, -1), r"stop_token_ids must be a tuple of ints >= 0, got \(3, -1\)"),
        ("ignore_eos", 1, "ignore_eos must be a bool, got 1"),
    ],
)
def test_invalid_parameters(field, value, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("name, value", [("top_p", 0.9), ("seed", 0), ("seed", 5)])
def test_greedy_leaves_no_choice(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be left out with temperature 0, where .* got {value}$"):
        SamplingParams(**{name: value})
    assert getattr(SamplingParams(temperature=0.1, **{name: value}), name) == value


def test_parameters_are_frozen_and_seeded_on_demand():
    params = SamplingParams(temperature=1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 2.0
    seeded = params.with_seed()
    assert seeded.seed is not None and seeded.with_seed() is seeded
    assert params.with_seed().seed != seeded.seed
    assert SamplingParams().with_seed() == SamplingParams()
    with pytest.raises(ValueError, match=r"seed must be set before sampling .* got None"):
        sample(random_logits(1, 0), [params], [0])


@pytest.mark.parametrize("field", ["temperature", "top_p"])
def test_numbers_beyond_floats_are_refused(field):
    with pytest.raises(ValueError, match=f"{field} must be"):
        SamplingParams(**{field: 10**400})


def test_greedy_takes_the_smallest_id_of_a_tie():
    logits = random_logits(3, 1)
    logits[1, [50, 7, 20]] = 99.0
    logits[2] = 1.5
    ids = sample(logits, [SamplingParams()] * 3, [0, 1, 2])
    assert ids.dtype == torch.int64
    assert ids.tolist() == [max(range(VOCABULARY), key=lambda i: logits[0, i]), 7, 0]
    one_hot = torch.nn.functional.one_hot(ids, VOCABULARY).double()
    assert torch.equal(probabilities(logits, [SamplingParams()] * 3), one_hot)


def test_no_rows():
    empty = random_logits(0, 2)
    assert sample(empty, [], []).shape == (0,)
    assert probabilities(empty, []).shape == (0, VOCABULARY)


@pytest.mark.parametrize("rows", [1, 32, 33])
@pytest.mark.parametrize("vocabulary", [512, 2048, 1000])
def test_greedy_in_parts_is_argmax(rows, vocabulary):
    """A few values only, so that maxima repeat within a part of the vocabulary and across parts."""
    logits = torch.randint(-3, 4, (rows, vocabulary), generator=torch.Generator().manual_seed(rows)).float()
    logits[0, [vocabulary - 1, 300, 301]] = 9.0
    params = [SamplingParams()] * rows
    want = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(sample(logits, params, [0] * rows), want) and want[0] == 300
    logits[-1, 400] = float("nan")
    assert sample(logits, params, [0] * rows)[-1] == 400  # never hidden


def test_probabilities_match_their_definition():
    logits, params = random_logits(2, 3), [SamplingParams(temperature=0.7), SamplingParams(temperature=1.6)]
    for row, request in enumerate(params):
        weights = [math.exp(float(value) / request.temperature) for value in logits[row]]
        expected = torch.tensor([weight / math.fsum(weights) for weight in weights], dtype=torch.float64)
        torch.testing.assert_close(probabilities(logits, params)[row], expected, rtol=1e-12, atol=0)


def test_nucleus_is_the_smallest_set_that_reaches_top_p():
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.2, 0.1]]).log()
    # rtol 1e-6: the logits are rounded to fp32
    one = lambda top_p: probabilities(logits, [SamplingParams(temperature=1.0, top_p=top_p)])[0]  # noqa: E731
    torch.testing.assert_close(one(0.3), torch.tensor([0, 1, 0, 0, 0]).double(), rtol=0, atol=0)
    torch.testing.assert_close(one(0.5), torch.tensor([0, 2 / 3, 1 / 3, 0, 0]).double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(one(0.7), torch.tensor([0, 0.5, 0.25, 0.25, 0]).double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(one(1.0), torch.tensor([0.1, 0.4, 0.2, 0.2, 0.1]).double(), rtol=1e-6, atol=0)


def test_very_cold_rows_do_not_overflow():
    logits = random_logits(1, 4) * 1e4
    cold = SamplingParams(temperature=1e-9, seed=1)
    assert torch.equal(sample(logits, [cold], [0]), logits.argmax(-1))
    assert probabilities(logits, [cold]).sum() == 1


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_row_does_not_depend_on_its_batch(data):
    rows = data.draw(st.integers(1, 6))
    logits = random_logits(rows, data.draw(st.integers(0, 10_000)))
    sampled = st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.3, 1.0, 2.5]),
        top_p=st.sampled_from([0.2, 0.9, 1.0]),
        seed=st.integers(0, 2**63 - 1),
    )
    params = [data.draw(sampled | st.just(SamplingParams())) for _ in range(rows)]
    steps = [data.draw(st.integers(0, 5000)) for _ in range(rows)]
    together, weights = sample(logits, params, steps), probabilities(logits, params)
    for row in range(rows):
        alone = sample(logits[row : row + 1], params[row : row + 1], steps[row : row + 1])
        assert torch.equal(alone, together[row : row + 1])
        assert torch.equal(probabilities(logits[row : row + 1], params[row : row + 1])[0], weights[row])
        assert weights[row, together[row]] > 0


def test_frequencies_follow_the_probabilities():
    logits = random_logits(1, 5, vocabulary=6) / 2
    params = SamplingParams(temperature=1.3, top_p=0.9, seed=77)
    draws = 20_000
    ids = sample(logits.expand(draws, -1).contiguous(), [params] * draws, range(draws))
    expected = probabilities(logits, [params])[0]
    observed = torch.bincount(ids, minlength=6).double() / draws
    assert torch.equal(observed == 0, expected == 0) and (expected == 0).any()
    deviation = (observed - expected).abs() / (expected * (1 - expected) / draws).sqrt().clamp_min(1e-300)
    assert deviation[expected > 0].max() < 5  # standard errors; the draws are fixed by the seed


def test_uniform_is_fixed_and_spread():
    assert uniform(0, 0) == uniform(0, 0)
    values = {uniform(seed, step) for seed in range(30) for step in range(30)}
    assert len(values) == 900 and all(0 <= value < 1 for value in values)
    assert abs(sum(values) / 900 - 0.5) < 5 * math.sqrt(1 / 12 / 900)  # five standard errors


def test_row_errors():
    logits = random_logits(2, 6)
    with pytest.raises(ValueError, match="params must have one entry for each of 2 rows, got 1"):
        sample(logits, [SamplingParams()], [0])
    with pytest.raises(ValueError, match="steps must have one entry for each of 2 rows, got 3"):
        sample(logits, [SamplingParams()] * 2, [0, 1, 2])
    with pytest.raises(ValueError, match=r"logits must be \[rows, vocabulary\] float32, got \[2, 61\] torch.bfloat16"):
        probabilities(logits.bfloat16(), [SamplingParams()] * 2)
    with pytest.raises(ValueError, match="steps must be >= 0, got -4"):
        sample(logits, [SamplingParams(temperature=1.0, seed=0)] * 2, [0, -4])
