"""What the scheduler and the engine exchange: requests, and the plan of a step.

Everything is plain Python, in the terms of docs/ops.md; nothing imports torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from .blocks import PrefixNode

if TYPE_CHECKING:
    from .sampling import SamplingParams


@dataclass(eq=False, kw_only=True)
class Request:
    """One request and what it holds. Only ``id``, ``prompt_ids`` and ``params`` are the caller's to set."""

    id: str
    prompt_ids: Sequence[int]
    params: "SamplingParams"
    state: Literal["new", "waiting", "running", "finished"] = "new"
    finish_reason: Literal["stop", "length", "aborted"] | None = None
    generated: list[int] = field(default_factory=list)
    num_computed: int = 0  # committed positions: their rows are in the caches
    block_ids: list[int] = field(default_factory=list)  # physical entry block per logical block
    window_page_ids: list[int] = field(default_factory=list)  # physical window page per logical page; −1 once released
    state_slot: int = -1
    cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    num_preemptions: int = 0
    drafts: tuple[int, ...] = ()  # proposed for the next step
    token_ids: list[int] = field(default_factory=list, repr=False)  # prompt, then generated
    node: PrefixNode | None = field(default=None, repr=False)  # held end of the request's chain in the prefix cache
    restore: object | None = field(default=None, repr=False)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def decoding(self) -> bool:
        """Everything but the last generated token is computed."""
        return self.state == "running" and bool(self.generated) and self.num_computed == self.num_tokens - 1


@dataclass(frozen=True, kw_only=True)
class PlanEntry:
    """Consecutive rows of one request in a step.

    Attributes:
        request: whose pages the rows use.
        start: position of the first row.
        token_ids: tokens of the rows; the last ``num_drafts`` are drafts to verify.
        logit_offsets: rows, counted from ``start``, whose logits are wanted.
        num_drafts: how many of the rows are drafts.
        restore: snapshot to load into the request's state slot before the step, or None.
    """

    request: Request
    start: int
    token_ids: tuple[int, ...]
    logit_offsets: tuple[int, ...]
    num_drafts: int = 0
    restore: object | None = None


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One step: its entries (decoding requests first), and the requests that had to give up their pages for it."""

    entries: tuple[PlanEntry, ...]
    preempted: tuple[Request, ...] = ()

    @property
    def num_rows(self) -> int:
        return sum(len(entry.token_ids) for entry in self.entries)
