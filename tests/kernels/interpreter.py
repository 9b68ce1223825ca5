"""Repairs of Triton's interpreter (3.6), so that kernels round on the CPU as they round on a GPU.

The interpreter truncates float32 to bfloat16, loses the carry of a mantissa that rounds up to e4m3, and multiplies the
bit patterns of bfloat16 tiles. Conversions go through torch here (nearest, ties to even; e4m3 saturates and keeps
NaN), and matrix products of any dtype are sums of exact products in float64, rounded once: a row then does not
depend on how many rows the tile has, which a CPU BLAS does not promise.
"""

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from . import ptx

_DTYPES = {
    tl.float64: torch.float64,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _tensor(data: np.ndarray, dtype: tl.dtype) -> torch.Tensor:
    bits = torch.from_numpy(np.array(data, copy=True, ndmin=1).view(f"i{data.dtype.itemsize}"))
    return bits.view(torch.uint8).view(_DTYPES[dtype]) if data.dtype.itemsize == 1 else bits.view(_DTYPES[dtype])


def convert(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: object) -> np.ndarray:
    """Bits of ``data`` converted from ``source`` to ``target``; ``rounding`` is nearest-even in every kernel here."""
    value = _tensor(data, source)
    if target == tl.float8e4nv:
        value = value.float()
        value = torch.where(value.isnan(), value, value.clamp(-448.0, 448.0))
    value = value.to(_DTYPES[target]).contiguous()
    bits = value.view(_BITS[value.element_size()]).numpy()
    return bits.view(f"u{value.element_size()}").reshape(data.shape)


def dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    """``a @ b + d`` of tiles of any float dtype."""
    left, right = (_tensor(t.data, t.dtype.scalar).double().reshape(t.data.shape).numpy() for t in (a, b))
    product = np.matmul(left, right).astype(d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def _index_of_one_element(tensor: type, scope: object) -> None:
    """Scalars are arrays of one element, which newer numpy does not convert: a run-time loop bound would fail."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


_patch_lang_tensor = interpreter._patch_lang_tensor


def repair() -> None:
    """Install the repairs in this process; calling it again does nothing."""
    interpreter._patch_lang_tensor = _index_of_one_element
    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = dot
    ptx.install()
