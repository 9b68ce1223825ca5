"""Requests fed through the compressor ops in arbitrary steps, and the official decode state machine in NumPy."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from dsv4 import ops
from dsv4.ops import _paged

EPS = 1e-6
CONTEXT = 512
SPARE = 2  # pages and slots that nobody owns: they must keep their poison
# Three requests over three steps of one ratio-4 or ratio-128 compressor: (request, first position, rows) per step.
STEPS = [((0, 0, 126), (1, 0, 3)), ((1, 3, 8), (0, 126, 135)), ((0, 261, 1), (1, 11, 130), (2, 0, 2))]
LENGTHS = (262, 141, 2)
Segment = tuple[int, int, torch.Tensor]  # request, first position, kv_score rows


@dataclass(frozen=True)
class Compressor:
    """Weights of one compressor."""

    ratio: int
    overlap: bool
    ape: torch.Tensor
    norm_weight: torch.Tensor
    rope_table: torch.Tensor

    @property
    def dim(self) -> int:
        return self.norm_weight.shape[0]

    @property
    def pooled(self) -> int:
        return self.ratio * (2 if self.overlap else 1)


def make_compressor(ratio: int, dim: int, rope_dim: int = 8, seed: int = 0) -> Compressor:
    g = torch.Generator().manual_seed(seed)
    overlap = ratio == 4
    angles = torch.outer(torch.arange(CONTEXT).float(), 1e4 ** (-torch.arange(rope_dim // 2) / (rope_dim / 2)))
    return Compressor(
        ratio=ratio,
        overlap=overlap,
        ape=torch.randn(ratio, dim * (2 if overlap else 1), generator=g),
        norm_weight=torch.randn(dim, generator=g),
        rope_table=torch.cat((angles.cos(), angles.sin()), dim=-1),
    )


def random_rows(compressor: Compressor, num_rows: int, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, 2 * compressor.ape.shape[1], generator=g) * 2


def bits(x: torch.Tensor) -> torch.Tensor:
    """Bytes, so that poison (NaN) compares equal to itself."""
    return x.contiguous().view(torch.uint8)


def feed_steps(session: "Session", prompts: list[torch.Tensor], pad: int) -> None:
    for segments in STEPS:
        session.step(*((r, first, prompts[r][first : first + n]) for r, first, n in segments), pad=pad)


class Session:
    """Caches of several requests. State and cache start as poison: reading what was never written shows."""

    def __init__(
        self,
        compressor: Compressor,
        *,
        num_requests: int = 1,
        ring: int | None = None,
        cache_dtype: torch.dtype = torch.float32,
        quantize: str = "none",
        update: Callable[..., None] | None = None,
    ) -> None:
        c = self.compressor = compressor
        self.quantize, self.update = quantize, update or update_op
        page_rows, blocks = 256 // c.ratio, CONTEXT // 256
        pages = num_requests * blocks + SPARE
        g = torch.Generator().manual_seed(num_requests)
        self.block_tables = torch.randperm(pages, generator=g)[: num_requests * blocks].view(num_requests, blocks).int()
        self.state_slots = torch.randperm(num_requests + SPARE, generator=g)[:num_requests].int()
        width = c.ape.shape[1]
        self.state = torch.full((num_requests + SPARE, ring or c.pooled, 2 * width), float("nan"))
        if cache_dtype == torch.uint8:
            self.cache = torch.full((pages, _paged.fp8_page_bytes(page_rows, c.dim)), 255, dtype=torch.uint8)
        else:
            self.cache = torch.full((pages, page_rows, c.dim), float("nan"), dtype=cache_dtype)

    def step(self, *segments: Segment, pad: int = 0) -> None:
        """One call with the rows of ``segments`` (in this request order) and ``pad`` pad rows and pad requests."""
        requests = [r for r, _, _ in segments]
        lengths = [len(rows) for _, _, rows in segments]
        positions = [torch.arange(first, first + len(rows)) for _, first, rows in segments]
        c, minus = self.compressor, torch.full((pad,), -1)
        rows = torch.cat([*(s for _, _, s in segments), torch.full((pad, 2 * c.ape.shape[1]), float("nan"))])
        ends = torch.tensor([first + len(s) for _, first, s in segments])
        owners = torch.repeat_interleave(torch.arange(len(segments)), torch.tensor(lengths))
        starts = torch.tensor([0, *lengths]).cumsum(0)
        self.update(
            self,
            kv_score=rows,
            positions=torch.cat([*positions, minus]),
            row_requests=torch.cat((owners, minus)).int(),
            query_starts=torch.cat((starts, starts[-1:].expand(pad))).int(),
            seq_lens=torch.cat((ends, minus)).int(),
            block_tables=torch.cat((self.block_tables[requests], minus.int().unsqueeze(1).expand(-1, CONTEXT // 256))),
            state_slots=torch.cat((self.state_slots[requests], minus.int())),
        )

    def feed(self, request: int, rows: torch.Tensor, chunk: int, first: int = 0) -> None:
        for start in range(0, len(rows), chunk):
            self.step((request, first + start, rows[start : start + chunk]))

    def entries(self, request: int, count: int) -> torch.Tensor:
        flat = self.slots(request, count)
        return _paged.read(self.cache, flat, self.compressor.dim)

    def slots(self, request: int, count: int) -> torch.Tensor:
        rows = 256 // self.compressor.ratio
        return _paged.slots(self.block_tables, torch.full((count,), request), torch.arange(count), rows)

    def stored(self, request: int, last: int, count: int) -> torch.Tensor:
        """State rows of the positions ``last - count + 1 … last``."""
        positions = torch.arange(last - count + 1, last + 1)
        return self.state[self.state_slots[request], positions % self.state.shape[1]]


def update_op(session: Session, **rows: torch.Tensor) -> None:
    c = session.compressor
    ops.compressor_update(
        rows["kv_score"], c.ape, c.norm_weight, c.rope_table, rows["positions"], rows["row_requests"],
        rows["query_starts"], rows["seq_lens"], rows["block_tables"], rows["state_slots"], session.state, session.cache,
        ratio=c.ratio, overlap=c.overlap, eps=EPS, quantize=session.quantize,
    )  # fmt: skip


def partials_op(session: Session, **rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    c = session.compressor
    return ops.compressor_partials(
        rows["kv_score"], c.ape, rows["positions"], rows["row_requests"], rows["query_starts"], rows["seq_lens"],
        rows["state_slots"], session.state, ratio=c.ratio, overlap=c.overlap,
    )  # fmt: skip


def merge_op(session: Session, partials: list[tuple[torch.Tensor, ...]], **rows: torch.Tensor) -> None:
    c = session.compressor
    ops.compressor_merge(
        *(torch.stack(ranks) for ranks in zip(*partials, strict=True)), c.norm_weight, c.rope_table, rows["positions"],
        rows["row_requests"], rows["block_tables"], session.cache, ratio=c.ratio, eps=EPS, quantize=session.quantize,
    )  # fmt: skip


def partials_and_merge(session: Session, **rows: torch.Tensor) -> None:
    """What one rank alone does with the two parallel ops."""
    merge_op(session, [partials_op(session, **rows)], **rows)


def official_pooled(compressor: Compressor, rows: torch.Tensor) -> Iterator[np.ndarray]:
    """Pooled vectors (float64) of one request from position 0, one token at a time.

    The state is the official one: with overlap the previous window and then the current one, shifted after each
    emission; otherwise the current window.
    """
    ratio, overlap = compressor.ratio, compressor.overlap
    width, ape = compressor.ape.shape[1], compressor.ape.numpy()
    kv_state = np.zeros((compressor.pooled, width))
    score_state = np.full((compressor.pooled, width), -np.inf)
    for position, row in enumerate(rows.numpy().astype(np.float64)):
        slot = position % ratio + (ratio if overlap else 0)
        kv_state[slot] = row[:width]
        score_state[slot] = (rows[position, width:].numpy() + ape[position % ratio]).astype(np.float64)
        if (position + 1) % ratio:
            continue
        kv, score = kv_state, score_state
        if overlap:
            half = width // 2
            kv = np.concatenate((kv[:ratio, :half], kv[ratio:, half:]))
            score = np.concatenate((score[:ratio, :half], score[ratio:, half:]))
        weight = np.exp(score - score.max(0))
        yield (kv * (weight / weight.sum(0))).sum(0)
        if overlap:
            kv_state[:ratio], score_state[:ratio] = kv_state[ratio:], score_state[ratio:]


def official_entries(compressor: Compressor, rows: torch.Tensor, quantize: str = "none") -> np.ndarray:
    """Cache entries of one request from position 0."""
    entries = [
        finish(compressor, pooled, window * compressor.ratio, quantize)
        for window, pooled in enumerate(official_pooled(compressor, rows))
    ]
    return np.stack(entries) if entries else np.zeros((0, compressor.dim))


def finish(compressor: Compressor, pooled: np.ndarray, position: int, quantize: str) -> np.ndarray:
    """Normalise, rotate at ``position`` and quantise one pooled vector; bf16 between the steps unless ``none``."""
    act = (lambda x: x) if quantize == "none" else round_bf16
    x = act(pooled)
    x = act(x / np.sqrt((x**2).mean() + EPS) * compressor.norm_weight.numpy())
    rope_dim = compressor.rope_table.shape[1]
    row = compressor.rope_table[position].numpy()
    turn = (x[-rope_dim::2] + 1j * x[-rope_dim + 1 :: 2]) * (row[: rope_dim // 2] + 1j * row[rope_dim // 2 :])
    x = x.copy()
    x[-rope_dim::2], x[-rope_dim + 1 :: 2] = act(turn.real), act(turn.imag)
    if quantize == "fp8":
        nope = x[:-rope_dim]
        for start in range(0, nope.size, 64):
            nope[start : start + 64] = fp8_block(nope[start : start + 64])
    elif quantize == "fp4":
        matrix = np.ones((1, 1))
        while len(matrix) < x.size:
            matrix = np.kron(np.array([[1, 1], [1, -1]]), matrix)
        x = act(matrix @ x * x.size**-0.5)
        x = np.concatenate([fp4_block(b) for b in np.split(x, x.size // 32)])
    return x


def round_bf16(x: np.ndarray) -> np.ndarray:
    return torch.tensor(x, dtype=torch.float32).bfloat16().double().numpy()


def fp8_block(x: np.ndarray) -> np.ndarray:
    """One block rounded to e4m3: four significant bits, at least 2^-9 apart."""
    scale = 2.0 ** np.ceil(np.log2(max(np.abs(x).max(), 1e-4) / 448))
    scaled = x / scale
    step = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(np.abs(scaled), 2.0**-20))), -6) - 3)
    return np.rint(scaled / step) * step * scale


def fp4_block(x: np.ndarray) -> np.ndarray:
    """One block rounded to e2m1: two significant bits, at least 0.5 apart."""
    scale = 2.0 ** np.ceil(np.log2(max(np.abs(x).max(), 6 * 2.0**-126) / 6))
    scaled = x / scale
    step = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(np.abs(scaled), 2.0**-20))), 0) - 1)
    return np.rint(scaled / step) * step * scale
