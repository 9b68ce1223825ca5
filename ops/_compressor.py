"""Learned pooling of token windows into cache entries: the maths shared by the compressor ops.

Entry w of a request pools the positions ``w*ratio … w*ratio + ratio - 1`` or, with overlapping windows, also the
``ratio`` positions before them; the former give their channels ``[d, 2d)``, the latter their channels ``[0, d)``.
A softmax per channel over the pooled positions weighs their values. It is kept as (maximum, sum of exponentials,
weighted sum), which merges over ranks; sums are pairwise trees over the fixed number of pooled positions, so an
entry depends on nothing but its own rows.
"""

from dataclasses import dataclass

import torch

from . import _formats, _paged, _rope
from ._example_rows import ExampleRows, example_rope_table, example_rows
from ._rows import check_indices, check_rows, rms_normalize
from .shapes import BLOCK_TOKENS, Shape

QUANTIZE = ("none", "fp8", "fp4")
Partials = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class StepRows:
    """Row metadata of one step (docs/ops.md)."""

    positions: torch.Tensor
    row_requests: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    state_slots: torch.Tensor


def check_pool(
    op: str, kv_score: torch.Tensor, ape: torch.Tensor, state: torch.Tensor, ratio: int, overlap: bool
) -> int:
    """Check shapes and dtypes of what is pooled; returns ``d``, the dimensions of an entry."""
    if ratio < 1:
        raise ValueError(f"{op} ratio must be positive, got {ratio}")
    if ape.dim() != 2 or ape.shape[0] != ratio or ape.shape[1] % (2 if overlap else 1):
        raise ValueError(f"{op} ape must be [{ratio}, width], width even if windows overlap, got {list(ape.shape)}")
    width = ape.shape[1]
    if kv_score.dim() != 2 or kv_score.shape[1] != 2 * width:
        raise ValueError(f"{op} kv_score must be [tokens, {2 * width}], got {list(kv_score.shape)}")
    if state.dim() != 3 or state.shape[2] != 2 * width:
        raise ValueError(f"{op} state must be [slots, ring, {2 * width}], got {list(state.shape)}")
    pooled = ratio * (2 if overlap else 1)
    if state.shape[1] < pooled:
        raise ValueError(f"{op} ring must have at least {pooled} rows, got {state.shape[1]}")
    for name, tensor in (("kv_score", kv_score), ("ape", ape), ("state", state)):
        if tensor.dtype != torch.float32:
            raise ValueError(f"{op} {name} must be float32, got {tensor.dtype}")
    return width // 2 if overlap else width


def check_entry(
    op: str, dim: int, norm_weight: torch.Tensor, rope_table: torch.Tensor, cache: torch.Tensor, quantize: str
) -> None:
    """Check what turns a pooled vector of ``dim`` into a cache entry."""
    if norm_weight.shape != (dim,):
        raise ValueError(f"{op} norm_weight must have shape [{dim}], got {list(norm_weight.shape)}")
    _rope.check(op, rope_table, dim)
    if quantize not in QUANTIZE:
        raise ValueError(f"{op} quantize must be one of {list(QUANTIZE)}, got {quantize!r}")
    if quantize == "fp4" and dim & (dim - 1):
        raise ValueError(f"{op} entries must have a power-of-two size for the Hadamard transform, got {dim}")
    _paged.check(op, cache, dim)


def check_step(op: str, kv_score: torch.Tensor, step: StepRows) -> None:
    """Raise unless the row metadata are of the rows of ``kv_score`` and of as many requests as ``seq_lens`` has."""
    check_indices(op, 1, **vars(step))
    check_rows(op, "kv_score", kv_score.shape[0], positions=step.positions, row_requests=step.row_requests)
    requests = step.seq_lens.shape[0]
    check_rows(op, "seq_lens", requests, state_slots=step.state_slots)
    check_rows(op, "seq_lens and one more", requests + 1, query_starts=step.query_starts)


def alloc_partials(kv_score: torch.Tensor, seq_lens: torch.Tensor, ratio: int, dim: int) -> Partials:
    """Uninitialised partials ``[num_tokens // ratio + num_requests, dim]``."""
    capacity = kv_score.shape[0] // ratio + seq_lens.shape[0]
    maximum, total, weighted = (kv_score.new_empty(capacity, dim) for _ in range(3))
    return maximum, total, weighted


def emitting_rows(positions: torch.Tensor, row_requests: torch.Tensor, ratio: int) -> torch.Tensor:
    """Numbers of the rows whose position ends a window of ``ratio`` tokens."""
    return torch.nonzero((positions >= 0) & (row_requests >= 0) & ((positions + 1) % ratio == 0)).squeeze(1)


def partial_index(emit: torch.Tensor, row_requests: torch.Tensor, ratio: int) -> torch.Tensor:
    """Row of the partials that holds the window ending at each row in ``emit``."""
    return torch.div(emit, ratio, rounding_mode="floor") + row_requests[emit].long()


def pool_rows(
    kv_score: torch.Tensor, ape: torch.Tensor, step: StepRows, state: torch.Tensor, emit: torch.Tensor, overlap: bool
) -> Partials:
    """Pool the window of every row in ``emit`` (``[E, d]`` fp32 each), then store the step's rows in ``state``."""
    ratio, width = ape.shape
    rows = kv_score.clone()
    rows[:, width:] += ape[step.positions.clamp_min(0) % ratio]
    age = torch.arange(ratio - 1, -1, -1, device=emit.device)
    if overlap:
        dim = width // 2
        before = _gather(rows, step, state, emit, age + ratio, 0, dim)
        inside = _gather(rows, step, state, emit, age, dim, dim)
        kv, score = (torch.cat(halves, dim=1) for halves in zip(before, inside, strict=True))
    else:
        kv, score = _gather(rows, step, state, emit, age, 0, width)
    _store(rows, step, state)
    maximum = score.amax(1)
    weight = torch.exp(score - _finite(maximum).unsqueeze(1))
    return maximum, _tree_sum(weight), _tree_sum(weight * kv)


def merge_partials(
    maxima: torch.Tensor, totals: torch.Tensor, weighted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pooled vectors ``[E, d]`` of the partials ``[P, E, d]`` of P ranks, and which entries any rank had rows for."""
    rescale = torch.exp(maxima - _finite(maxima.amax(0))).transpose(0, 1)
    total = _tree_sum(totals.transpose(0, 1) * rescale)
    value = _tree_sum(weighted.transpose(0, 1) * rescale)
    return torch.where(total == 0, 0.0, value / total), (total != 0).any(-1)


def write_entries(
    pooled: torch.Tensor,
    found: torch.Tensor,
    positions: torch.Tensor,
    requests: torch.Tensor,
    norm_weight: torch.Tensor,
    rope_table: torch.Tensor,
    block_tables: torch.Tensor,
    cache: torch.Tensor,
    *,
    ratio: int,
    eps: float,
    quantize: str,
) -> None:
    """Normalise, rotate, quantise and store the entries whose windows end at ``positions`` of ``requests``."""
    value = pooled if quantize == "none" else pooled.bfloat16()
    angles = _rope.table_rows(rope_table, positions - (ratio - 1))
    value = _rope.rotate(rms_normalize(value, norm_weight, eps), angles)
    if quantize == "fp8":
        value = _formats.simulate_kv(value, rope_table.shape[1])
    elif quantize == "fp4":
        value = _formats.simulate_fp4(_formats.hadamard(value))
    entry = torch.div(positions, ratio, rounding_mode="floor")
    flat = _paged.slots(block_tables, requests, entry, _paged.page_rows(cache, value.shape[-1]))
    _paged.write(cache, torch.where(found, flat, -1), value)


def _gather(
    rows: torch.Tensor, step: StepRows, state: torch.Tensor, emit: torch.Tensor, age: torch.Tensor, start: int, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scores ``[E, len(age), dim]``, ``age`` positions before ``emit``, from channel ``start`` on."""
    request = step.row_requests[emit].long()
    slot = step.state_slots[request].long().unsqueeze(1)
    position, row = step.positions[emit].unsqueeze(1) - age, emit.unsqueeze(1) - age
    fresh = row >= step.query_starts[request].unsqueeze(1)
    exists = ((position >= 0) & (fresh | (slot >= 0))).unsqueeze(-1)
    parts = []
    for first, empty in ((start, 0.0), (rows.shape[1] // 2 + start, float("-inf"))):
        new = rows[:, first : first + dim][row.clamp_min(0)]
        old = state[:, :, first : first + dim][slot.clamp_min(0), position % state.shape[1]]
        parts.append(torch.where(exists, torch.where(fresh.unsqueeze(-1), new, old), empty))
    return parts[0], parts[1]


def _store(rows: torch.Tensor, step: StepRows, state: torch.Tensor) -> None:
    """Keep the newest rows of every request at ``position % ring``; every state row is written at most once."""
    ring = state.shape[1]
    row = torch.nonzero((step.positions >= 0) & (step.row_requests >= 0)).squeeze(1)
    request = step.row_requests[row].long()
    row = row[(step.state_slots[request] >= 0) & (step.positions[row] >= step.seq_lens[request] - ring)]
    state[step.state_slots[step.row_requests[row].long()].long(), step.positions[row] % ring] = rows[row]


def _finite(maximum: torch.Tensor) -> torch.Tensor:
    """``maximum`` with −inf (nothing pooled) as 0, so that ``exp(−inf − maximum)`` is 0 and not NaN."""
    return torch.where(maximum == float("-inf"), 0.0, maximum)


def _tree_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over dimension 1 by halving: elementwise additions whose order depends only on the size of that dimension."""
    while (size := x.shape[1]) > 1:
        half = size // 2
        pairs = x[:, :half] + x[:, half : 2 * half]
        x = torch.cat((pairs, x[:, 2 * half :]), dim=1) if size % 2 else pairs
    return x.squeeze(1)


EXAMPLE_RATIO, EXAMPLE_RING = 4, 11  # overlapping windows, and room for four rejected rows


@dataclass(frozen=True)
class ExampleInputs:
    """Random inputs of a ratio-4 compressor with overlapping windows over head vectors."""

    rows: ExampleRows
    kv_score: torch.Tensor
    ape: torch.Tensor
    norm_weight: torch.Tensor
    rope_table: torch.Tensor
    state: torch.Tensor
    cache: torch.Tensor
    ratio: int = EXAMPLE_RATIO


def example_inputs(
    shape: Shape, *, num_tokens: int, device: torch.device, dtype: torch.dtype, seed: int
) -> ExampleInputs:
    """Inputs for the ``example`` functions of the compressor ops; ``dtype`` is that of weight and cache."""
    rows = example_rows(shape, num_tokens=num_tokens, device=device, seed=seed)
    g = torch.Generator(device="cpu").manual_seed(seed)
    dim, width = shape.head_dim, 2 * shape.head_dim

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=g).to(device)

    return ExampleInputs(
        rows=rows,
        kv_score=randn(num_tokens, 2 * width),
        ape=randn(EXAMPLE_RATIO, width),
        norm_weight=randn(dim).to(dtype),
        rope_table=example_rope_table(rows.max_context, shape.rope_dim, g).to(device),
        state=randn(rows.num_slots, EXAMPLE_RING, 2 * width),
        cache=randn(rows.num_blocks, BLOCK_TOKENS // EXAMPLE_RATIO, dim).to(dtype),
    )
