"""What one step reads: :class:`StepInputs`, and how it is built from per-request segments.

Legend: T rows, R requests, L logit rows, B logical blocks (256 tokens), W window pages (128 tokens).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

from .config import ModelConfig
from .ops.shapes import BLOCK_TOKENS, WINDOW_PAGE_TOKENS
from .transfer import upload_together

UNKNOWN_TOKEN = -1  # a row that has an embedding and no token


@dataclass
class StepInputs:
    """Every tensor a step reads besides weights and caches; docs/ops.md defines pads and metadata.

    Attributes:
        token_ids: ``[T]`` int64; −1 for a pad row.
        positions: ``[T]`` int64, absolute position in the request; −1 for a pad row.
        row_requests: ``[T]`` int32, request number of the row; −1 for a pad row.
        query_starts: ``[R + 1]`` int32, first row of each request, then the number of valid rows.
        seq_lens: ``[R]`` int32, position of the request's last row plus one; 0 for a pad request.
        block_tables: ``[R, B]`` int32, physical block per logical block; −1 where there is none.
        window_tables: ``[R, W]`` int32, physical window page per logical page; −1 where there is none.
        window_slots: ``[T]`` int64, flat window-cache row to write; −1 = do not write.
        state_slots: ``[R]`` int32, compressor-state slot; −1 for a pad request.
        num_valid: ``[1]`` int32, number of valid rows.
        logit_rows: ``[L]`` int64, rows whose logits are wanted.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    row_requests: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    window_tables: torch.Tensor
    window_slots: torch.Tensor
    state_slots: torch.Tensor
    num_valid: torch.Tensor
    logit_rows: torch.Tensor

    def to(self, device: torch.device | str) -> "StepInputs":
        return StepInputs(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})


torch.utils._pytree.register_dataclass(StepInputs)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive rows of one request in one step.

    Attributes:
        token_ids: tokens of the rows; −1 only in steps whose rows have embeddings of their own.
        start: position of the first row.
        blocks: physical entry block of each logical 256-token block from position 0.
        window_pages: physical window page of each logical 128-token page from position 0; −1 once released.
        state_slot: compressor-state slot.
        logit_offsets: rows (within the segment) whose logits are wanted.
    """

    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    window_pages: Sequence[int]
    state_slot: int
    logit_offsets: Sequence[int] = ()


def check_token_ids(token_ids: Sequence[int], vocab_size: int, subject: str, *, lowest: int = 0) -> None:
    """Raise ``ValueError`` naming the first token id outside ``[lowest, vocab_size)``."""
    if set(map(type, token_ids)) <= {int}:  # without a loop in Python over a long prompt
        if lowest <= min(token_ids, default=lowest) and max(token_ids, default=lowest) < vocab_size:
            return
    for index, token in enumerate(token_ids):
        if isinstance(token, bool) or not isinstance(token, int) or not lowest <= token < vocab_size:
            rule = f"must be an integer in [{lowest}, {vocab_size})"
            raise ValueError(f"{subject}: token id at index {index} {rule}, got {token!r}")


def check_embeddings(config: ModelConfig, segments: Sequence[Segment], embeddings: torch.Tensor) -> None:
    """Raise ``ValueError`` unless ``embeddings`` can replace the embedding lookup of a step of ``segments``.

    Hash-routed layers choose experts by token id, so a model that has them needs every row's token beside its
    embedding. Without them a row may be known by its embedding alone.
    """
    expected = [sum(len(s.token_ids) for s in segments), config.hidden_size]
    if list(embeddings.shape) != expected:
        raise ValueError(f"embeddings must have shape {expected}, got {list(embeddings.shape)}")
    for number, segment in enumerate(segments if config.num_hash_layers else ()):
        if UNKNOWN_TOKEN in segment.token_ids:
            raise ValueError(
                f"request {number}: token ids must come with embeddings for a model with {config.num_hash_layers} hash "
                f"layers, got {UNKNOWN_TOKEN} at index {list(segment.token_ids).index(UNKNOWN_TOKEN)}"
            )


def build_inputs(
    segments: Sequence[Segment],
    *,
    vocab_size: int,
    max_blocks: int,
    num_rows: int | None = None,
    num_requests: int | None = None,
    device: torch.device | str = "cpu",
    embedded: bool = False,
) -> StepInputs:
    """Flatten ``segments`` into one step, padded to ``num_rows`` and ``num_requests``.

    Args:
        segments: one entry per request, in row order.
        vocab_size: bound of valid token ids.
        max_blocks: width B of the block table; the window table has ``2 * B`` pages.
        num_rows: rows after padding; default: no pads.
        num_requests: requests after padding; default: no pads.
        device: where the tensors live.
        embedded: the rows have embeddings (:func:`check_embeddings`), so a token id may be −1.

    Raises:
        ValueError: a token id out of range, a row beyond the tables, a padded size below the real one, or two requests
            that would write to the same window page or state slot.
    """
    total = sum(len(s.token_ids) for s in segments)
    num_rows = total if num_rows is None else num_rows
    num_requests = len(segments) if num_requests is None else num_requests
    for name, size, need in (("num_rows", num_rows, total), ("num_requests", num_requests, len(segments))):
        if size < need:
            raise ValueError(f"{name} must be at least {need}, got {size}")
    for number, segment in enumerate(segments):
        _check_segment(number, segment, max_blocks, vocab_size, UNKNOWN_TOKEN if embedded else 0)
    _check_written(segments)
    max_pages = max_blocks * (BLOCK_TOKENS // WINDOW_PAGE_TOKENS)
    host = {
        "token_ids": np.full(num_rows, -1, np.int64),
        "positions": np.full(num_rows, -1, np.int64),
        "row_requests": np.full(num_rows, -1, np.int32),
        "query_starts": np.full(num_requests + 1, total, np.int32),
        "seq_lens": np.zeros(num_requests, np.int32),
        "block_tables": np.full((num_requests, max_blocks), -1, np.int32),
        "window_tables": np.full((num_requests, max_pages), -1, np.int32),
        "window_slots": np.full(num_rows, -1, np.int64),
        "state_slots": np.full(num_requests, -1, np.int32),
        "num_valid": np.array([total], np.int32),
    }
    first, logit_rows = 0, []
    for number, segment in enumerate(segments):
        end = segment.start + len(segment.token_ids)
        rows = slice(first, first + len(segment.token_ids))
        positions, pages = np.arange(segment.start, end), np.array(segment.window_pages, np.int64)
        page = pages[positions // WINDOW_PAGE_TOKENS]
        host["token_ids"][rows] = segment.token_ids
        host["positions"][rows] = positions
        host["row_requests"][rows] = number
        host["query_starts"][number] = first
        host["seq_lens"][number] = end
        host["block_tables"][number, : len(segment.blocks)] = segment.blocks
        host["window_tables"][number, : len(pages)] = pages
        host["window_slots"][rows] = np.where(page < 0, -1, page * WINDOW_PAGE_TOKENS + positions % WINDOW_PAGE_TOKENS)
        host["state_slots"][number] = segment.state_slot
        logit_rows.extend(first + offset for offset in segment.logit_offsets)
        first = rows.stop
    host["logit_rows"] = np.array(logit_rows, np.int64)
    return StepInputs(**dict(zip(host, upload_together(list(host.values()), device), strict=True)))


def _check_segment(number: int, segment: Segment, max_blocks: int, vocab_size: int, lowest: int) -> None:
    """What could not be served, or would read or write another request's rows without a word."""
    check_token_ids(segment.token_ids, vocab_size, f"request {number}", lowest=lowest)
    count = len(segment.token_ids)
    end = segment.start + count
    if segment.start < 0 or end > max_blocks * BLOCK_TOKENS:
        raise ValueError(
            f"request {number}: positions must lie in [0, {max_blocks * BLOCK_TOKENS}), got [{segment.start}, {end})"
        )
    for offset in segment.logit_offsets:
        if not 0 <= offset < count:
            raise ValueError(f"request {number}: a logit offset must be in [0, {count}), got {offset}")
    if count and segment.state_slot < 0:
        raise ValueError(f"request {number}: state_slot must be at least 0, got {segment.state_slot}")
    pages_per_block = BLOCK_TOKENS // WINDOW_PAGE_TOKENS
    for name, pages, size, width in (
        ("blocks", segment.blocks, BLOCK_TOKENS, max_blocks),
        ("window_pages", segment.window_pages, WINDOW_PAGE_TOKENS, max_blocks * pages_per_block),
    ):
        if len(pages) * size < end:
            raise ValueError(f"request {number}: {name} must cover {end} tokens, got {len(pages)} pages of {size}")
        if len(pages) > width:
            raise ValueError(f"request {number}: a page table must have at most {width} pages, got {len(pages)}")


def _check_written(segments: Sequence[Segment]) -> None:
    """A request's state slot, and window pages that it writes in this step, must be its own.

    Blocks are not asked: a draft of a request behind a shared prefix begins in its last block, where it writes nothing.
    """
    owners: dict[tuple[str, int], int] = {}
    for number, segment in enumerate(segments):
        if not len(segment.token_ids):
            continue
        first, last = segment.start, segment.start + len(segment.token_ids) - 1
        blocks = segment.blocks[first // BLOCK_TOKENS : last // BLOCK_TOKENS + 1]
        pages = segment.window_pages[first // WINDOW_PAGE_TOKENS : last // WINDOW_PAGE_TOKENS + 1]
        if min(blocks) < 0:
            raise ValueError(f"request {number}: a block must be at least 0, got {min(blocks)}")
        for name, places in (("window page", pages), ("state_slot", (segment.state_slot,))):
            for place in places:
                if place >= 0 and (owner := owners.setdefault((name, place), number)) != number:
                    raise ValueError(f"request {number}: a {name} must be its own, got {place} of request {owner}")
