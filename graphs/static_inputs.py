"""Buffers of fixed address that a captured step reads its inputs from.

The inputs of a step are a dataclass of tensors (dataclasses may nest). Every field has one buffer of its largest size;
a bucket's inputs are the first rows of the buffers, so addresses depend neither on the step nor on the bucket.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .buckets import Bucket, Ladder

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
        self._buffers = {
            path: torch.empty(
                (extents[path].of(ladder.largest) if path in extents else tensor.shape[0], *tensor.shape[1:])
                if tensor.dim()
                else (),
                dtype=tensor.dtype,
                device=tensor.device if device is None else device,
            )
            for path, tensor in tensors.items()
        }
        self._used = {path: len(self._buffers[path]) for path in extents}  # rows from here on hold the pad value
        self._views = {bucket: self._bucket_views(bucket, example) for bucket in ladder.buckets}
        self._probes = {extent.size: (path, extent.extra) for path, extent in reversed(extents.items())}

    def nbytes(self) -> int:
        return sum(b.nbytes for b in self._buffers.values())

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
        views, sizes = self._views_of(bucket), dict(zip(SIZES, self.measure(inputs), strict=True))
        tensors = dict(_leaves(inputs))
        for path, tensor in tensors.items():
            extent, buffer = self._extents.get(path), self._buffers[path]
            rows = buffer.shape[:1] if extent is None else (sizes[extent.size] + extent.extra,)
            _check_field(path, tensor, (*rows, *buffer.shape[1:]), buffer.dtype)
            if extent is not None and rows[0] > extent.of(bucket):
                raise ValueError(f"{path} must have at most {extent.of(bucket)} rows in this bucket, got {rows[0]}")
        for path, tensor in tensors.items():
            buffer = self._buffers[path]
            (buffer[: tensor.shape[0]] if path in self._extents else buffer).copy_(tensor, non_blocking=True)
        for path, extent in self._extents.items():
            self._pad(path, sizes[extent.size] + extent.extra, extent.of(bucket))
        return views

    def fill_pads(self, bucket: Bucket) -> Any:
        """Make a step without rows, in which nothing but pads reaches any op, and return the bucket's views."""
        views = self._views_of(bucket)
        for path, buffer in self._buffers.items():
            if path not in self._extents:
                buffer.fill_(self._pads.get(path, 0))
        for path, extent in self._extents.items():
            self._pad(path, 0, extent.of(bucket))
        return views

    def _pad(self, path: str, rows: int, size: int) -> None:
        """Pad rows ``[rows, size)``. Rows from ``_used`` on already hold a pad that is a constant."""
        pad, buffer = self._pads[path], self._buffers[path]
        if isinstance(pad, str):
            if rows < size:
                buffer[rows:size] = self._buffers[pad]
        elif rows < self._used[path]:
            buffer[rows : self._used[path]] = pad
        self._used[path] = rows

    def _bucket_views(self, bucket: Bucket, example: Any) -> Any:
        def view(path: str) -> torch.Tensor:
            buffer = self._buffers[path]
            return buffer[: self._extents[path].of(bucket)] if path in self._extents else buffer

        return _rebuild(example, view)

    def _views_of(self, bucket: Bucket) -> Any:
        if bucket not in self._views:
            raise ValueError(f"bucket must be one of the ladder's {len(self._views)}, got {bucket}")
        return self._views[bucket]


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
