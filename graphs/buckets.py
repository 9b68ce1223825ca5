"""The ladder of sizes that steps are padded to, because a graph is captured for one set of sizes.

A step has rows (tokens), requests and logit rows. A bucket fixes all three. Few buckets cost little start-up time and
memory, many waste few padded rows; :func:`token_ladder` spends a given number of buckets where the waste is largest.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import isqrt

MAX_ENTRIES = 20
ALIGNMENT = 8  # sizes between two powers of two are multiples of this


@dataclass(frozen=True, order=True)
class Bucket:
    """Sizes of one captured step: rows, requests and logit rows, pads included."""

    tokens: int
    requests: int
    logits: int

    def __post_init__(self) -> None:
        for name, value in (("tokens", self.tokens), ("requests", self.requests), ("logits", self.logits)):
            _check_positive(f"{name} of a bucket", value)

    def __str__(self) -> str:
        return f"{self.tokens} tokens, {self.requests} requests, {self.logits} logit rows"

    def holds(self, tokens: int, requests: int = 0, logits: int = 0) -> bool:
        return tokens <= self.tokens and requests <= self.requests and logits <= self.logits


SizeRule = Callable[[int], Bucket]


def token_ladder(max_tokens: int, max_entries: int = MAX_ENTRIES) -> tuple[int, ...]:
    """At most ``max_entries`` sizes, ascending, from 1 to ``max_tokens``.

    Powers of two (or of a larger step, if those are too many), then multiples of 8 in the middle of the widest gaps
    by ratio, small sizes first: 1, 2, 4, 8, 16, 24, 32, 40, 48, … A ladder of one entry is ``max_tokens`` alone.
    """
    _check_positive("max_tokens", max_tokens)
    _check_positive("max_entries", max_entries)
    sizes = _powers(max_tokens, max_entries)
    while len(sizes) < max_entries:
        middles = [(high / low, -low, middle) for low, high in zip(sizes, sizes[1:]) if (middle := _middle(low, high))]
        if not middles:
            break
        sizes = sorted([*sizes, max(middles)[2]])
    return tuple(sizes)


def _powers(max_tokens: int, max_entries: int) -> list[int]:
    if max_entries == 1:
        return [max_tokens]
    for step in range(1, max_tokens.bit_length() + 1):
        below = [1 << e for e in range(0, max_tokens.bit_length(), step) if 1 << e < max_tokens]
        if len(below) < max_entries:
            break
    return [*below, max_tokens]


def _middle(low: int, high: int) -> int | None:
    """The multiple of 8 nearest to the middle of an open gap (by ratio, if it is wide); None if it has none."""
    middle = (low + high) // 2 if high <= 2 * low else isqrt(low * high)
    below = middle // ALIGNMENT * ALIGNMENT
    candidates = [m for m in (below, below + ALIGNMENT) if low < m < high]
    return min(candidates, key=lambda m: abs(m - middle), default=None)


class Ladder:
    """Buckets in ascending order; a larger bucket holds everything that a smaller one holds."""

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self.buckets = tuple(sorted(buckets))
        if not self.buckets:
            raise ValueError("a ladder must have at least 1 bucket, got none")
        for small, large in zip(self.buckets, self.buckets[1:]):
            if small.tokens == large.tokens or not large.holds(small.tokens, small.requests, small.logits):
                raise ValueError(f"buckets must grow in tokens and shrink in nothing, got {small} before {large}")
        self._tokens = [b.tokens for b in self.buckets]

    @classmethod
    def build(
        cls,
        max_tokens: int,
        *,
        max_requests: int,
        max_logits: int | None = None,
        max_entries: int = MAX_ENTRIES,
        sizes: SizeRule | None = None,
    ) -> "Ladder":
        """A ladder over :func:`token_ladder`.

        Args:
            max_tokens: rows of the largest bucket.
            max_requests: most requests of one step.
            max_logits: most logit rows of one step; default: ``max_requests``.
            max_entries: most buckets.
            sizes: bucket of a token size. Default: as many requests and logit rows as that many rows can have. So a
                size of up to ``max_requests`` holds any decode step of that many rows, and a larger one any mixed step.
        """
        _check_positive("max_requests", max_requests)
        most_logits = max_requests if max_logits is None else max_logits
        _check_positive("max_logits", most_logits)

        def widest(tokens: int) -> Bucket:
            return Bucket(tokens, min(tokens, max_requests), min(tokens, most_logits))

        return cls(map(sizes or widest, token_ladder(max_tokens, max_entries)))

    @property
    def largest(self) -> Bucket:
        return self.buckets[-1]

    @property
    def largest_first(self) -> tuple[Bucket, ...]:
        """The order of capture: smaller graphs then fit into memory that the larger ones left in the pool."""
        return self.buckets[::-1]

    def bucket_for(self, tokens: int, requests: int = 0, logits: int = 0) -> Bucket | None:
        """The smallest bucket that holds a step, or None if no bucket does."""
        for bucket in self.buckets[bisect_left(self._tokens, tokens) :]:
            if bucket.holds(tokens, requests, logits):
                return bucket
        return None

    def why_none(self, tokens: int, requests: int = 0, logits: int = 0) -> str | None:
        """What of a step is beyond the largest bucket; None if a bucket holds it."""
        sizes = (("tokens", tokens), ("requests", requests), ("logits", logits))
        limits = {name: getattr(self.largest, name) for name, _ in sizes}
        beyond = [f"{size} {name}, at most {limits[name]}" for name, size in sizes if size > limits[name]]
        return f"beyond the largest bucket: {'; '.join(beyond)}" if beyond else None


def _check_positive(subject: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{subject} must be an integer of at least 1, got {value!r}")
