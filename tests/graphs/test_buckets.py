import pytest
from hypothesis import given, strategies as st

from dsv4.graphs.buckets import ALIGNMENT, MAX_ENTRIES, Bucket, Ladder, token_ladder

SIZES = st.integers(1, 40_000)


@pytest.mark.parametrize(
    "max_tokens, max_entries, sizes",
    [
        (1, 20, (1,)),
        (9, 20, (1, 2, 4, 8, 9)),
        (64, 20, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)),
        (256, 20, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256)),
        (8192, 20, (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)),
        (8192, 5, (1, 16, 256, 4096, 8192)),
        (8192, 2, (1, 8192)),
        (8192, 1, (8192,)),
    ],
)
def test_ladders(max_tokens, max_entries, sizes):
    assert token_ladder(max_tokens, max_entries) == sizes


@given(SIZES, st.integers(1, 40))
def test_ladder_rules(max_tokens, max_entries):
    sizes = token_ladder(max_tokens, max_entries)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == max_tokens and len(sizes) <= max_entries
    assert max_entries == 1 or sizes[0] == 1
    assert all(s % ALIGNMENT == 0 or s & (s - 1) == 0 for s in sizes[:-1])


@given(SIZES)
def test_the_default_ladder_wastes_less_than_half(max_tokens):
    """At most 20 sizes, and above 8 rows fewer than half of a step's rows are pads, up to 32,768 rows."""
    sizes = token_ladder(min(max_tokens, 32_768))
    assert len(sizes) <= MAX_ENTRIES
    assert all(high <= 2 * low for low, high in zip(sizes, sizes[1:]))


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_ladder_refuses(value):
    with pytest.raises(ValueError, match=f"max_tokens must be an integer of at least 1, got {value!r}"):
        token_ladder(value)
    with pytest.raises(ValueError, match=f"max_entries must be an integer of at least 1, got {value!r}"):
        token_ladder(8, value)


def test_decode_buckets_are_square_and_mixed_buckets_hold_the_most_requests():
    ladder = Ladder.build(64, max_requests=8, max_logits=16, max_entries=6)
    assert ladder.buckets == (
        Bucket(1, 1, 1),
        Bucket(4, 4, 4),
        Bucket(8, 8, 8),
        Bucket(16, 8, 16),
        Bucket(32, 8, 16),
        Bucket(64, 8, 16),
    )
    assert ladder.largest_first == ladder.buckets[::-1] and ladder.largest == Bucket(64, 8, 16)


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 80), st.data())
def test_every_step_within_the_limits_has_a_bucket(max_tokens, max_requests, max_logits, data):
    """Requests and logit rows are at most rows, so the default rule leaves out no step."""
    ladder = Ladder.build(max_tokens, max_requests=max_requests, max_logits=max_logits)
    tokens = data.draw(st.integers(0, max_tokens))
    requests = data.draw(st.integers(0, min(tokens, max_requests)))
    logits = data.draw(st.integers(0, min(tokens, max_logits)))
    bucket = ladder.bucket_for(tokens, requests, logits)
    assert bucket == next(b for b in ladder.buckets if b.holds(tokens, requests, logits))
    assert bucket.tokens == min(b.tokens for b in ladder.buckets if b.tokens >= tokens)
    assert ladder.why_none(tokens, requests, logits) is None


def test_bucket_for():
    ladder = Ladder.build(64, max_requests=8, max_logits=8, max_entries=6)
    assert ladder.bucket_for(5) == Bucket(8, 8, 8)
    assert ladder.bucket_for(8) == Bucket(8, 8, 8)
    assert ladder.bucket_for(1, 3, 1) == Bucket(4, 4, 4)  # three requests, two of them pads of the caller
    assert ladder.bucket_for(64, 8, 8) == ladder.largest
    assert ladder.bucket_for(65) is None and ladder.bucket_for(9, 9, 0) is None and ladder.bucket_for(9, 1, 9) is None
    assert ladder.why_none(65, 1, 9) == "beyond the largest bucket: 65 tokens, at most 64; 9 logits, at most 8"


def test_a_size_rule_replaces_the_default():
    ladder = Ladder.build(8, max_requests=2, max_entries=2, sizes=lambda tokens: Bucket(tokens, 2, tokens))
    assert ladder.buckets == (Bucket(1, 2, 1), Bucket(8, 2, 8))


@pytest.mark.parametrize(
    "buckets", [[(4, 4, 4), (8, 2, 8)], [(4, 4, 4), (8, 8, 2)], [(4, 4, 4), (4, 8, 8)]], ids=["R", "L", "T twice"]
)
def test_ladder_must_grow(buckets):
    with pytest.raises(ValueError, match="buckets must grow in tokens and shrink in nothing, got 4 tokens"):
        Ladder(Bucket(*b) for b in buckets)


def test_nothing_is_no_ladder():
    with pytest.raises(ValueError, match="a ladder must have at least 1 bucket, got none"):
        Ladder([])
    with pytest.raises(ValueError, match="logits of a bucket must be an integer of at least 1, got 0"):
        Bucket(1, 1, 0)
