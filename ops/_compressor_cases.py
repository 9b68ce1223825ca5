"""Prewarm cases of the compressor ops: the model has a ratio-4 compressor with overlapping windows and a ratio-128 one
over head vectors, and a ratio-4 one over the indexer's vectors."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from . import _cases, _compressor
from ._example_rows import ExampleRows, example_rows
from ._registry import Arguments, PrewarmCase
from ._runtime import Key
from .shapes import BLOCK_TOKENS, Shape

NUM_ROWS = 4


@dataclass(frozen=True)
class Compressor:
    """One compressor of a model, and how it quantises when the numerics do."""

    ratio: int
    overlap: bool
    dim: int
    rope_dim: int
    quantized: str

    @property
    def width(self) -> int:
        return self.dim * (2 if self.overlap else 1)

    def rows(self, shape: Shape, device: torch.device) -> tuple[ExampleRows, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Metadata, rows, ape and state of a small step."""
        rows = example_rows(shape, num_tokens=NUM_ROWS, device=device, seed=0)
        ring = self.ratio * (2 if self.overlap else 1)
        kv_score, ape = (
            torch.zeros(n, k, device=device) for n, k in ((NUM_ROWS, 2 * self.width), (self.ratio, self.width))
        )
        return rows, kv_score, ape, torch.zeros(rows.num_slots, ring, 2 * self.width, device=device)

    def entry(
        self, rows: ExampleRows, dtype: torch.dtype, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Norm weight, RoPE table and cache."""
        weight = torch.ones(self.dim, device=device)
        table = torch.zeros(rows.max_context, self.rope_dim, device=device)
        page_rows = BLOCK_TOKENS // self.ratio
        return weight, table, _cases.empty_cache(rows.num_blocks, page_rows, self.dim, dtype=dtype, device=device)


def compressors(shape: Shape) -> tuple[Compressor, ...]:
    return (
        Compressor(4, True, shape.head_dim, shape.rope_dim, "fp8"),
        Compressor(128, False, shape.head_dim, shape.rope_dim, "fp8"),
        Compressor(4, True, shape.index_dim, shape.rope_dim, "fp4"),
    )


def _formats(shape: Shape) -> Iterator[tuple[Compressor, str, torch.dtype]]:
    for c in dict.fromkeys(compressors(shape)):
        for quantize, dtype in _cases.cache_formats(c.dim):
            yield c, c.quantized if quantize else "none", dtype


def _distinct(op: str, found: list[tuple[Key, Callable[[], Arguments]]]) -> tuple[PrewarmCase, ...]:
    return tuple(PrewarmCase(op=op, key=key, arguments=arguments) for key, arguments in dict(found).items())


def _entry_key(c: Compressor, quantize: str, dtype: torch.dtype) -> tuple[int, int, int, str, torch.dtype]:
    return c.dim, c.rope_dim, BLOCK_TOKENS // c.ratio, quantize, dtype


def update_cases(op: str, shape: Shape, device: torch.device) -> tuple[PrewarmCase, ...]:
    from . import _compressor_kernel as kernel

    found = []
    for c, quantize, dtype in _formats(shape):

        def arguments(c: Compressor = c, quantize: str = quantize, dtype: torch.dtype = dtype) -> Arguments:
            rows, kv_score, ape, state = c.rows(shape, device)
            weight, table, cache = c.entry(rows, dtype, device)
            args = (
                kv_score, ape, weight, table, rows.positions, rows.row_requests, rows.query_starts, rows.seq_lens,
                rows.block_tables, rows.state_slots, state, cache,
            )  # fmt: skip
            return args, {"ratio": c.ratio, "overlap": c.overlap, "eps": shape.eps, "quantize": quantize}

        found.append((kernel.pool_key(c.ratio, c.overlap, c.dim), arguments))
        found.append((kernel.second_key(c.ratio, c.width, _entry_key(c, quantize, dtype)), arguments))
    return _distinct(op, found)


def partials_cases(op: str, shape: Shape, device: torch.device) -> tuple[PrewarmCase, ...]:
    from . import _compressor_kernel as kernel

    found = []
    for c in compressors(shape):

        def arguments(c: Compressor = c) -> Arguments:
            rows, kv_score, ape, state = c.rows(shape, device)
            args = (
                kv_score, ape, rows.positions, rows.row_requests, rows.query_starts, rows.seq_lens, rows.state_slots,
                state,
            )  # fmt: skip
            return args, {"ratio": c.ratio, "overlap": c.overlap}

        found.append((kernel.pool_key(c.ratio, c.overlap, c.dim), arguments))
        found.append((kernel.second_key(c.ratio, c.width, None), arguments))
    return _distinct(op, found)


def merge_cases(op: str, shape: Shape, device: torch.device) -> tuple[PrewarmCase, ...]:
    from . import _compressor_kernel as kernel

    found = []
    for c, quantize, dtype in _formats(shape):

        def arguments(c: Compressor = c, quantize: str = quantize, dtype: torch.dtype = dtype) -> Arguments:
            rows, kv_score, *_ = c.rows(shape, device)
            partials = _compressor.alloc_partials(kv_score, rows.seq_lens, c.ratio, c.dim)
            args = (
                *(torch.zeros(2, *p.shape, device=device) for p in partials), *c.entry(rows, dtype, device)[:2],
                rows.positions, rows.row_requests, rows.block_tables, c.entry(rows, dtype, device)[2],
            )  # fmt: skip
            return args, {"ratio": c.ratio, "eps": shape.eps, "quantize": quantize}

        found.append((kernel.second_key(c.ratio, 0, _entry_key(c, quantize, dtype)), arguments))
    return _distinct(op, found)
