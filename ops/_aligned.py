"""Tensors as kernels want them: contiguous, from a boundary of 16 bytes."""

import torch


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a copy if it is strided or starts off a 16-byte boundary.

    There TMA refuses it, Triton compiles another binary, and TileLang's wide loads fault.
    """
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
