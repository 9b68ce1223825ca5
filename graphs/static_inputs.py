"""Buffers of fixed address that a captured step reads its inputs from.

The inputs of a step are a dataclass of tensors (dataclasses may nest). All buckets share one piece of memory, of which
only the bucket of the step at hand needs to be right; in it the tensors of each dataclass lie side by side, so that a
step of exactly the bucket's sizes that lies like this too (:class:`.packing.Layout`) is one copy. A bucket's addresses
never change.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .buckets import Bucket, Ladder
from .packing import Layout

SizeName = Literal["tokens", "requests", "logits"]
Pad = int | float | str
SIZES: tuple[SizeName, ...] = ("tokens", "requests", "logits")


@dataclass(frozen=True)
class Extent:
    """First dimension of a field: a size of the bucket, plus a constant (``query_starts`` has R + 1 entries)."""

    size: SizeName
    extra: int = 0

    def of(self, bucket: Bucket) -> int:
        return getattr(bucket, self.size) + self.extra


class StaticInputs:
    """Static buffers for one dataclass of inputs; they are written by :meth:`fill` and by nobody else.

    Args:
        example: an instance, for types, dtypes and the dimensions after the first.
        ladder: its largest bucket gives the size of the buffers.
        extents: first dimension per field (dotted path in a nested dataclass). A field without one has a fixed shape.
        pads: what fills the rows between the step's own and the bucket's: a number, or the path of a field of one
            element whose value is used. A field with an extent must have one. A field of fixed shape may: it is the
            value in a step without rows (default 0).
        device: of the buffers; default: the example's.
    """

    def __init__(
        self,
        example: Any,
        ladder: Ladder,
        *,
        extents: Mapping[str, Extent],
        pads: Mapping[str, Pad],
        device: torch.device | str | None = None,
    ) -> None:
        if not dataclasses.is_dataclass(example) or isinstance(example, type):
            raise TypeError(f"example must be a dataclass instance, got {type(example).__name__}")
        self._type, self._extents, self._pads = type(example), dict(extents), dict(pads)
        tensors = dict(_leaves(example))
        _check_names(tensors, extents, pads)
        self._tails = {path: tuple(t.shape[1:]) for path, t in tensors.items()}
        self._fixed = {path: tuple(t.shape) for path, t in tensors.items() if path not in extents}
        self._dtypes = {path: t.dtype for path, t in tensors.items()}
        self._groups = _groups(tensors)
        layouts = {bucket: self._layouts(bucket) for bucket in ladder.buckets}
        self._nbytes = max(sum(layout.nbytes for layout in of) for of in layouts.values())
        device = next(iter(tensors.values())).device if device is None else device
        self._memory = torch.empty(self._nbytes, dtype=torch.uint8, device=device)
        self._buckets = {bucket: self._bucket(of, example) for bucket, of in layouts.items()}
        self._last: Bucket | None = None  # whose pads the memory holds
        self._used: dict[str, int] = {}  # of that bucket: rows from here on hold a pad that is a constant
        self._probes = {extent.size: (path, extent.extra) for path, extent in reversed(extents.items())}

    def nbytes(self) -> int:
        return self._nbytes

    def measure(self, inputs: Any) -> tuple[int, int, int]:
        """Rows, requests and logit rows of a step; a size that no field has is 0."""
        if type(inputs) is not self._type:
            raise TypeError(f"inputs must be a {self._type.__name__}, got {type(inputs).__name__}")
        sizes = dict.fromkeys(SIZES, 0)
        for size, (path, extra) in self._probes.items():
            sizes[size] = _get(inputs, path).shape[0] - extra
        return sizes["tokens"], sizes["requests"], sizes["logits"]

    def fill(self, inputs: Any, bucket: Bucket) -> Any:
        """Copy a step into the buffers, pad it to ``bucket``, and return the bucket's views, the same in every call.

        Raises:
            ValueError: a field that does not fit its buffer, has another dtype, or disagrees with the step's sizes.
        """
        own, sizes = self._bucket_of(bucket), dict(zip(SIZES, self.measure(inputs), strict=True))
        tensors = dict(_leaves(inputs))
        for path, tensor in tensors.items():
            extent = self._extents.get(path)
            rows = None if extent is None else sizes[extent.size] + extent.extra
            shape = self._fixed[path] if rows is None else (rows, *self._tails[path])
            _check_field(path, tensor, shape, self._dtypes[path])
            if extent is not None and rows is not None and rows > extent.of(bucket):
                raise ValueError(f"{path} must have at most {extent.of(bucket)} rows in this bucket, got {rows}")
        self._turn_to(bucket)
        for (memory, layout), paths in zip(own.groups, self._groups, strict=True):
            source = None
            if all(tensors[path].shape == own.buffers[path].shape for path in paths):
                source = layout.memory_of([tensors[path] for path in paths])
            if source is not None:
                memory.copy_(source, non_blocking=True)
                continue
            for path in paths:
                tensor, buffer = tensors[path], own.buffers[path]
                (buffer[: tensor.shape[0]] if path in self._extents else buffer).copy_(tensor, non_blocking=True)
        for path, extent in self._extents.items():
            self._pad(own, path, sizes[extent.size] + extent.extra)
        return own.views

    def fill_pads(self, bucket: Bucket) -> Any:
        """Make a step without rows, in which nothing but pads reaches any op, and return the bucket's views."""
        own = self._bucket_of(bucket)
        self._turn_to(bucket)
        for path, buffer in own.buffers.items():
            if path not in self._extents:
                buffer.fill_(self._pads.get(path, 0))
        for path in self._extents:
            self._pad(own, path, 0)
        return own.views

    def _turn_to(self, bucket: Bucket) -> None:
        """Another bucket's tensors lie elsewhere: no row holds a pad any more."""
        if bucket != self._last:
            self._last = bucket
            self._used = {path: len(buffer) for path, buffer in self._buckets[bucket].buffers.items() if buffer.dim()}

    def _pad(self, own: "_Bucket", path: str, rows: int) -> None:
        """Pad the rows from ``rows`` on. Those from ``_used`` on already hold a pad that is a constant."""
        pad, buffer = self._pads[path], own.buffers[path]
        if isinstance(pad, str):
            if rows < len(buffer):
                buffer[rows:] = own.buffers[pad]
        elif rows < self._used[path]:
            buffer[rows : self._used[path]] = pad
        self._used[path] = rows

    def _layouts(self, bucket: Bucket) -> list[Layout]:
        def shape(path: str) -> tuple[int, ...]:
            extent = self._extents.get(path)
            return self._fixed[path] if extent is None else (extent.of(bucket), *self._tails[path])

        return [Layout.of([shape(p) for p in paths], [self._dtypes[p] for p in paths]) for paths in self._groups]

    def _bucket(self, layouts: Sequence[Layout], example: Any) -> "_Bucket":
        groups, buffers, first = [], {}, 0
        for layout, paths in zip(layouts, self._groups, strict=True):
            memory = self._memory[first : first + layout.nbytes]
            first += layout.nbytes
            groups.append((memory, layout))
            buffers |= dict(zip(paths, layout.views(memory), strict=True))
        return _Bucket(groups, buffers, _rebuild(example, lambda path: buffers[path]))

    def _bucket_of(self, bucket: Bucket) -> "_Bucket":
        if bucket not in self._buckets:
            raise ValueError(f"bucket must be one of the ladder's {len(self._buckets)}, got {bucket}")
        return self._buckets[bucket]


@dataclass(frozen=True)
class _Bucket:
    """A bucket's memory: that of each dataclass with its layout, tensors by path, and the dataclass of them."""

    groups: Sequence[tuple[torch.Tensor, Layout]]
    buffers: Mapping[str, torch.Tensor]
    views: Any


def _groups(paths: Iterable[str]) -> list[list[str]]:
    """Fields of one dataclass together, in order."""
    found: dict[str, list[str]] = {}
    for path in paths:
        found.setdefault(path.rpartition(".")[0], []).append(path)
    return list(found.values())


def _check_names(tensors: Mapping[str, torch.Tensor], extents: Mapping[str, Extent], pads: Mapping[str, Pad]) -> None:
    for what, names in (("extents", extents), ("pads", pads)):
        unknown = sorted(set(names) - set(tensors))
        if unknown:
            raise ValueError(f"{what} must name fields of the inputs, got {unknown}")
    for path in extents:
        if path not in pads:
            raise ValueError(f"pads must have a value for every field with an extent, got none for {path}")
        if not tensors[path].dim():
            raise ValueError(f"a field with an extent must have a first dimension, got a scalar for {path}")
    for path, pad in pads.items():
        if isinstance(pad, str) and (path not in extents or pad in extents or pad not in tensors):
            raise ValueError(f"pad of {path} must be a number or a field of fixed shape, got {pad!r}")
        if isinstance(pad, str) and tensors[pad].numel() != 1:
            raise ValueError(f"pad of {path} must be a field of 1 element, got {tensors[pad].numel()} in {pad}")


def _check_field(path: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{path} must have shape {list(shape)}, got {list(tensor.shape)}")
    if tensor.dtype != dtype:
        raise ValueError(f"{path} must have dtype {dtype}, got {tensor.dtype}")


# --- dataclasses of tensors -----------------------------------------------------------------------------------------


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for field in dataclasses.fields(value):
        child, path = getattr(value, field.name), f"{prefix}{field.name}"
        if isinstance(child, torch.Tensor):
            yield path, child
        elif dataclasses.is_dataclass(child) and not isinstance(child, type):
            yield from _leaves(child, f"{path}.")
        else:
            raise TypeError(f"{path} of the inputs must be a tensor or a dataclass, got {type(child).__name__}")


def _rebuild(value: Any, tensor_of: Callable[[str], torch.Tensor], prefix: str = "") -> Any:
    def child(name: str) -> Any:
        path = f"{prefix}{name}"
        part = getattr(value, name)
        return tensor_of(path) if isinstance(part, torch.Tensor) else _rebuild(part, tensor_of, f"{path}.")

    return type(value)(**{field.name: child(field.name) for field in dataclasses.fields(value)})


def _get(value: Any, path: str) -> torch.Tensor:
    for name in path.split("."):
        value = getattr(value, name)
    return value
