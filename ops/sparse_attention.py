"""Attention of every row to its window and to compressed entries, with one shared head of keys that are also values.

Shapes: q ``[T, H, hd]`` fp32 or bf16; window_cache and entry_cache: head vectors (dense ``[pages, page_rows, hd]`` or
FP8 bytes); picks ``[T, K]`` int32; sink ``[H]`` fp32, −inf for none; positions ``[T]`` int64; row_requests ``[T]``
int32; window_tables ``[R, W]`` and block_tables ``[R, B]`` int32. Writes every row of out ``[T, H, hd]`` (dtype of q)
and lse ``[T, H]`` fp32, and returns nothing: the caller owns both buffers.
Keys of a row at position p, in this order: positions ``max(0, p - window + 1) … p`` in a list of fixed width
``window``; then, by ``entries``, nothing (``none``), entries ``0 … (p + 1) // ratio - 1`` (``all``) or its picks
(``picked``; −1 and picks that are not visible are ignored). Keys on absent pages are ignored.
Numerics: online softmax over blocks of 64 list places: fp32 scores ``q . k * scale``, running maximum, probabilities
relative to it rounded to q's dtype before they meet the values, fp32 sums. The sink then joins the denominator only.
lse is the natural log-sum-exp over the keys, without the sink. A row without keys gets out 0 and lse −inf.
Masked places contribute exactly nothing. ``deterministic``: every row is computed alone, up to its own last block;
otherwise neighbouring rows of a request may share the keys they read (``ops/_attention_tiles.py``), and a row's blocks
may be divided among programs (``ops/_attention_parts_kernel.py``). Rounding is the same in all forms.
Memory: temporaries stay under ``TEMPORARY_BYTES`` (beyond one row, which must fit).
Errors: ``ValueError`` for other dtypes, shapes or values of ``entries``.
Source: sparse attention of the official inference code; online softmax: Milakov and Gimelshein, 2018.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from . import _paged, _rows
from ._attention_tiles import KEY_BLOCK, attend_tile, tile_places
from ._cases import empty_cache
from ._example_rows import example_rows
from ._registry import Arguments, PrewarmCase, register
from .indexer_topk import reference as pick_entries
from .shapes import BLOCK_TOKENS, WINDOW_PAGE_TOKENS, Shape

TILE_ROWS = 64
SHARED_READ_LIMIT = 8  # a tile reads all visible entries while they are at most this many times the picks
TEMPORARY_BYTES = 16 << 20
_BYTES_PER_KEY_VALUE = 16  # gathered, masked, fp32 and transposed copies of one cache element
_BYTES_PER_PLACE = 64  # index, page and slot of one place of a key list
_DTYPES = (torch.float32, torch.bfloat16)
_RATIO = 4  # of the layers that pick entries
_ENTRIES = ("none", "all", "picked")


def _check(
    q: torch.Tensor,
    window_cache: torch.Tensor,
    entry_cache: torch.Tensor,
    picks: torch.Tensor,
    sink: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
    window: int,
    ratio: int,
    entries: str,
) -> None:
    """``tables``: positions, row_requests, window_tables and block_tables."""
    positions, row_requests, window_tables, block_tables = tables
    num_heads, dim = q.shape[1:]
    if q.dtype not in _DTYPES or out.dtype != q.dtype:
        raise ValueError(f"sparse_attention q and out must both be float32 or bfloat16, got {q.dtype} and {out.dtype}")
    if lse.dtype != torch.float32 or sink.dtype != torch.float32 or picks.dtype != torch.int32:
        raise ValueError(
            "sparse_attention lse, sink and picks must be float32, float32 and int32, "
            f"got {lse.dtype}, {sink.dtype} and {picks.dtype}"
        )
    if out.shape[1:] != (num_heads, dim) or lse.shape[1:] != (num_heads,) or sink.shape != (num_heads,):
        raise ValueError(
            f"sparse_attention out, lse and sink must have {num_heads} heads of {dim}, "
            f"got {list(out.shape[1:])}, {list(lse.shape[1:])} and {list(sink.shape)}"
        )
    for name, cache in (("window_cache", window_cache), ("entry_cache", entry_cache)):
        width = _paged.HEAD_DIM if cache.dtype == torch.uint8 else cache.shape[2]
        if width != dim:
            raise ValueError(f"sparse_attention {name} must have dimension {dim}, got {width}")
    if entries not in _ENTRIES:
        raise ValueError(f"sparse_attention entries must be one of {list(_ENTRIES)}, got {entries!r}")
    _rows.check_indices("sparse_attention", 1, positions=positions, row_requests=row_requests)
    _rows.check_indices("sparse_attention", 2, window_tables=window_tables, block_tables=block_tables)
    rows = {"positions": positions, "row_requests": row_requests, "out": out, "lse": lse}
    _rows.check_rows("sparse_attention", "q", q.shape[0], **rows, **{"picks": picks} if entries == "picked" else {})
    if entries != "none":
        _rows.check_rows("sparse_attention", "window_tables", window_tables.shape[0], block_tables=block_tables)
    if window < 1:
        raise ValueError(f"sparse_attention window must be at least 1, got {window}")
    if entries != "none" and ratio < 1:
        raise ValueError(f"sparse_attention ratio must be at least 1, got {ratio}")


class _KeyList(NamedTuple):
    """Flat cache rows of the keys of some rows, −1 = no key; the list is ``window`` then ``entry``."""

    window: torch.Tensor  # [rows, window]
    entry: torch.Tensor  # [rows, width], the list's length being a multiple of KEY_BLOCK

    def num_blocks(self) -> int:
        """Blocks up to the last key of any of the rows."""
        used = (torch.cat(self, dim=1) >= 0).any(0).nonzero()
        return 0 if used.numel() == 0 else int(used[-1]) // KEY_BLOCK + 1

    def read(
        self, block: int, window_cache: torch.Tensor, entry_cache: torch.Tensor, dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """fp32 keys ``[rows, KEY_BLOCK, dim]`` and their validity ``[rows, KEY_BLOCK]``."""
        width, first, last = self.window.shape[1], block * KEY_BLOCK, (block + 1) * KEY_BLOCK
        parts = (
            (window_cache, self.window[:, first:last]),
            (entry_cache, self.entry[:, max(0, first - width) : max(0, last - width)]),
        )
        keys = [_paged.read(cache, slots, dim).float() for cache, slots in parts if slots.shape[1]]
        return torch.cat(keys, dim=1), torch.cat([slots for _, slots in parts], dim=1) >= 0


def reference(
    q: torch.Tensor,
    window_cache: torch.Tensor,
    entry_cache: torch.Tensor,
    picks: torch.Tensor,
    sink: torch.Tensor,
    positions: torch.Tensor,
    row_requests: torch.Tensor,
    window_tables: torch.Tensor,
    block_tables: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    window: int,
    ratio: int,
    entries: str,
    scale: float,
    deterministic: bool,
) -> None:
    """Attend to the window and the chosen entries; write ``out`` and ``lse``."""
    tables = (positions, row_requests, window_tables, block_tables)
    _check(q, window_cache, entry_cache, picks, sink, tables, out, lse, window, ratio, entries)
    dim = q.shape[2]
    num_entries = block_tables.shape[1] * _paged.page_rows(entry_cache, dim)
    visible = torch.zeros_like(positions)
    if entries != "none":
        visible = torch.div(positions + 1, ratio, rounding_mode="floor").clamp(0, num_entries)
    out.zero_()
    lse.fill_(-torch.inf)
    for rows, shared in _row_groups(row_requests, visible, picks.shape[1], dim, entries, window, deterministic):
        requests = row_requests[rows].unsqueeze(1)
        chosen = picks[rows] if entries == "picked" else None

        def window_slots(index: torch.Tensor, requests: torch.Tensor = requests) -> torch.Tensor:
            return _paged.slots(window_tables, requests, index, _paged.page_rows(window_cache, dim))

        def entry_slots(index: torch.Tensor, requests: torch.Tensor = requests) -> torch.Tensor:
            return _paged.slots(block_tables, requests, index, _paged.page_rows(entry_cache, dim))

        if shared:
            places = tile_places(positions[rows], chosen, visible[rows], window)
            entries_seen = entry_slots(places.entry_index[None], requests[:1])
            slots = window_slots(places.window_index[None], requests[:1]), entries_seen
            keys = places.read(*slots, window_cache, entry_cache, dim)
            out[rows], lse[rows] = attend_tile(q[rows], keys, sink, scale)
        else:
            wanted = _entry_index(chosen, visible[rows])
            wanted = torch.nn.functional.pad(wanted, (0, -(window + wanted.shape[1]) % KEY_BLOCK), value=-1)
            key_list = _KeyList(window_slots(_window_index(positions[rows], window)), entry_slots(wanted))
            out[rows], lse[rows] = _attend(q[rows], key_list, window_cache, entry_cache, sink, scale)


def _row_groups(
    row_requests: torch.Tensor,
    visible: torch.Tensor,
    num_picks: int,
    dim: int,
    entries: str,
    window: int,
    deterministic: bool,
) -> Iterator[tuple[torch.Tensor, bool]]:
    """Row numbers that are computed together, and whether they share their keys; pads are left out.

    Each row by itself (``deterministic``); tiles of one request's rows that share their keys; or, where sharing would
    read far more entries than the rows picked, batches of rows that each gather their own.
    """
    if deterministic:
        yield from ((row, False) for row in (row_requests >= 0).nonzero())
        return
    gather_bytes = KEY_BLOCK * dim * _BYTES_PER_KEY_VALUE + (window + num_picks) * _BYTES_PER_PLACE
    gather_rows = max(1, TEMPORARY_BYTES // gather_bytes)
    for request in row_requests.unique().tolist():
        if request < 0:
            continue
        for tile in (row_requests == request).nonzero().squeeze(1).split(TILE_ROWS):
            if entries != "picked" or int(visible[tile].max()) <= SHARED_READ_LIMIT * num_picks:
                yield tile, True
            else:
                yield from ((rows, False) for rows in tile.split(gather_rows))


def _window_index(positions: torch.Tensor, window: int) -> torch.Tensor:
    """Positions ``[rows, window]`` inside the window of each row, oldest first, then −1."""
    positions = positions.unsqueeze(1)
    index = (positions - window + 1).clamp_min(0) + torch.arange(window, device=positions.device)
    return torch.where(index <= positions, index, -1)


def _entry_index(chosen: torch.Tensor | None, visible: torch.Tensor) -> torch.Tensor:
    """Entry numbers ``[rows, width]`` of each row's list, −1 = none: its picks, or all that are visible."""
    visible = visible.unsqueeze(1)
    if chosen is not None:
        index = chosen.long()
    else:
        index = torch.arange(int(visible.max()), device=visible.device).expand(visible.shape[0], -1)
    return torch.where((index >= 0) & (index < visible), index, -1)


def _attend(
    q: torch.Tensor,
    key_list: _KeyList,
    window_cache: torch.Tensor,
    entry_cache: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention output ``[rows, H, hd]`` in q's dtype and fp32 log-sum-exp ``[rows, H]``."""
    query = q.to(torch.float32, copy=True)
    acc, total = torch.zeros_like(query), query.new_zeros(query.shape[:2])
    maximum = torch.full_like(total, -torch.inf)
    for block in range(key_list.num_blocks()):
        keys, valid = key_list.read(block, window_cache, entry_cache, q.shape[2])
        scores = torch.bmm(query, keys.transpose(1, 2)).mul_(scale).masked_fill_(~valid.unsqueeze(1), -torch.inf)
        raised = torch.maximum(maximum, scores.amax(-1))
        base = raised.masked_fill(raised == -torch.inf, 0.0)  # no key yet: exp(-inf - 0) is 0, not NaN
        probs, decay = scores.sub_(base.unsqueeze(-1)).exp_(), torch.exp(maximum - base)
        total = total * decay + probs.sum(-1)
        acc = acc * decay.unsqueeze(-1) + torch.bmm(probs.to(q.dtype).float(), keys)
        maximum = raised
    empty = maximum == -torch.inf
    denominator = total + torch.exp(sink - maximum.masked_fill(empty, 0.0))
    out = (acc / denominator.unsqueeze(-1)).masked_fill_(empty.unsqueeze(-1), 0.0)
    return out.to(q.dtype), maximum + total.log()


def fake(
    q: torch.Tensor,
    window_cache: torch.Tensor,
    entry_cache: torch.Tensor,
    picks: torch.Tensor,
    sink: torch.Tensor,
    positions: torch.Tensor,
    row_requests: torch.Tensor,
    window_tables: torch.Tensor,
    block_tables: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    window: int,
    ratio: int,
    entries: str,
    scale: float,
    deterministic: bool,
) -> None:
    tables = (positions, row_requests, window_tables, block_tables)
    _check(q, window_cache, entry_cache, picks, sink, tables, out, lse, window, ratio, entries)


def example(shape: Shape, *, num_tokens: int, device: torch.device, dtype: torch.dtype, seed: int) -> Arguments:
    rows = example_rows(shape, num_tokens=num_tokens, device=device, seed=seed)
    g = torch.Generator(device="cpu").manual_seed(seed)
    ratio, page_rows = _RATIO, BLOCK_TOKENS // _RATIO
    q = torch.randn(num_tokens, shape.num_heads, shape.head_dim, generator=g).to(device, dtype)
    window_cache = torch.randn(rows.num_window_pages, WINDOW_PAGE_TOKENS, shape.head_dim, generator=g).to(device, dtype)
    entry_cache = torch.randn(rows.num_blocks, page_rows, shape.head_dim, generator=g).to(device, dtype)
    scores = torch.randn(num_tokens, rows.block_tables.shape[1] * page_rows, generator=g)
    picks = pick_entries(scores, rows.positions.cpu(), ratio=ratio, topk=shape.index_topk).to(device)
    sink = torch.randn(shape.num_heads, generator=g).to(device)
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan, device=device)
    args = (q, window_cache, entry_cache, picks, sink, rows.positions, rows.row_requests, rows.window_tables)
    args = (*args, rows.block_tables, out, lse)
    options = {"window": shape.window, "ratio": ratio, "entries": "picked", "scale": shape.head_dim**-0.5}
    return args, {**options, "deterministic": False}


def cuda(
    q: torch.Tensor,
    window_cache: torch.Tensor,
    entry_cache: torch.Tensor,
    picks: torch.Tensor,
    sink: torch.Tensor,
    positions: torch.Tensor,
    row_requests: torch.Tensor,
    window_tables: torch.Tensor,
    block_tables: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    window: int,
    ratio: int,
    entries: str,
    scale: float,
    deterministic: bool,
) -> None:
    """One program per row and block of heads, so that a row never depends on the others; few rows: several of them."""
    from . import sparse_attention_kernel

    tables = (positions, row_requests, window_tables, block_tables)
    _check(q, window_cache, entry_cache, picks, sink, tables, out, lse, window, ratio, entries)
    sparse_attention_kernel.run(
        q, window_cache, entry_cache, picks, sink, *tables, out, lse,
        window=window, ratio=ratio, entries=entries, scale=scale, deterministic=deterministic,
    )  # fmt: skip


def cuda_cases(shape: Shape, device: torch.device, max_tokens: int) -> tuple[PrewarmCase, ...]:
    """Layers with picks and all other layers, with bf16 and (where the head dimension has the layout) FP8 caches.

    Each as a single walk of the keys, which deterministic mode and many rows take, and divided, which few rows take.
    """
    from . import _attention_parts_kernel, sparse_attention_kernel

    cases: dict[tuple[str | int, ...], PrewarmCase] = {}
    storages = (torch.bfloat16, torch.uint8) if shape.head_dim == _paged.HEAD_DIM else (torch.bfloat16,)
    for storage, entries, deterministic in itertools.product(storages, ("picked", "all"), (True, False)):

        def arguments(
            storage: torch.dtype = storage, entries: str = entries, deterministic: bool = deterministic
        ) -> Arguments:
            args, options = example(shape, num_tokens=2, device=device, dtype=torch.bfloat16, seed=0)
            if storage == torch.uint8:
                sizes = [(c.shape[0], _paged.fp8_page_bytes(*c.shape[1:])) for c in args[1:3]]
                packed = [torch.zeros(size, dtype=storage, device=device) for size in sizes]
                args = (args[0], *packed, *args[3:])
            return args, {**options, "entries": entries, "deterministic": deterministic}

        q = torch.empty(1, shape.num_heads, shape.head_dim, dtype=torch.bfloat16, device="meta")
        meta = {"dtype": storage, "device": torch.device("meta")}
        pages = [empty_cache(1, n, shape.head_dim, **meta) for n in (WINDOW_PAGE_TOKENS, BLOCK_TOKENS // _RATIO)]
        keys = (sparse_attention_kernel.key(q, pages[0], shape.window, entries == "picked"),)
        if _attention_parts_kernel.serves(q, *pages, deterministic=deterministic):
            keys = _attention_parts_kernel.keys(q, pages[0], shape.window, entries == "picked")
        for key in keys:
            cases.setdefault(key, PrewarmCase(op="sparse_attention", key=key, arguments=arguments))
    return tuple(cases.values())


sparse_attention = register(
    "sparse_attention",
    "(Tensor q, Tensor window_cache, Tensor entry_cache, Tensor picks, Tensor sink, Tensor positions,"
    " Tensor row_requests, Tensor window_tables, Tensor block_tables, Tensor(a!) out, Tensor(b!) lse, *, int window,"
    " int ratio, str entries, float scale, bool deterministic) -> ()",
    reference=reference,
    fake=fake,
    example=example,
    cuda=cuda,
    cuda_cases=cuda_cases,
    boundary=True,
)
