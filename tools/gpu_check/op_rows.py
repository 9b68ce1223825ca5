"""Pro at 32,768 rows and beyond, where tensors have 2^31 elements: compared where a wrong offset would show."""

from collections.abc import Callable
from dataclasses import replace

import torch

from dsv4 import ops
from dsv4.ops import _runtime
from dsv4.ops.shapes import Shape, pro, tiny

from .common import Record
from .models import using_backend
from .op_calls import BEYOND, CALLS, Call
from .op_checks import few_experts, free
from .op_errors import distance, fresh_memory_poisoned, merge_worst, outputs, undefined, written
from .op_libraries import OPS, by_mode, case_name, checked
from .place import Place

Wanted = list[tuple[torch.Tensor, torch.Tensor]]  # per output: places, as a tensor is indexed, and values
SHAPE = replace(few_experts(pro), max_context=1 << 20)
_BORDER = 1 << 31
_BAND, _RANDOM = 128, 256  # rows compared at each place, and anywhere
_AT_A_TIME = 256  # rows of one call of the reference: all of them would need as much memory as the op's tensors
_HOLES = ("indexer_logits",)  # ops that mark places without a value by −inf


def rows_32768(place: Place, record: Record, backend: str) -> None:
    """32,768 rows, and for tensors that only reach 2^31 elements there, or only with a longer context, some more.

    All elements must be defined, whatever the memory held before; those of some rows are compared with references that
    see these rows alone, which is the same because no row of these ops sees another one. One call takes up to 10 GB.
    """
    calls = [(name, "", call, 67 if place.dry else 32768) for name, call in CALLS.items()]
    calls += [(name, "beyond", call, 68 if place.dry else rows) for name, (call, rows) in BEYOND.items()]
    for name, beyond, call, rows in calls:
        if backend == "libraries" and (name not in OPS or (place.dry and name == "indexer_logits")):
            continue
        shape = tiny if place.dry else SHAPE
        with record.block("ops_large", "ops_last_element") as (found, last), using_backend(backend, place):
            _compare(name, call, shape, rows, place, backend, found.setdefault(name, {}), last, beyond)
        free(place)


@torch.no_grad()
def _compare(
    name: str,
    call: Callable[[Shape, int, torch.device], Call],
    shape: Shape,
    rows: int,
    place: Place,
    backend: str,
    found: dict[str, dict[str, float]],
    last: dict[str, float],
    beyond: str,
) -> None:
    """Errors of one call into ``found``, those of the last element of its first output into ``last``."""
    spec = ops.spec(name)
    args, modes = by_mode(spec, call(shape, rows, place.device), backend)
    library = "" if backend == "triton" else backend
    wanted: list[Wanted] = []
    for mode, kwargs in modes.items():
        with checked(spec, backend, rows, place)(), fresh_memory_poisoned():
            got = outputs(spec, _fresh(spec, args, rows), kwargs, clone=False)
        if not wanted:
            of_rows = [t for t in (*args, *got) if isinstance(t, torch.Tensor) and rows in t.shape[:2]]
            widest = max(of_rows, key=torch.numel)
            picked = _picked(rows, widest.numel() // rows, widest.element_size()).to(place.device)
            wanted = [_wanted(spec, args, kwargs, rows, part) for part in picked.split(_AT_A_TIME)]
        errors: dict[str, float] = {}
        for index, tensor in enumerate(got):
            count = undefined(tensor, holes=name in _HOLES)
            merge_worst(errors, {f"{index}.not_finite": count} if count else {})
            for want in wanted:
                where, values = want[index]
                merge_worst(errors, {f"{index}.{kind}": n for kind, n in distance(tensor[where], values).items()})
        case = case_name("pro", rows, library, mode, spec=spec, dtype=torch.bfloat16, backend=backend)
        found[case] = errors
        if not case.endswith("fp8_sums"):  # one element of a sum in 14 bits may be several steps off
            key = ".".join(part for part in (name, beyond, library, mode, "0") if part)
            last[key] = _steps(got[0][-1].flatten()[-1], wanted[-1][0][1][-1])
        del got


def _fresh(spec: ops.OpSpec, args: tuple, rows: int) -> tuple:
    """The arguments with NaN in place of results of earlier calls, and caches that the op may write."""
    return tuple(
        (a.fill_(torch.nan) if a.shape[:1] == (rows,) else a.clone()) if w else a
        for a, w in zip(args, written(spec), strict=False)
    )


def _picked(rows: int, width: int, itemsize: int) -> torch.Tensor:
    """Numbers of the rows to compare: the first, the last, those around element 2^31 and around byte 2^31 of a tensor
    with ``width`` elements of ``itemsize`` bytes in a row, and random ones; ascending."""
    borders = (_BORDER // width, _BORDER // (width * itemsize))
    firsts = (0, rows - _BAND, *(border - _BAND // 2 for border in borders))
    bands = [torch.arange(max(0, first), min(rows, first + _BAND)) for first in firsts if first < rows]
    random = torch.randperm(rows, generator=torch.Generator().manual_seed(0))[:_RANDOM]
    return torch.cat((*bands, random)).unique()


def _wanted(spec: ops.OpSpec, args: tuple, kwargs: dict, rows: int, part: torch.Tensor) -> Wanted:
    """Per output where to compare and with what: the rows ``part``; of caches, what these rows change."""
    cut = tuple(_rows_of(a, rows, part) if isinstance(a, torch.Tensor) else a for a in args)
    with _runtime.use_references():
        want = outputs(spec, cut, kwargs)
    writes = [a for a, w in zip(args, written(spec), strict=False) if w]
    before = [None] * (len(want) - len(writes)) + writes
    found: Wanted = []
    for tensor, old in zip(want, before, strict=True):
        where = part if old is None or old.shape[:1] == (rows,) else tensor != old
        found.append((where, tensor if where is part else tensor[where]))
    return found


def _rows_of(tensor: torch.Tensor, rows: int, part: torch.Tensor) -> torch.Tensor:
    """Rows ``part`` of a tensor that has rows: in its first dimension, or in the second behind parts."""
    if rows not in tensor.shape[:2]:
        return tensor
    return tensor.index_select(tensor.shape.index(rows), part)


def _steps(got: torch.Tensor, row: torch.Tensor) -> float:
    """Distance of an element from the last one of ``row``, in bf16 steps of it or of a typical one of its row."""
    row = row.double().flatten()
    size = row[-1].abs().clamp_min(row.square().mean().sqrt().item()).clamp_min(1e-3)
    return ((got.double() - row[-1]).abs() / size * 256).item()
