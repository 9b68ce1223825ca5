"""Calls that TileLang or DeepGEMM serves: which ops, with which arguments, and whether they really got there."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from dsv4 import ops
from dsv4.ops import _indexer_deep_gemm, _paged
from dsv4.reencode import fp4_to_fp8

from .op_calls import Call
from .op_errors import DETERMINISTIC, modes_of
from .place import Place

FP8 = torch.float8_e4m3fn
TILELANG = ("mhc_pre", "mhc_post", "mhc_post_pre", "mhc_head")
DEEP_GEMM = ("fp8_linear", "expert_ffn", "indexer_logits")
OPS = (*TILELANG, *DEEP_GEMM)
INDEX_ROWS = (257, 1025)  # of an example's four requests: fewer rows would not pay, see ``serves``
_LAUNCHES = {"tilelang": ("mhc_post_tilelang_kernel.launch", "mhc_pre_tilelang_kernel.launch"),
             "deep_gemm": ("_deep_gemm._call",)}  # fmt: skip


def case_name(*parts: str | int, spec: ops.OpSpec, dtype: torch.dtype, backend: str) -> str:
    """The parts that are not empty, then what the tolerance depends on: the dtype, or ``fp8_sums``.

    FP8 tensor cores add in about 14 bits, which shows where a rounding to FP8 and another product come after the sum,
    and where a result is not rounded.
    """
    kind = str(dtype).removeprefix("torch.")
    if backend == "libraries" and spec.name in ("expert_ffn", "indexer_logits"):
        kind = "fp8_sums"
    return ".".join(str(part) for part in (*parts, kind) if part != "")


def by_mode(spec: ops.OpSpec, call: Call, backend: str) -> tuple[tuple[Any, ...], dict[str, dict[str, Any]]]:
    """Arguments that the backend serves, and keyword arguments by mode."""
    args, kwargs = served(spec.name, *call) if backend == "libraries" else call
    modes = modes_of(kwargs)
    if backend == "libraries" and spec.name == "indexer_logits":
        del modes[DETERMINISTIC]  # which DeepGEMM does not serve
    return args, modes


def checked(spec: ops.OpSpec, backend: str, rows: int, place: Place) -> Callable[[], AbstractContextManager[None]]:
    """What calls of kernels run in: with libraries :func:`reaching`, unless there is no row and so no launch."""
    reached = backend == "libraries" and rows > 0 and not place.dry
    return partial(reaching, spec.name) if reached else nullcontext


def served(name: str, args: tuple, kwargs: dict) -> Call:
    """The call with the formats that the libraries take: FP8 experts for FP4 ones, and for bf16 queries and a bf16
    cache e4m3 ones with fp32 scores."""
    if name == "expert_ffn":
        return (*args[:4], *_fp8(*args[4:6], parts=2), *_fp8(*args[6:8], parts=1)), kwargs
    if name == "indexer_logits":
        q, weights, cache, *places = args
        options = {"dtype": torch.float32, "deterministic": False}
        return (q.to(FP8), weights, _fp8_cache(cache), *places), kwargs | options
    return args, kwargs


def _fp8(packed: torch.Tensor, scale: torch.Tensor, *, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All experts' matrices re-encoded; each of the ``parts`` of their rows has blocks of its own."""
    codes, scales = [], []
    for number, expert in enumerate(zip(packed, scale, strict=True)):
        for part in zip(*(t.chunk(parts) for t in expert), strict=True):
            one, its_scale = fp4_to_fp8(f"expert {number}", *(t.contiguous() for t in part))
            codes.append(one.view(torch.uint8))
            scales.append(its_scale)
    experts = packed.shape[0]
    whole = torch.cat(codes).view(experts, -1, codes[0].shape[1]).view(FP8)
    return whole, torch.cat(scales).view(experts, -1, scales[0].shape[1])


def _fp8_cache(cache: torch.Tensor) -> torch.Tensor:
    """``[pages, rows, 128]`` in the FP8 layout of index entries, with scales from 1/4 to 4."""
    pages, rows, dim = cache.shape
    scale = torch.exp2(torch.arange(pages * rows, device=cache.device) % 5 - 2.0).view(pages, rows)
    codes = (cache.float() / scale.unsqueeze(-1)).clamp(-448, 448).to(FP8).view(torch.uint8)
    made = torch.cat((codes.flatten(1), scale.view(torch.uint8)), 1)
    assert made.shape[1] == _paged.fp8_page_bytes(rows, dim)
    return made


def row_counts(name: str, index_heads: int, counts: tuple[int, ...]) -> tuple[int, ...]:
    """Of ``counts`` those that a library serves; index scores need more rows, and 32 or 64 heads."""
    if name != "indexer_logits":
        return counts
    return INDEX_ROWS if index_heads in _indexer_deep_gemm.HEADS else ()


@contextmanager
def reaching(name: str) -> Iterator[None]:
    """Raise unless a call inside the block launches a kernel of the library that should serve the op ``name``.

    Raises:
        RuntimeError: nothing was launched: other kernels answered in the library's place.
    """
    library = "tilelang" if name in TILELANG else "deep_gemm"
    reached: list[str] = []
    with ExitStack() as stack:
        for target in _LAUNCHES[library]:
            module, _, function = target.partition(".")
            stack.enter_context(_counted(import_module(f"dsv4.ops.{module}"), function, reached))
        yield
    if not reached:
        raise RuntimeError(f"{name} must be served by {library}, got no launch of it")


def _counted(module: ModuleType, name: str, reached: list[str]) -> Any:
    launch: Callable[..., Any] = getattr(module, name)

    @wraps(launch)
    def counted(*args: Any, **kwargs: Any) -> Any:
        reached.append(name)
        return launch(*args, **kwargs)

    return patch.object(module, name, counted)
