"""One call of an op against its reference, as numbers: used by every section on ops."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch

from dsv4 import ops
from dsv4.ops import _runtime

from .common import differs

FLOATS = (torch.float32, torch.bfloat16)
DETERMINISTIC = "deterministic"
_CHUNK = 1 << 25  # elements compared at a time: 256 MiB per tensor of doubles
_PITCH = 3  # elements between rows of a pitched tensor: rows then begin off every boundary


def to_device(tree: Any, device: torch.device) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), tree)


def written(spec: ops.OpSpec) -> list[bool]:
    """Which arguments of the schema the op writes."""
    return [s.alias_info is not None and s.alias_info.is_write for s in spec.overload._schema.arguments]


def outputs(spec: ops.OpSpec, args: tuple, kwargs: dict, *, clone: bool = True) -> list[torch.Tensor]:
    """Returned tensors, then mutated arguments, of one call; on clones of the mutated ones unless told otherwise."""
    writes = written(spec)
    args = tuple(a.clone() if w and clone else a for a, w in zip(args, writes, strict=False))
    out = spec.overload(*args, **kwargs)
    returned = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
    return returned + [a for a, w in zip(args, writes, strict=False) if w]


def modes_of(kwargs: dict) -> dict[str, dict]:
    """Keyword arguments by mode: "" for rows that may be summed in any order, and :data:`DETERMINISTIC` where the op
    takes it."""
    if DETERMINISTIC not in kwargs:
        return {"": kwargs}
    return {"": kwargs | {DETERMINISTIC: False}, DETERMINISTIC: kwargs | {DETERMINISTIC: True}}


def errors_of(spec: ops.OpSpec, args: tuple, kwargs: dict) -> dict[str, float]:
    """``<output>.<kind>`` of one call: the kernel's distance from the reference on the same inputs."""
    return errors_by_mode(spec, args, {"": kwargs})[""]


def errors_by_mode(
    spec: ops.OpSpec,
    args: tuple,
    modes: dict[str, dict],
    around: Callable[[], AbstractContextManager] = nullcontext,
) -> dict[str, dict[str, float]]:
    """:func:`errors_of` per mode, against one call of the reference; every call of kernels runs inside ``around()``.

    Picks are against those of the kernels' own scores: the last one can hang on one rounding of a score.
    """
    with _runtime.use_references():
        want = outputs(spec, args, next(iter(modes.values())))
    found: dict[str, dict[str, float]] = {}
    for mode, kwargs in modes.items():
        with around():
            got = outputs(spec, args, kwargs)
        if spec.name == "indexer_picks" and len(want[0]):
            want = [_picks_of_own_scores(args, **kwargs)]
        found[mode] = errors_between(got, want)
    return found


def _picks_of_own_scores(
    args: tuple, *, ratio: int, dtype: torch.dtype, topk: int, deterministic: bool
) -> torch.Tensor:
    """Rows divided as the op divides them, since scores may depend on that."""
    found = []
    for part, rows in import_module("dsv4.ops.indexer_picks")._parts(args, dtype):
        scores = ops.indexer_logits(*rows, ratio=ratio, dtype=dtype, deterministic=deterministic)
        with _runtime.use_references():
            found.append(ops.indexer_topk(scores, args[3][part], ratio=ratio, topk=topk))
    return torch.cat(found)


def errors_between(got: list[torch.Tensor], want: list[torch.Tensor]) -> dict[str, float]:
    """:func:`distance` of every output, as ``<output>.<kind>``."""
    return {
        f"{index}.{kind}": value
        for index, pair in enumerate(zip(got, want, strict=True))
        for kind, value in distance(*pair).items()
    }


def distance(got: torch.Tensor, want: torch.Tensor) -> dict[str, float]:
    """How far ``got`` is from ``want``.

    Returns:
        Of floats: ``rms``, relative; ``max``, the largest absolute difference; ``peak``, the largest difference over
        the reference's value there, the RMS of its row (last dimension) or of all, whichever is most: about 1 if one
        element is wrong altogether, however many there are. Small elements of a large row are sums of large terms, so
        that their errors are those of the row. Of anything else ``bytes_differ``, a share. ``mismatch``,
        ``special_differ`` or ``not_finite`` alone if shapes, places of infinities and NaNs, or finite places differ.
    """
    if got.shape != want.shape or got.dtype != want.dtype:
        return {"mismatch": 1.0}
    if not got.numel():
        return {"rms": 0.0}
    if got.dtype not in FLOATS:
        a, b = got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)
        return {"bytes_differ": (a != b).float().mean().item()}
    square = reference_square = 0.0
    worst, count = 0.0, 0
    for a, b in _chunks(got, want):
        special = ~b.isfinite()
        if not torch.equal(a[special].nan_to_num(7.0, 8.0, 9.0), b[special].nan_to_num(7.0, 8.0, 9.0)):
            return {"special_differ": 1.0}
        if not a[~special].isfinite().all():
            return {"not_finite": 1.0}
        error = torch.where(special, 0.0, a.double() - b.double())
        square += error.square().sum().item()
        reference_square += torch.where(special, 0.0, b.double()).square().sum().item()
        worst, count = max(worst, error.abs().max().item()), count + int((~special).sum())
    if not count:
        return {"rms": 0.0, "max": 0.0, "peak": 0.0}
    relative = (square / reference_square) ** 0.5 if reference_square else worst
    peak = _peak(got, want, (reference_square / count) ** 0.5) if worst else 0.0
    return {"rms": relative, "max": worst, "peak": peak}


def _chunks(got: torch.Tensor, want: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return zip(*(t.reshape(-1).split(_CHUNK) for t in (got, want)), strict=True)


def _peak(got: torch.Tensor, want: torch.Tensor, rms: float) -> float:
    worst, width = 0.0, want.shape[-1] if want.dim() > 1 else want.numel()
    rows = (t.reshape(-1, width).split(max(1, _CHUNK // width)) for t in (got, want))
    for a, b in zip(*rows, strict=True):
        regular = b.isfinite()
        a, b = (torch.where(regular, t, 0.0).double() for t in (a, b))
        of_row = (b.square().sum(1, keepdim=True) / regular.sum(1, keepdim=True).clamp_min(1)).sqrt()
        size = b.abs().maximum(of_row.clamp_min(rms)) if rms else torch.ones_like(b)
        worst = max(worst, ((a - b).abs() / size).max().item())
    return worst


def merge_worst(into: dict[str, float], errors: dict[str, float]) -> None:
    for name, value in errors.items():
        into[name] = max(into.get(name, 0.0), value)


def undefined(tensor: torch.Tensor, *, holes: bool) -> int:
    """How many elements are NaN or infinite; −inf counts unless the op has ``holes``, which it marks so."""
    if tensor.dtype not in FLOATS:
        return 0
    count = 0
    for part in tensor.reshape(-1).split(_CHUNK):
        count += int((~part.isfinite()).sum())
        count -= int((part == -torch.inf).sum()) if holes else 0
    return count


@contextmanager
def fresh_memory_poisoned() -> Iterator[None]:
    """Every ``torch.empty`` is filled with NaN or the largest integer, as torch's deterministic mode does."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# ---- layouts ---------------------------------------------------------------------------------------------------------


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with a stride of 2 in the last dimension, garbage between them."""
    return _garbage(*tensor.shape[:-1], 2 * tensor.shape[-1], like=tensor)[..., ::2].copy_(tensor)


def pitched(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in rows that lie further apart than they are long, garbage between them."""
    wide = _garbage(*tensor.shape[:-1], tensor.shape[-1] + _PITCH, like=tensor)
    return wide[..., : tensor.shape[-1]].copy_(tensor)


def _garbage(*size: int, like: torch.Tensor) -> torch.Tensor:
    wide = torch.empty(size, dtype=like.dtype, device=like.device)
    wide.view(torch.uint8).fill_(0x7F)
    return wide


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"strided": strided, "pitched": pitched}


def layout_faults(spec: ops.OpSpec, args: tuple, kwargs: dict, want: list[torch.Tensor]) -> dict[str, int]:
    """By layout, outputs that change when inputs have it; and as ``<layout>_buffers``, caches and arguments that the op
    writes which then are neither served alike nor refused, by the name of the op or of one that it calls."""
    names = [argument.name for argument in spec.overload._schema.arguments]
    buffer = [w or "cache" in name for w, name in zip(written(spec), names, strict=True)]
    tensors = [isinstance(a, torch.Tensor) and a.numel() > 0 and a.dim() > 0 for a in args]
    found = {}
    for layout, made in LAYOUTS.items():
        inputs = (made(a) if t and not b else a for a, t, b in zip(args, tensors, buffer, strict=False))
        found[layout] = sum(map(differs, outputs(spec, tuple(inputs), kwargs), want))
        found[f"{layout}_buffers"] = 0
        for place in (i for i, a in enumerate(args) if tensors[i] and buffer[i] and not made(a).is_contiguous()):
            changed = [a.clone() if w else a for a, w in zip(args, written(spec), strict=False)]
            changed[place] = made(args[place])
            try:
                got = outputs(spec, tuple(changed), kwargs, clone=False)
            except (ValueError, RuntimeError) as error:
                found[f"{layout}_buffers"] += not _refused_by_name(error)
            else:
                found[f"{layout}_buffers"] += sum(map(differs, got, want))
    return found


def _refused_by_name(error: Exception) -> bool:
    subject = str(error).partition(" ")[0]
    return isinstance(error, ValueError) and subject in ops.specs() and "must be contiguous" in str(error)
