"""Random but consistent row metadata for the ``example`` functions of ops (see "Row metadata" in docs/ops.md)."""

from dataclasses import dataclass

import torch

from .shapes import BLOCK_TOKENS, WINDOW_PAGE_TOKENS, Shape

MAX_REQUESTS = 3
SPARE_PAGES = 2  # pages and slots nobody owns


@dataclass(frozen=True, kw_only=True)
class ExampleRows:
    """Metadata of one step of T rows and R requests; the names are those of docs/ops.md."""

    positions: torch.Tensor  # [T] int64
    row_requests: torch.Tensor  # [T] int32
    query_starts: torch.Tensor  # [R + 1] int32
    seq_lens: torch.Tensor  # [R] int32
    block_tables: torch.Tensor  # [R, max_context / 256] int32
    window_tables: torch.Tensor  # [R, max_context / 128] int32
    window_slots: torch.Tensor  # [T] int64
    state_slots: torch.Tensor  # [R] int32
    num_valid: torch.Tensor  # [1] int32
    num_blocks: int  # physical blocks of 256 tokens a cache needs
    num_window_pages: int  # physical pages of 128 tokens a window cache needs
    num_slots: int  # request slots a compressor state needs
    max_context: int  # positions a RoPE table needs


def example_rows(shape: Shape, *, num_tokens: int, device: torch.device, seed: int, pad: bool = True) -> ExampleRows:
    """Split ``num_tokens`` rows over up to three requests that are already in mid-context.

    The first row of the first request ends a window of 128 tokens, so compressors of every ratio have work. Physical
    pages and state slots are distinct and shuffled; window pages that no row can see any more are absent.

    Args:
        shape: ``window`` and ``max_context`` are read; ``max_context`` grows when the rows need more.
        num_tokens: T, pad row included; 0 is allowed.
        device: of every tensor.
        seed: of everything random.
        pad: append a pad request and, from two rows on, make the last row a pad.
    """
    g = torch.Generator(device="cpu").manual_seed(seed)
    valid = num_tokens - 1 if pad and num_tokens > 1 else num_tokens
    counts = _split(valid, g)
    context = -(-max(shape.max_context, 2 * max(counts, default=0) + WINDOW_PAGE_TOKENS) // BLOCK_TOKENS) * BLOCK_TOKENS
    starts = [_first_position(r, count, context, g) for r, count in enumerate(counts)]
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    first_seen = [max(0, start - shape.window + 1) for start in starts]
    block_tables, num_blocks = _pages([0] * len(ends), ends, context, BLOCK_TOKENS, g)
    window_tables, num_window_pages = _pages(first_seen, ends, context, WINDOW_PAGE_TOKENS, g)
    num_slots = len(counts) + SPARE_PAGES
    state_slots = torch.randperm(num_slots, generator=g)[: len(counts)]

    positions = torch.cat([torch.arange(a, b) for a, b in zip(starts, ends, strict=True)] or [torch.empty(0)]).long()
    requests = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts, dtype=torch.long))
    pages = window_tables[requests, positions // WINDOW_PAGE_TOKENS]
    window_slots = pages * WINDOW_PAGE_TOKENS + positions % WINDOW_PAGE_TOKENS
    query_starts = torch.tensor([0, *counts], dtype=torch.long).cumsum(0)
    seq_lens = torch.tensor(ends, dtype=torch.long)
    if pad:
        query_starts, seq_lens = torch.cat((query_starts, query_starts[-1:])), _extend(seq_lens, 1)
        block_tables, window_tables = _extend(block_tables, 1), _extend(window_tables, 1)
        state_slots = _extend(state_slots, 1)
    pad_rows = num_tokens - valid
    return ExampleRows(
        positions=_extend(positions, pad_rows).to(device),
        row_requests=_extend(requests, pad_rows).to(device, torch.int32),
        query_starts=query_starts.to(device, torch.int32),
        seq_lens=seq_lens.to(device, torch.int32),
        block_tables=block_tables.to(device, torch.int32),
        window_tables=window_tables.to(device, torch.int32),
        window_slots=_extend(window_slots, pad_rows).to(device),
        state_slots=state_slots.to(device, torch.int32),
        num_valid=torch.tensor([valid], dtype=torch.int32, device=device),
        num_blocks=num_blocks,
        num_window_pages=num_window_pages,
        num_slots=num_slots,
        max_context=context,
    )


def example_rope_table(num_positions: int, rope_dim: int, g: torch.Generator) -> torch.Tensor:
    """Cosines and sines ``[num_positions, rope_dim]`` of random angles, on the CPU."""
    angles = torch.rand(num_positions, rope_dim // 2, generator=g) * (2 * torch.pi)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _split(num_rows: int, g: torch.Generator) -> list[int]:
    """Rows per request, each at least one."""
    if num_rows == 0:
        return []
    parts = min(MAX_REQUESTS, num_rows)
    cuts = (torch.randperm(num_rows - 1, generator=g)[: parts - 1] + 1).sort().values.tolist()
    return [b - a for a, b in zip([0, *cuts], [*cuts, num_rows], strict=True)]


def _first_position(request: int, count: int, context: int, g: torch.Generator) -> int:
    last = context - count
    if request == 0:
        pages = (last + 1) // WINDOW_PAGE_TOKENS
        return int(torch.randint(1, pages + 1, (), generator=g)) * WINDOW_PAGE_TOKENS - 1
    return int(torch.randint(1, last + 1, (), generator=g))


def _pages(
    firsts: list[int], ends: list[int], context: int, page_tokens: int, g: torch.Generator
) -> tuple[torch.Tensor, int]:
    """Page table ``[R, context / page_tokens]`` covering positions ``first … end - 1``, and the number of pages."""
    page = torch.arange(context // page_tokens)
    first, end = torch.tensor(firsts, dtype=torch.long), torch.tensor(ends, dtype=torch.long)
    owned = (page >= first.unsqueeze(1) // page_tokens) & (page * page_tokens < end.unsqueeze(1))
    total = int(owned.sum()) + SPARE_PAGES
    table = torch.full(owned.shape, -1, dtype=torch.long)
    table[owned] = torch.randperm(total, generator=g)[: total - SPARE_PAGES]
    return table, total


def _extend(x: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat((x, x.new_full((rows, *x.shape[1:]), -1)))
