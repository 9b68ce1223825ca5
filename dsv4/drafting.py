"""Speculative decoding with the MTP block: which rows it computes after a step, and the tokens it proposes.

The block reads the residual streams of position j together with token j + 1 and predicts token j + 2. After a step that
committed positions up to C - 1 and knows token C, its rows are the step's committed positions; the last of them
predicts token C + 1. Further drafts feed the block its own streams and tokens, which stay on the device: the host waits
once, for all of them. Drafts only propose: the model verifies every one, so the output never depends on them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from .inputs import Segment
from .ops.shapes import WINDOW_PAGE_TOKENS
from .runner import Runner
from .transfer import Download, upload

_ANY_TOKEN = 0  # of a row whose token only the device knows


@dataclass(frozen=True, kw_only=True)
class DraftRows:
    """Committed rows of one request in the last step.

    Attributes:
        first_row: row of the step's streams that belongs to position ``start``.
        start: first committed position of the step.
        next_tokens: the token after each committed position, i.e. tokens ``start + 1 … C``.
        window_pages, blocks, state_slot: as in :class:`Segment`.
        carried: streams ``[M, D]`` of position ``start - 1`` when that row belongs to a reused prefix whose own
            continuation was another token; ``None`` otherwise.
        carried_token: the token at position ``start``, which follows the carried row.
        num_drafts: drafts wanted; 0 while the prompt is not finished.
    """

    first_row: int
    start: int
    next_tokens: Sequence[int]
    window_pages: Sequence[int]
    blocks: Sequence[int]
    state_slot: int
    carried: torch.Tensor | None
    carried_token: int
    num_drafts: int

    @property
    def end(self) -> int:
        return self.start + len(self.next_tokens)

    def segment(self, token_ids: Sequence[int], start: int, *, wanted: bool) -> Segment:
        return Segment(
            token_ids=token_ids,
            start=start,
            blocks=self.blocks,
            window_pages=self.window_pages,
            state_slot=self.state_slot,
            logit_offsets=(len(token_ids) - 1,) if wanted else (),
        )


def draft(runner: Runner, rows: Sequence[DraftRows], streams: torch.Tensor) -> list[list[int]]:
    """Write the MTP rows of a step and propose tokens.

    Args:
        runner: its caches receive the rows.
        rows: one entry per request of the step.
        streams: ``[T, M, D]`` of the step.

    Returns:
        Per entry up to ``num_drafts`` token ids, fewer when the next position has no window page yet.
    """
    segments, parts = [], []
    for r in rows:
        tokens, start = list(r.next_tokens), r.start
        own = streams[r.first_row : r.first_row + len(tokens)]
        if r.carried is not None:
            tokens, start = [r.carried_token, *tokens], start - 1
            own = torch.cat((r.carried.unsqueeze(0), own))
        segments.append(r.segment(tokens, start, wanted=r.num_drafts > 0))
        parts.append(own)
    logits, carried = runner.run_draft(segments, torch.cat(parts))
    ends = accumulate(len(s.token_ids) for s in segments)
    active = [index for index, r in enumerate(rows) if r.num_drafts > 0]
    carried = _select(carried, [end - 1 for end, r in zip(ends, rows, strict=True) if r.num_drafts > 0])
    chosen: list[tuple[list[int], torch.Tensor]] = []  # per depth: the entries that drafted, and their tokens
    while active:
        depth = len(chosen)
        tokens = logits.argmax(-1)
        chosen.append((active, tokens))
        keep = [n for n, index in enumerate(active) if _goes_on(rows[index], depth)]
        if not keep:
            break
        active, carried, tokens = [active[n] for n in keep], _select(carried, keep), _select(tokens, keep)
        segments = [rows[i].segment([_ANY_TOKEN], rows[i].end + depth, wanted=True) for i in active]
        logits, carried = runner.run_draft(segments, carried, token_ids=tokens)
    drafts: list[list[int]] = [[] for _ in rows]
    values = Download(torch.cat([tokens for _, tokens in chosen])).wait().tolist() if chosen else []
    for index, token in zip((index for active, _ in chosen for index in active), values, strict=True):
        drafts[index].append(token)
    return drafts


def _select(tensor: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    return tensor.index_select(0, upload(rows, torch.int64, tensor.device))


def _goes_on(rows: DraftRows, depth: int) -> bool:
    """Whether another draft is wanted and the block's next row has a page to live in."""
    return depth + 1 < rows.num_drafts and (rows.end + depth) // WINDOW_PAGE_TOKENS < len(rows.window_pages)
