"""Every op against its reference: small and large row counts, long positions, layouts, poisoned memory."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from dsv4 import ops
from dsv4.ops import _example_rows
from dsv4.ops.shapes import Shape, flash, nano, pro, tiny

from . import op_libraries
from .common import Record, differs
from .models import using_backend
from .op_calls import CALLS, Call, indexer_logits
from .op_errors import (
    DETERMINISTIC,
    errors_by_mode,
    errors_of,
    fresh_memory_poisoned,
    layout_faults,
    merge_worst,
    outputs,
    to_device,
)
from .op_libraries import by_mode, case_name, checked
from .place import Place

TOKEN_COUNTS = (0, 1, 7, 33, 129)
MHC_COUNTS = (257, 1025, 2817, 4225)  # first of buckets with 26, 7, 2 and 1 parts of the products
LAYOUT_ROWS = 33
LONG = ("qkv_rope_cache", "compressor_update", "indexer_query", "indexer_logits", "indexer_topk", "sparse_attention",
        "grouped_o_proj")  # fmt: skip
_HEAVY = ("expert_ffn", "pcp_moe_shard")  # weights of an example take seconds: smaller calls are the end of the largest
_MANY = 1 << 24  # numbers that take a while on the CPU
_WIDTHS = {"flash": flash, "pro": pro}


def few_experts(shape: Shape) -> Shape:
    """16 experts and a small vocabulary: what differs between ops is elsewhere, and weights come from the CPU."""
    return replace(shape, name=f"{shape.name}-16-experts", num_experts=16, vocab=2048)


def _shapes(place: Place, backend: str) -> tuple[tuple[Shape, torch.dtype], ...]:
    """bf16 at every width; fp32, which only the references' users need, at one width and in Triton."""
    shapes = (tiny,) if place.dry else (nano, few_experts(flash), few_experts(pro))
    pairs = [(shape, torch.bfloat16) for shape in shapes]
    return (*pairs, *([(shapes[0], torch.float32)] if backend == "triton" else []))


def _specs(part: str) -> list[ops.OpSpec]:
    """Ops with kernels; ``part`` is ``i/n``, every n-th from the i-th."""
    number, parts = map(int, part.split("/"))
    return [s for s in ops.specs().values() if s.cuda is not None][number::parts]


def _example(spec: ops.OpSpec, shape: Shape, rows: int, dtype: torch.dtype, place: Place) -> Call:
    with _experts_made_on(place.device, shape.num_experts):
        args, kwargs = spec.example(shape, num_tokens=rows, device=torch.device("cpu"), dtype=dtype, seed=rows)
    return to_device(args, place.device), kwargs


@contextmanager
def _experts_made_on(device: torch.device, num_experts: int) -> Iterator[None]:
    """Examples draw experts' weights on ``device`` and bring them to FP4 there, one by one: on the CPU it took most of
    a section, 1e9 normal numbers alone 10 s."""
    module, randn = sys.modules["dsv4.ops.expert_ffn"], torch.randn
    pack = module._fp4

    def drawn(*size: Any, **options: Any) -> torch.Tensor:
        shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        if len(shape) != 3 or shape[0] != num_experts or shape.numel() < _MANY:
            return randn(*size, **options)
        return randn(shape, device=device, generator=torch.Generator(device=device).manual_seed(shape.numel()))

    def packed(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = [[t.cpu() for t in pack(expert.to(device))] for expert in weight]
        return tuple(map(torch.stack, zip(*parts, strict=True)))

    with patch.object(torch, "randn", drawn), patch.object(module, "_fp4", packed):
        yield


def _calls(
    spec: ops.OpSpec, shape: Shape, dtype: torch.dtype, counts: tuple[int, ...], place: Place
) -> Iterator[tuple[int, Call]]:
    """Random calls with ``counts`` rows; the last of several may be a pad."""
    if spec.name not in _HEAVY or not counts:
        yield from ((rows, _example(spec, shape, rows, dtype, place)) for rows in counts)
        return
    most = max(counts)
    args, kwargs = _example(spec, shape, most, dtype, place)
    names = [argument.name for argument in spec.overload._schema.arguments]
    for rows in counts:
        cut = [a[most - rows :] if a.shape[:1] == (most,) else a for a in args]
        if "num_valid" in names and rows:
            cut[names.index("num_valid")] = torch.full_like(args[names.index("num_valid")], max(1, rows - 1))
        by_table = {"hashed": rows < most // 4} if "hashed" in kwargs else {}  # the largest are routed by score
        yield rows, (tuple(cut), kwargs | by_table)


# ---- sections --------------------------------------------------------------------------------------------------------


def small(place: Place, record: Record, part: str, backend: str) -> None:
    """0 to 129 rows of nano, Flash and Pro; and what must not change a result."""
    seconds = record.samples.setdefault("ops_seconds", {}).setdefault(backend, {})
    for spec in _specs(part):
        if backend == "libraries" and spec.name not in op_libraries.OPS:
            continue
        began = time.perf_counter()
        with record.block("ops", "case_C8") as (found, empty), using_backend(backend, place):
            for shape, dtype in _shapes(place, backend):
                _small(spec, shape, dtype, place, backend, found, empty)
                free(place)
        with record.block("ops_layouts", "ops_poisoned") as (layouts, poisoned), using_backend(backend, place):
            shape = tiny if place.dry else few_experts(flash)
            counts = (LAYOUT_ROWS,)
            if backend == "libraries":
                counts = op_libraries.row_counts(spec.name, shape.index_heads, counts)[:1]
            for rows, call in _calls(spec, shape, torch.bfloat16, counts, place):
                args, modes = by_mode(spec, call, backend)
                kwargs = modes.get(DETERMINISTIC, modes[""])  # bits are compared
                with checked(spec, backend, rows, place)():
                    want = outputs(spec, args, kwargs)
                with fresh_memory_poisoned():
                    got = outputs(spec, args, kwargs)
                poisoned.setdefault(spec.name, {})[backend] = sum(map(differs, got, want))
                faults = layout_faults(spec, args, kwargs, want)
                layouts.setdefault(spec.name, {}).update({f"{backend}.{kind}": n for kind, n in faults.items()})
        seconds[spec.name] = round(time.perf_counter() - began, 1)
        free(place)


def _small(
    spec: ops.OpSpec, shape: Shape, dtype: torch.dtype, place: Place, backend: str, found: dict, empty: dict
) -> None:
    """Worst errors of one op at one shape, in both modes where it has them."""
    counts, worst = TOKEN_COUNTS, {}
    if backend == "libraries":
        counts = op_libraries.row_counts(spec.name, shape.index_heads, counts)
    for rows, call in _calls(spec, shape, dtype, counts, place):
        args, modes = by_mode(spec, call, backend)
        for mode, errors in errors_by_mode(spec, args, modes, checked(spec, backend, rows, place)).items():
            case = case_name(backend, shape.name, mode, spec=spec, dtype=dtype, backend=backend)
            if rows == 0:
                bad = int(any(name.endswith("mismatch") for name in errors))
                empty.setdefault(spec.name, {})[case] = bad
            merge_worst(worst.setdefault(case, {}), errors)
    if worst:
        found.setdefault(spec.name, {}).update(worst)


def free(place: Place) -> None:
    """Give back what the allocator keeps: other processes need it."""
    if not place.dry:
        torch.cuda.empty_cache()


def mhc_rows(place: Place, record: Record, backend: str) -> None:
    """mHC between 129 and 8,192 rows, where the number of parts of its products falls from 44 to 1; whole results."""
    for name, (width, shape) in ((n, w) for n in op_libraries.TILELANG for w in _WIDTHS.items()):
        with record.block("ops") as (found,), using_backend(backend, place), torch.no_grad():
            spec, case_of = ops.spec(name), partial(case_name, backend, width, spec=ops.spec(name), backend=backend)
            for rows in (5,) if place.dry else MHC_COUNTS:
                args, modes = by_mode(spec, CALLS[name](tiny if place.dry else shape, rows, place.device), backend)
                around = checked(spec, backend, rows, place)
                for mode, errors in errors_by_mode(spec, args, modes, around).items():
                    found.setdefault(name, {})[case_of(rows, mode, dtype=torch.bfloat16)] = errors
        free(place)


def large(place: Place, record: Record, width: str, part: str, backend: str) -> None:
    """8,192 rows of every model op at Flash or Pro shapes, in bf16."""
    shape, rows = (tiny, 65) if place.dry else (few_experts(_WIDTHS[width]), 8192)
    seconds = record.samples.setdefault("ops_large_seconds", {}).setdefault(f"{width}.{backend}", {})
    for spec in _specs(part):
        if spec.role not in ("model", "part") or (backend == "libraries" and spec.name not in op_libraries.OPS):
            continue
        if backend == "libraries" and not op_libraries.row_counts(spec.name, shape.index_heads, (rows,)):
            continue  # of a dry run
        _whole(spec, shape, width, rows, place, record, backend, seconds)


def _whole(
    spec: ops.OpSpec, shape: Shape, width: str, rows: int, place: Place, record: Record, backend: str, seconds: dict
) -> None:
    """Errors of all rows of one call with arguments of the op's example."""
    began = time.perf_counter()
    with record.block("ops_large") as (found,), using_backend(backend, place), torch.no_grad():
        args, modes = by_mode(spec, _example(spec, shape, rows, torch.bfloat16, place), backend)
        for mode, errors in errors_by_mode(spec, args, modes, checked(spec, backend, rows, place)).items():
            library = "" if backend == "triton" else backend
            case = case_name(width, rows, library, mode, spec=spec, dtype=torch.bfloat16, backend=backend)
            found.setdefault(spec.name, {})[case] = errors
    args = None
    seconds[spec.name] = round(time.perf_counter() - began, 1)
    free(place)


def rows_32768_examples(place: Place, record: Record) -> None:
    """Model ops of which no tensor comes near 2^31 elements, at Pro with 32,768 rows: whole results, up to 12 GB."""
    shape, rows = (tiny, 66) if place.dry else (few_experts(pro), 32768)
    seconds = record.samples.setdefault("ops_large_seconds", {}).setdefault("pro.32768", {})
    for spec in ops.specs().values():
        if spec.role in ("model", "part") and spec.name not in CALLS:
            _whole(spec, shape, "pro", rows, place, record, "triton", seconds)


def long_positions(place: Place, record: Record) -> None:
    """Steps whose last row is at position 1,048,575, with tables and caches of the full context."""
    context = 4096 if place.dry else 1 << 20
    before = _example_rows._first_position
    _example_rows._first_position = lambda request, count, context, g: context - count  # the end of the context
    try:
        for name in LONG:
            with record.block("ops_long_positions") as (found,), torch.no_grad():
                shape = replace(tiny if place.dry else few_experts(flash), max_context=context)
                for rows in (2, 17):
                    args, kwargs = _example(ops.spec(name), shape, rows, torch.bfloat16, place)
                    names = [argument.name for argument in ops.spec(name).overload._schema.arguments]
                    positions = args[names.index("positions")]
                    if name == "grouped_o_proj":  # its example has positions of its own
                        positions[: rows - 1] = torch.arange(context - rows + 1, context, device=place.device)
                    if int(positions.max()) != context - 1:
                        raise RuntimeError(f"rows must reach position {context - 1}, got {int(positions.max())}")
                    found.setdefault(name, {})[f"{rows}.bfloat16"] = errors_of(ops.spec(name), args, kwargs)
                    del args, positions
    finally:
        _example_rows._first_position = before


def indexer_memory(place: Place, record: Record, backend: str) -> None:
    """Peak memory of the indexer beyond inputs and results, over the bounds that its ops state.

    Scores: of 8,192 rows against 65,536 tokens; with libraries in the formats that DeepGEMM serves, e4m3 queries, an
    FP8 cache, fp32 scores. Picks, which make scores part by part: of 8,192 rows against 2^20 tokens.
    """
    with record.block("indexer_temporaries") as (found,), using_backend(backend, place), torch.no_grad():
        rows, context = (8, 1024) if place.dry else (8192, 65536)
        shape = replace(flash, index_heads=64, max_context=context)
        spec = ops.spec("indexer_logits")
        args, modes = by_mode(spec, indexer_logits(shape, rows, place.device), backend)
        with checked(spec, backend, rows, place)():
            found[backend] = _peak(lambda: ops.indexer_logits(*args, **modes[""]), place, _bound("indexer_logits"))
        if backend != "triton":
            return  # picks of these formats would be made by the same kernels
        shape = replace(shape, max_context=1024 if place.dry else 1 << 20)
        args, options = indexer_logits(shape, rows, place.device)
        for dtype in (torch.bfloat16, torch.float32):
            options |= {"dtype": dtype, "topk": shape.index_topk}
            call = partial(ops.indexer_picks, *args, **options)
            found[f"picks.{str(dtype).removeprefix('torch.')}"] = _peak(call, place, _bound("indexer_picks"))


def _bound(name: str) -> int:
    """Bytes that an op of the indexer states."""
    module = sys.modules[f"dsv4.ops.{name}"]  # the package attribute of this name is the op
    return module.SCORE_BYTES if name == "indexer_picks" else module.TEMPORARY_BYTES


def _peak(call: Callable[[], torch.Tensor], place: Place, bound: int) -> dict[str, int]:
    """Bytes at the peak of ``call``, and before it together with its result."""
    result = call()  # whatever a first call leaves behind
    size = result.numel() * result.element_size()
    del result
    if place.dry:
        return {}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return {"peak_bytes": torch.cuda.max_memory_allocated(), "before_bytes": before + size, "unit_bytes": bound}
