"""What one step reads: :class:`StepInputs`, and how it is built from per-request segments.

Legend: T rows, R requests, L logit rows, B logical blocks (256 tokens), W window pages (128 tokens).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from .config import ModelConfig
from .ops.shapes import BLOCK_TOKENS, WINDOW_PAGE_TOKENS
from .transfer import upload

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
        ValueError: a token id out of range, a row beyond the tables, or a padded size below the real one.
    """
    total = sum(len(s.token_ids) for s in segments)
    num_rows = total if num_rows is None else num_rows
    num_requests = len(segments) if num_requests is None else num_requests
    for name, size, need in (("num_rows", num_rows, total), ("num_requests", num_requests, len(segments))):
        if size < need:
            raise ValueError(f"{name} must be at least {need}, got {size}")
    max_pages = max_blocks * (BLOCK_TOKENS // WINDOW_PAGE_TOKENS)
    tokens, positions, requests, slots, starts, logit_rows = [], [], [], [], [0], []
    block_rows, page_rows = [], []
    for number, segment in enumerate(segments):
        lowest = UNKNOWN_TOKEN if embedded else 0
        check_token_ids(segment.token_ids, vocab_size, f"request {number}", lowest=lowest)
        end = segment.start + len(segment.token_ids)
        if segment.start < 0 or end > max_blocks * BLOCK_TOKENS:
            raise ValueError(
                f"request {number}: positions must lie in [0, {max_blocks * BLOCK_TOKENS}), "
                f"got [{segment.start}, {end})"
            )
        _check_segment(number, segment, end)
        first = len(tokens)
        tokens.extend(segment.token_ids)
        for position in range(segment.start, end):
            page = segment.window_pages[position // WINDOW_PAGE_TOKENS]
            slots.append(page * WINDOW_PAGE_TOKENS + position % WINDOW_PAGE_TOKENS if page >= 0 else -1)
        positions.extend(range(segment.start, end))
        requests.extend([number] * (end - segment.start))
        starts.append(len(tokens))
        logit_rows.extend(first + offset for offset in segment.logit_offsets)
        block_rows.append(_padded(segment.blocks, max_blocks))
        page_rows.append(_padded(segment.window_pages, max_pages))
    pad_rows, pad_requests = num_rows - total, num_requests - len(segments)
    lens = [s.start + len(s.token_ids) for s in segments]

    def tensor(values: list, dtype: torch.dtype) -> torch.Tensor:
        return upload(values, dtype, device)

    return StepInputs(
        token_ids=tensor(tokens + [-1] * pad_rows, torch.int64),
        positions=tensor(positions + [-1] * pad_rows, torch.int64),
        row_requests=tensor(requests + [-1] * pad_rows, torch.int32),
        query_starts=tensor(starts + [total] * pad_requests, torch.int32),
        seq_lens=tensor(lens + [0] * pad_requests, torch.int32),
        block_tables=tensor(block_rows + [[-1] * max_blocks] * pad_requests, torch.int32).view(-1, max_blocks),
        window_tables=tensor(page_rows + [[-1] * max_pages] * pad_requests, torch.int32).view(-1, max_pages),
        window_slots=tensor(slots + [-1] * pad_rows, torch.int64),
        state_slots=tensor([s.state_slot for s in segments] + [-1] * pad_requests, torch.int32),
        num_valid=tensor([total], torch.int32),
        logit_rows=tensor(logit_rows, torch.int64),
    )


def _check_segment(number: int, segment: Segment, end: int) -> None:
    """What would otherwise read or write another request's rows without a word."""
    count = len(segment.token_ids)
    for offset in segment.logit_offsets:
        if not 0 <= offset < count:
            raise ValueError(f"request {number}: a logit offset must be in [0, {count}), got {offset}")
    if count and segment.state_slot < 0:
        raise ValueError(f"request {number}: state_slot must be at least 0, got {segment.state_slot}")
    for name, pages, size in (
        ("blocks", segment.blocks, BLOCK_TOKENS),
        ("window_pages", segment.window_pages, WINDOW_PAGE_TOKENS),
    ):
        if len(pages) * size < end:
            raise ValueError(f"request {number}: {name} must cover {end} tokens, got {len(pages)} pages of {size}")


def _padded(values: Sequence[int], width: int) -> list[int]:
    if len(values) > width:
        raise ValueError(f"a page table must have at most {width} pages, got {len(values)}")
    return [*values, *[-1] * (width - len(values))]
