"""Every op against its reference: small and large row counts, long positions, layouts, poisoned memory."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from dsv4 import ops
from dsv4.ops import _example_rows, _runtime
from dsv4.ops.shapes import Shape, flash, nano, pro, tiny

from .common import Record, differs
from .models import using_backend
from .op_calls import CALLS
from .op_errors import distance, errors_of, merge_worst, outputs, spread, to_device
from .place import Place

TOKEN_COUNTS = (0, 1, 7, 33, 129)
LONG = ("qkv_rope_cache", "compressor_update", "indexer_query", "indexer_logits", "indexer_topk", "sparse_attention",
        "grouped_o_proj")  # fmt: skip


LIBRARY_GEMMS = ("fp8_linear", "expert", "shared", "indexer_logits", "grouped")


def few_experts(shape: Shape) -> Shape:
    """16 experts and a small vocabulary: what differs between ops is elsewhere, and weights come from the CPU."""
    return replace(shape, name=f"{shape.name}-16-experts", num_experts=16, vocab=2048)


def _shapes(place: Place, backend: str) -> tuple[tuple[Shape, torch.dtype], ...]:
    """bf16 at every width; fp32, which only the references' users need, at one width and in Triton."""
    shapes = (tiny,) if place.dry else (nano, few_experts(flash))
    pairs = [(shape, torch.bfloat16) for shape in shapes]
    return (*pairs, *([(shapes[0], torch.float32)] if backend == "triton" else []))


def _specs(part: str) -> list[ops.OpSpec]:
    """Ops with kernels; ``part`` is ``i/n``, every n-th from the i-th."""
    number, parts = map(int, part.split("/"))
    return [s for s in ops.specs().values() if s.cuda is not None][number::parts]


def _example(spec: ops.OpSpec, shape: Shape, rows: int, dtype: torch.dtype, place: Place) -> tuple[tuple, dict]:
    with _experts_packed_on(place.device):
        args, kwargs = spec.example(shape, num_tokens=rows, device=torch.device("cpu"), dtype=dtype, seed=rows)
    return to_device(args, place.device), kwargs


@contextmanager
def _experts_packed_on(device: torch.device) -> Iterator[None]:
    """Examples bring FP4 experts to their format on ``device``, one by one: on the CPU it took most of a section."""
    module = sys.modules["dsv4.ops.expert_ffn"]
    before = module._fp4

    def packed(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = [[t.cpu() for t in before(expert.to(device))] for expert in weight]
        return tuple(map(torch.stack, zip(*parts, strict=True)))

    module._fp4 = packed
    try:
        yield
    finally:
        module._fp4 = before


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def small(place: Place, record: Record, part: str, backend: str) -> None:
    """0 to 129 rows of nano and Flash; and what must not change a result."""
    seconds = record.samples.setdefault("ops_seconds", {}).setdefault(backend, {})
    for spec in _specs(part):
        if backend == "libraries" and not spec.name.startswith(("mhc", *LIBRARY_GEMMS)):
            continue
        began = time.perf_counter()
        with record.block("ops", "case_C8") as (found, empty), using_backend(backend, place):
            for shape, dtype in _shapes(place, backend):
                case, worst = f"{backend}.{shape.name}.{name_of(dtype)}", {}
                for rows in TOKEN_COUNTS:
                    args, kwargs = _example(spec, shape, rows, dtype, place)
                    errors = errors_of(spec, args, kwargs)
                    if rows == 0:
                        empty.setdefault(spec.name, {})[case] = int(any(n.endswith("mismatch") for n in errors))
                    merge_worst(worst, errors)
                found.setdefault(spec.name, {})[case] = worst
        with record.block("ops_layouts", "ops_poisoned") as (layouts, poisoned), using_backend(backend, place):
            args, kwargs = _example(spec, tiny if place.dry else few_experts(flash), 33, torch.bfloat16, place)
            want = outputs(spec, args, kwargs)
            with fresh_memory_poisoned():
                got = outputs(spec, args, kwargs)
            poisoned.setdefault(spec.name, {})[backend] = sum(map(differs, got, want))
            got = outputs(spec, _apart(spec, args), kwargs)
            layouts.setdefault(spec.name, {})[backend] = sum(map(differs, got, want))
        seconds[spec.name] = round(time.perf_counter() - began, 1)


def _apart(spec: ops.OpSpec, args: tuple) -> tuple:
    """Activations and row metadata with strides; buffers that the op writes, caches and weights stay whole."""
    made = []
    for schema, value in zip(spec.overload._schema.arguments, args, strict=False):
        written = schema.alias_info is not None and schema.alias_info.is_write
        whole = "cache" in schema.name or schema.name.startswith(("w", "fn", "table", "rope", "gate", "bias"))
        keep = written or whole or not isinstance(value, torch.Tensor) or not value.numel() or value.dim() == 0
        made.append(value if keep else spread(value))
    return tuple(made)


@contextmanager
def fresh_memory_poisoned() -> Iterator[None]:
    """Every ``torch.empty`` is filled with NaN or the largest integer, as torch's deterministic mode does."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def large(place: Place, record: Record, width: str, part: str, backend: str) -> None:
    """8,192 rows of every model op at Flash or Pro shapes, in bf16."""
    shape, rows = (tiny, 65) if place.dry else (few_experts({"flash": flash, "pro": pro}[width]), 8192)
    seconds = record.samples.setdefault("ops_large_seconds", {}).setdefault(f"{width}.{backend}", {})
    for spec in _specs(part):
        if spec.role != "model" or (backend == "libraries" and not spec.name.startswith(LIBRARY_GEMMS)):
            continue
        began = time.perf_counter()
        with record.block("ops_large") as (found,), using_backend(backend, place), torch.no_grad():
            args, kwargs = _example(spec, shape, rows, torch.bfloat16, place)
            case = f"{width}.{rows}.bfloat16" if backend == "triton" else f"{width}.{rows}.{backend}.bfloat16"
            found.setdefault(spec.name, {})[case] = errors_of(spec, args, kwargs)
        args = None
        seconds[spec.name] = round(time.perf_counter() - began, 1)
        if not place.dry:
            torch.cuda.empty_cache()


def rows_32768(place: Place, record: Record, backend: str) -> None:
    """Pro at 32,768 rows, where queries have 2^31 elements: errors of some rows, and of the last element.

    The references work on slices of rows, which is the same because no row of these ops sees another one.
    """
    rows = 65 if place.dry else 32768
    shape = replace(tiny, hidden=64) if place.dry else pro
    names = CALLS if backend == "triton" else tuple(name for name in CALLS if name.startswith("mhc"))
    for name in names:
        with record.block("ops_large", "ops_last_element") as (found, last), using_backend(backend, place):
            spec, (args, kwargs) = ops.spec(name), CALLS[name](shape, rows, place.device)
            got = outputs(spec, args, kwargs)
            size = min(256, rows)
            worst: dict[str, float] = {}
            for first in (0, (rows - size) // 2, rows - size):
                part = tuple(
                    a[first : first + size].contiguous() if torch.is_tensor(a) and a.shape[:1] == (rows,) else a
                    for a in args
                )
                with _runtime.use_references():
                    want = outputs(spec, part, kwargs)
                for index, (a, b) in enumerate(zip(got, want, strict=True)):
                    if a.shape[0] == rows:  # caches are written by all rows of the call: compared elsewhere
                        errors = distance(a[first : first + size], b)
                        merge_worst(worst, {f"{index}.{kind}": value for kind, value in errors.items()})
            suffix = "" if backend == "triton" else f"{backend}."
            found.setdefault(name, {})[f"pro.{rows}.{suffix}bfloat16"] = worst
            a, b = (t[0].reshape(-1)[-1].double() for t in (got, want))
            last[f"{name}.{suffix}0"] = ((a - b).abs() / b.abs().clamp_min(1e-3) * 256).item()
        got = want = args = part = None
        if not place.dry:
            torch.cuda.empty_cache()


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
    """Peak memory of index scores beyond their inputs and their result, over the bound that the op states."""
    with record.block("indexer_temporaries") as (found,), using_backend(backend, place), torch.no_grad():
        rows, context = (8, 1024) if place.dry else (8192, 65536)
        g = torch.Generator(device=place.device).manual_seed(0)
        blocks, kind = context // 256, {"device": place.device, "generator": g}
        q = torch.randn(rows, 64, 128, **kind).to(torch.bfloat16)
        weights = torch.randn(rows, 64, **kind)
        cache = torch.randn(blocks, 64, 128, **kind).to(torch.bfloat16)
        positions = torch.arange(context - rows, context, device=place.device)
        requests = torch.zeros(rows, dtype=torch.int32, device=place.device)
        table = torch.randperm(blocks, **kind).int().view(1, -1)
        arguments = (q, weights, cache, positions, requests, table)
        options = {"ratio": 4, "dtype": torch.bfloat16, "deterministic": False}
        scores = ops.indexer_logits(*arguments, **options)
        if place.dry:
            return
        size = scores.numel() * scores.element_size()
        del scores
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        ops.indexer_logits(*arguments, **options)
        torch.cuda.synchronize()
        found[backend] = {
            "peak_bytes": torch.cuda.max_memory_allocated(), "before_bytes": before + size,
            "unit_bytes": sys.modules["dsv4.ops.indexer_logits"].TEMPORARY_BYTES,
        }  # fmt: skip
