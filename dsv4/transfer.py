"""Copies between host and GPU during which the host goes on, and the one place where it waits.

A copy from or to pageable memory stops the host until the device has caught up. What goes up is therefore staged in
pinned memory, which torch's host allocator does not hand out again before the copy is done; what comes down goes to
pinned memory, followed by an event. On the CPU both are plain copies.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .graphs.packing import Layout

_TORCH_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


def upload(values: Sequence[Any], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """A tensor of ``values`` on ``device``, in the order of its current stream."""
    if torch.device(device).type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def upload_together(arrays: Sequence[np.ndarray], device: torch.device | str) -> list[torch.Tensor]:
    """Tensors of int32 and int64 ``arrays`` on ``device``, side by side in one memory, by a single copy."""
    dtypes = [_TORCH_DTYPES[array.dtype] for array in arrays]
    layout = Layout.of([array.shape for array in arrays], dtypes)
    staged = torch.empty(layout.nbytes, dtype=torch.uint8, pin_memory=torch.device(device).type == "cuda")
    if "meta" in (torch.device(device).type, staged.untyped_storage().device.type):  # the latter under FakeTensorMode
        return [torch.empty(a.shape, dtype=dtype, device=device) for a, dtype in zip(arrays, dtypes, strict=True)]
    memory = staged.numpy()
    for array, offset in zip(arrays, layout.offsets, strict=True):
        memory[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
    return layout.views(staged.to(device, non_blocking=True))


class Download:
    """A copy of ``tensor`` on its way to the host, behind what its stream has been given so far.

    ``tensor`` may be overwritten by later work of the same stream. Without elements there is nothing to wait for.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type != "cuda":
            self._host = tensor.clone()
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        if tensor.numel():
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> torch.Tensor:
        """The copy, on the host; the only point of a step at which the host waits for the device."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._host
