"""What the samples of a whole run hold, as paths: sizes of ladders, and ops as the library registers them.

A run that measured less lacks some of these, and its point has no value. Nothing heavy is imported before a path that
needs the ops is asked for.
"""

import functools
from collections.abc import Iterable, Mapping
from itertools import product

from . import suites
from .place import BACKENDS
from .runs import WIDTHS

# Ladders: of the engines whose replays are compared (512 tokens, 64 requests, one draft token), and of 8,192 tokens.
STEP_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512)
DRAFT_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 576)
WIDE_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
_REQUESTS = 64
MHC_CALLS = ("mhc_pre", "mhc_post", "mhc_post_pre", "mhc_head")
LONG_POSITIONS = ("qkv_rope_cache", "compressor_update", "indexer_query", "indexer_logits", "indexer_topk",
                  "sparse_attention", "grouped_o_proj")  # fmt: skip
LENGTH_OPS = ("indexer_picks", "indexer_logits", "indexer_topk", "sparse_attention")
PAGE_OPS = ("qkv_rope_cache", "compressor_update")


def paths(*parts: Iterable[object]) -> tuple[str, ...]:
    """Every combination, joined by slashes."""
    return tuple("/".join(map(str, combination)) for combination in product(*parts))


def _replay_cases() -> Iterable[str]:
    """Kinds of step by the buckets that can hold them: a mixed step has two rows or more, a verified request two."""
    for function, buckets in (("step", STEP_BUCKETS), ("draft", DRAFT_BUCKETS)):
        kinds = {"prefill": buckets, "decode": [b for b in buckets if b <= _REQUESTS], "mixed": buckets[1:]}
        if function == "step":
            kinds["verify"] = [b for b in buckets if 2 <= b <= 2 * _REQUESTS]
        for kind, sizes in kinds.items():
            yield from paths((function,), (kind,), sizes)


REPLAY_CASES = tuple(_replay_cases())
REPLAY_BUCKETS = (*paths(("step",), STEP_BUCKETS), *paths(("draft",), DRAFT_BUCKETS))
OFFICIAL_LAYERS = {
    "attn_out": tuple(f"p140.layer{layer}.attn_out" for layer in range(7)),
    "ffn_out": tuple(f"p140.layer{layer}.ffn_out" for layer in range(7)),
    "index_score": tuple(f"p300.layer{layer}.attn.index_score" for layer in (2, 4, 6)),
    "picks_changed": tuple(f"p300.layer{layer}.attn.picks_changed" for layer in (2, 4, 6)),
}


@functools.cache
def tests() -> tuple[str, ...]:
    """Functions of the test suite that need a GPU, by part, but for those that other sections call."""
    return tuple(f"{part}/functions/{name}" for part in suites.PARTS for name in suites.functions(part))


# ---- ops -------------------------------------------------------------------------------------------------------------

MHC_ROWS = (257, 1025, 2817, 4225)  # first of buckets with 26, 7, 2 and 1 parts of mHC's products
LAYOUTS = ("strided", "pitched", "strided_buffers", "pitched_buffers")


@functools.cache
def outputs() -> Mapping[str, int]:
    """Ops with kernels: how many tensors each returns or writes."""
    from dsv4 import ops

    found = {}
    for name, spec in ops.specs().items():
        if spec.cuda is not None:
            schema = spec.overload._schema
            written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
            found[name] = len(schema.returns) + len(written)
    return found


def _of_a_model(name: str) -> bool:
    """Whether a model on one rank calls it, or a part of it."""
    from dsv4 import ops

    return ops.spec(name).role in ("model", "part")


def served(backend: str) -> tuple[str, ...]:
    """Ops that a backend is measured with: the libraries serve few."""
    from .op_libraries import OPS

    return tuple(outputs()) if backend == "triton" else OPS


def _cases(op: str, backend: str, *parts: str | int, dtype: str = "bfloat16") -> list[str]:
    """``op/case`` in every mode that the op has; DeepGEMM serves index scores in one."""
    import torch

    from dsv4 import ops

    from .op_errors import DETERMINISTIC
    from .op_libraries import case_name

    spec = ops.spec(op)
    modal = DETERMINISTIC in [argument.name for argument in spec.overload._schema.arguments]
    modes = ("", DETERMINISTIC) if modal and (backend, op) != ("libraries", "indexer_logits") else ("",)
    given = {"spec": spec, "dtype": getattr(torch, dtype), "backend": backend}
    return [f"{op}/{case_name(*parts, mode, **given)}" for mode in modes]


def _small(op: str, backend: str) -> Iterable[str]:
    """Up to 129 rows, or more where a library serves no fewer; nano has too few index heads for one."""
    for shape in ("nano", "flash-16-experts", "pro-16-experts"):
        if (op, backend, shape) != ("indexer_logits", "libraries", "nano"):
            yield from _cases(op, backend, backend, shape)
    if backend == "triton":
        yield from _cases(op, backend, backend, "nano", dtype="float32")


@functools.cache
def op_cases() -> tuple[str, ...]:
    """``op/case`` of few rows, and of mHC's in between."""
    found = [case for b in BACKENDS for op in served(b) for case in _small(op, b)]
    for backend, op, width, rows in product(BACKENDS, MHC_CALLS, WIDTHS, MHC_ROWS):
        found += _cases(op, backend, backend, width, rows)
    return tuple(found)


@functools.cache
def empty_calls() -> tuple[str, ...]:
    """C8: every op in the test suite's shapes, and in those of the smallest cases; a library refuses no rows of one."""
    small = [(op, b) for b in BACKENDS for op in served(b) if (op, b) != ("indexer_logits", "libraries")]
    return (*paths(("suite",), outputs()), *(case for op, backend in small for case in _small(op, backend)))


def poisoned_ops() -> tuple[str, ...]:
    return tuple(path for backend in BACKENDS for path in paths(served(backend), (backend,)))


def laid_out_ops() -> tuple[str, ...]:
    return tuple(f"{path}.{layout}" for path in poisoned_ops() for layout in LAYOUTS)


@functools.cache
def large_cases() -> tuple[str, ...]:
    """Ops of a model at both widths with 8,192 rows, at Pro's with 32,768 and with 2^31 elements."""
    found = []
    for backend, library in zip(BACKENDS, ("", "libraries"), strict=True):
        for op in filter(_of_a_model, served(backend)):
            for width in WIDTHS:
                found += _cases(op, backend, width, 8192, library)
        for op, _, rows in _calls_of_many_rows(backend):
            found += _cases(op, backend, "pro", rows, library)
    for op in filter(_of_a_model, outputs()):
        found += _cases(op, "triton", "pro", 32768)
    return tuple(dict.fromkeys(found))


@functools.cache
def last_elements() -> tuple[str, ...]:
    """As ``op[.beyond][.libraries][.mode].0``, but for sums in 14 bits."""
    found = []
    for backend, library in zip(BACKENDS, ("", "libraries"), strict=True):
        for op, beyond, _ in _calls_of_many_rows(backend):
            cases = (case.partition("/")[2].split(".") for case in _cases(op, backend))
            found += [".".join(filter(None, (op, beyond, library, *mode, "0"))) for *mode, kind in cases
                      if kind != "fp8_sums"]  # fmt: skip
    return tuple(found)


def _calls_of_many_rows(backend: str) -> Iterable[tuple[str, str, int]]:
    """Op, ``beyond`` or nothing, rows."""
    from .op_calls import BEYOND, CALLS

    every = [*((name, "", 32768) for name in CALLS), *((name, "beyond", rows) for name, (_, rows) in BEYOND.items())]
    return [one for one in every if one[0] in served(backend)]
