"""What the engine hands back: tokens as they come, completions, and totals."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Start-up seconds: reading and converting weights; tracing and splitting; compiling; loading cached pieces."""

    load_seconds: float
    trace_seconds: float
    compile_seconds: float
    piece_load_seconds: float


@dataclass(frozen=True, kw_only=True)
class TokenEvent:
    """One committed token of a prompt; ``text`` may be empty while a character is unfinished."""

    prompt_idx: int
    token_id: int
    text: str
    finish_reason: str | None


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Result of one prompt. ``error`` is set, and nothing was generated, when the prompt was refused.

    Attributes:
        request_id: names the prompt in ``error``; unique within the engine.
        text: of ``token_ids``, special tokens left out.
        token_ids: a stop token included.
        finish_reason: ``stop`` (end-of-sentence or stop token), ``length``, or ``None`` for a refused prompt.
        prompt_tokens: a prepended beginning-of-sentence token included.
        cached_tokens: of the prompt, found in the prefix cache.
        drafted_tokens: drafts that the model verified.
        accepted_tokens: drafts that became part of ``token_ids``.
        error: why the prompt was refused.
    """

    request_id: str
    text: str
    token_ids: list[int]
    finish_reason: str | None
    prompt_tokens: int
    cached_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    error: str | None

    @classmethod
    def refused(cls, request_id: str, error: str) -> "Completion":
        return cls(
            request_id=request_id, text="", token_ids=[], finish_reason=None, prompt_tokens=0, cached_tokens=0,
            drafted_tokens=0, accepted_tokens=0, error=error,
        )  # fmt: skip


@dataclass(kw_only=True)
class RunStats:
    """Totals of one ``generate`` call; ``rows`` counts what the steps computed, rejected drafts included."""

    seconds: float = 0.0
    steps: int = 0
    rows: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.generated_tokens / self.seconds if self.seconds else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None
