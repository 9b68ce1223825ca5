"""Tensors side by side in one piece of memory, so that a single copy moves all of them.

The layout is a function of sizes alone: whoever packs and whoever unpacks need not have met.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

ALIGNMENT = 16  # bytes, of every tensor: what compiled code assumes of its inputs


@dataclass(frozen=True)
class Layout:
    """Where tensors of given shapes and dtypes lie: byte offsets, and bytes in all."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    offsets: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> "Layout":
        """The tensors in this order, each at the next multiple of :data:`ALIGNMENT`."""
        offsets, end = [], 0
        for shape, dtype in zip(shapes, dtypes, strict=True):
            offsets.append(end)
            end += -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return cls(tuple(map(tuple, shapes)), tuple(dtypes), tuple(offsets), end)

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in ``memory``, uint8 ``[nbytes]`` or more.

        Each begins a storage of its own, which reaches to the end of the memory and keeps it alive: to a compiler that
        guards on offsets and aliases they are separate tensors.
        """
        storage, first = memory.untyped_storage(), memory.storage_offset()
        return [
            torch.empty(0, dtype=dtype, device=memory.device).set_(storage[first + offset :], 0, shape)
            for offset, shape, dtype in zip(self.offsets, self.shapes, self.dtypes, strict=True)
        ]

    def memory_of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The memory, uint8 ``[nbytes]``, of tensors that already lie like this; ``None`` if they do not.

        Their shapes and dtypes must be those of the layout.
        """
        base = tensors[0].data_ptr()
        for tensor, offset in zip(tensors, self.offsets, strict=True):
            if not tensor.is_contiguous() or (tensor.numel() and tensor.data_ptr() != base + offset):
                return None
        storage = tensors[0].untyped_storage()
        first = base - storage.data_ptr()
        if first + self.nbytes > storage.nbytes():  # neighbours by chance
            return None
        return torch.empty(0, dtype=torch.uint8, device=tensors[0].device).set_(storage, first, (self.nbytes,))
