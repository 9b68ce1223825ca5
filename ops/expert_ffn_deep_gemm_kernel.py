"""Routed experts with FP8 weights through DeepGEMM's grouped products; the kernels around them are ours.

DeepGEMM multiplies runs of 128 rows, each by the weights of one expert, in a buffer whose size the host must know. So:
group the pairs by expert in blocks of 128 slots (``_expert_blocks_kernel``), as many as the number of pairs can need
whatever the ids hold; copy each pair's row and scales to its slot; first product; SwiGLU, routing weight and FP8
rounding; second product; sum every row's parts in top-k order. Blocks without pairs have group −1: nothing is computed
for them. Slots without a pair are never written or read by our kernels; the products read what memory holds there, and
rows of a matrix product do not reach each other.

Scales are column-major, ``[K / 128, slots]`` in memory, as DeepGEMM wants them.
"""

import functools
import threading
import weakref

import torch
import triton
import triton.language as tl

from . import _deep_gemm, _deep_gemm_keys, _expert_blocks_kernel
from ._quant_kernel import quantize_fp8_rows
from ._registry import Arguments
from ._runtime import Key
from ._swiglu_kernel import swiglu
from ._triton import launch
from .shapes import Shape

RUN_ROWS, BLOCK = _deep_gemm_keys.GROUP_ROWS, _deep_gemm_keys.BLOCK
_RUN = tl.constexpr(RUN_ROWS)  # slots per block
_GROUP = tl.constexpr(BLOCK)  # columns per scale
_ROWS = 32  # slots per program: their scales of one group are a whole line
_COLUMNS = 512


@triton.jit(do_not_specialize=["capacity"], do_not_specialize_on_alignment=["x_scale_ptr"])
def _gather(
    x_ptr, x_scale_ptr, slots_ptr, owner_ptr, rows_ptr, row_scales_ptr, groups_ptr, places_ptr, capacity,
    cols: tl.constexpr, topk: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0) * rows + tl.arange(0, rows)
    expert = tl.load(owner_ptr + tl.program_id(0) * rows // _RUN)
    if tl.program_id(1) == 0:
        tl.store(groups_ptr + slot, tl.zeros([rows], tl.int32) + expert)
    if expert >= 0:
        pair = tl.load(slots_ptr + slot)
        held = pair >= 0
        if tl.program_id(1) == 0:
            tl.store(places_ptr + pair, slot, mask=held)
        token = (tl.maximum(pair, 0) // topk).to(tl.int64)
        column = tl.program_id(1) * block + tl.arange(0, block)
        inside = held[:, None] & (column < cols)[None, :]
        x = tl.load(x_ptr + token[:, None] * cols + column[None, :], mask=inside, other=0)
        tl.store(rows_ptr + slot.to(tl.int64)[:, None] * cols + column[None, :], x, mask=inside)
        groups: tl.constexpr = cols // _GROUP
        group = tl.program_id(1) * (block // _GROUP) + tl.arange(0, block // _GROUP)
        inside = held[:, None] & (group < groups)[None, :]
        scale = tl.load(x_scale_ptr + token[:, None] * groups + group[None, :], mask=inside, other=0.0)
        tl.store(row_scales_ptr + group.to(tl.int64)[None, :] * capacity + slot[:, None], scale, mask=inside)


@triton.jit(do_not_specialize=["capacity", "limit"], do_not_specialize_on_alignment=["route_ptr"])
def _activate(
    gate_up_ptr, slots_ptr, owner_ptr, route_ptr, out_ptr, scale_ptr, capacity, limit,
    inner: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    if tl.load(owner_ptr + tl.program_id(0) * rows // _RUN) < 0:
        return
    slot = tl.program_id(0) * rows + tl.arange(0, rows)
    pair = tl.load(slots_ptr + slot)
    held = pair >= 0
    group = tl.program_id(1)
    column = group * _GROUP + tl.arange(0, _GROUP)
    base = gate_up_ptr + slot.to(tl.int64)[:, None] * (2 * inner) + column[None, :]
    gate = tl.load(base, mask=held[:, None], other=0.0).to(tl.float32)
    up = tl.load(base + inner, mask=held[:, None], other=0.0).to(tl.float32)
    route = tl.load(route_ptr + pair, mask=held, other=0.0)
    value = swiglu(gate, up, limit) * route[:, None]
    codes, scale = quantize_fp8_rows(value.to(tl.bfloat16).to(tl.float32))
    tl.store(out_ptr + slot.to(tl.int64)[:, None] * inner + column[None, :], codes, mask=held[:, None])
    tl.store(scale_ptr + group.to(tl.int64) * capacity + slot, scale, mask=held)


@triton.jit(do_not_specialize=["experts"], do_not_specialize_on_alignment=["ids_ptr"])
def _sum_places(
    parts_ptr, places_ptr, ids_ptr, out_ptr, experts, hidden: tl.constexpr, topk: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < hidden
    total = tl.zeros([block], tl.float32)
    for k in tl.static_range(topk):
        expert = tl.load(ids_ptr + row * topk + k)
        held = (expert >= 0) & (expert < experts)
        place = tl.load(places_ptr + row * topk + k, mask=held, other=0).to(tl.int64)
        part = tl.load(parts_ptr + place * hidden + column, mask=inside & held, other=0.0)
        total += part.to(tl.float32)
    tl.store(out_ptr + row * hidden + column, total, mask=inside)


def fits(hidden: int, inner: int) -> bool:
    """Whether experts of these sizes suit: whole scale blocks, also where the up rows of w13 begin."""
    return inner % BLOCK == 0 and _deep_gemm.fits(2 * inner, hidden) and _deep_gemm.fits(hidden, inner)


def capacity(num_tokens: int, topk: int, experts: int) -> int:
    """Slots for ``num_tokens`` rows: a function of shapes alone, never of the ids."""
    return RUN_ROWS * _expert_blocks_kernel.num_blocks(num_tokens * topk, experts, RUN_ROWS)


def keys(hidden: int, inner: int, topk: int) -> dict[str, Key]:
    """What our launches are specialised on."""
    return {
        "gather": ("expert_ffn", "gather", hidden, topk),
        "activate": ("expert_ffn", "activate", inner),
        "sum": ("expert_ffn", "sum_places", hidden, topk),
    }


@functools.lru_cache(maxsize=16)
def product_keys(hidden: int, inner: int, topk: int, experts: int, max_tokens: int, num_sms: int) -> dict[Key, int]:
    """Every DeepGEMM key of calls with up to ``max_tokens`` rows, with the fewest rows that need it.

    The choice of a tile depends on rows, sizes and the number of experts, so it is asked for every reachable capacity.
    """
    found: dict[Key, int] = {}
    seen: set[int] = set()
    for num_tokens in range(1, max_tokens + 1):
        rows = capacity(num_tokens, topk, experts)
        if rows in seen:
            continue
        seen.add(rows)
        for out, cols in ((2 * inner, hidden), (hidden, inner)):
            found.setdefault(_deep_gemm_keys.grouped_gemm(rows, out, cols, experts, num_sms), num_tokens)
    return found


def run(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    out: torch.Tensor,
    limit: float,
) -> None:
    """Write the result of ``expert_ffn`` with e4m3 weights to ``out [T, D]`` fp32; rows do not depend on each other."""
    x, x_scale, ids, weights = (t.contiguous() for t in (x, x_scale, ids, weights))
    (tokens, topk), experts, hidden = ids.shape, w13.shape[0], out.shape[1]
    inner = w13.shape[1] // 2
    key = keys(hidden, inner, topk)
    slots, owner = _expert_blocks_kernel.run(ids, experts, RUN_ROWS)
    size = slots.shape[0]
    assert size == capacity(tokens, topk, experts)
    programs = size // _ROWS
    groups = torch.empty(size, dtype=torch.int32, device=x.device)
    places = torch.empty(ids.numel(), dtype=torch.int32, device=x.device)
    rows = torch.empty(size, hidden, dtype=x.dtype, device=x.device)
    row_scales = _scales(size, hidden, x.device)
    launch(
        key["gather"], _gather, (programs, triton.cdiv(hidden, _COLUMNS)),
        x.view(torch.uint8), x_scale, slots, owner, rows.view(torch.uint8), row_scales, groups, places, size,
        cols=hidden, topk=topk, rows=_ROWS, block=_COLUMNS, num_warps=4,
    )  # fmt: skip
    gate_up = torch.empty(size, 2 * inner, dtype=torch.bfloat16, device=x.device)
    _deep_gemm.m_grouped_gemm_nt_contiguous(
        rows, row_scales.t(), w13.contiguous(), w13_scale.contiguous(), gate_up, groups
    )
    del rows, row_scales
    hidden_rows = torch.empty(size, inner, dtype=x.dtype, device=x.device)
    hidden_scales = _scales(size, inner, x.device)
    launch(
        key["activate"], _activate, (programs, inner // BLOCK),
        gate_up, slots, owner, weights, hidden_rows, hidden_scales, size, limit,
        inner=inner, rows=_ROWS, num_warps=4,
    )  # fmt: skip
    del gate_up
    parts = torch.empty(size, hidden, dtype=torch.bfloat16, device=x.device)
    _deep_gemm.m_grouped_gemm_nt_contiguous(
        hidden_rows, hidden_scales.t(), w2.contiguous(), w2_scale.contiguous(), parts, groups
    )
    block = min(triton.next_power_of_2(hidden), 1024)
    launch(
        key["sum"], _sum_places, (tokens, triton.cdiv(hidden, block)), parts, places, ids, out, experts,
        hidden=hidden, topk=topk, block=block, num_warps=4,
    )  # fmt: skip


def _scales(size: int, cols: int, device: torch.device) -> torch.Tensor:
    return torch.empty(cols // BLOCK, size, dtype=torch.float32, device=device)


# ---- prewarm ---------------------------------------------------------------------------------------------------------

_blanks: "weakref.WeakValueDictionary[tuple, torch.Tensor]" = weakref.WeakValueDictionary()
_blanks_lock = threading.Lock()


def _blank(size: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """An uninitialised e4m3 tensor, shared by the calls that are alive: DeepGEMM's keys hold the number of experts, and
    all experts of Flash are 6 GB. Its values are never computed with, because blank rows have no expert."""
    with _blanks_lock:
        found = _blanks.get((size, device))
        if found is None:
            found = _blanks[size, device] = torch.empty(size, dtype=torch.float8_e4m3fn, device=device)
        return found


def arguments(shape: Shape, num_tokens: int, device: torch.device) -> Arguments:
    """A call with ``num_tokens`` rows without experts, beside as many experts as the model has."""
    hidden, inner, experts = shape.hidden, shape.expert_hidden, shape.num_experts
    ids = torch.full((num_tokens, shape.experts_per_token), -1, dtype=torch.int32, device=device)
    x = torch.zeros(num_tokens, hidden, dtype=torch.float8_e4m3fn, device=device)
    x_scale = torch.ones(num_tokens, hidden // BLOCK, device=device)
    weights = []
    for rows, cols in ((2 * inner, hidden), (hidden, inner)):
        weights.append(_blank((experts, rows, cols), device))
        weights.append(torch.ones(experts, -(-rows // BLOCK), cols // BLOCK, device=device))
    tensors = (x, x_scale, ids, torch.ones(ids.shape, device=device), *weights)
    return tensors, {"limit": shape.swiglu_limit, "deterministic": False}
