"""The only place that calls DeepGEMM: every call computes the full keys of its kernels, and a cold one is refused.

DeepGEMM compiles inside a call when its own cache has no kernel for it, also while a stream is being captured, and
tells nobody. So each wrapper asks ``_deep_gemm_keys`` what the call would build and ``_runtime.require_known`` whether
that is warm. The keys hold for one release on SM90; any other is refused. Cold calls run one at a time, because the
library's table of kernels has no lock of its own (it also keeps Python's lock while it compiles, 2 to 8 s a kernel).
The table holds handles of the device on which a kernel was first called; on another the driver calls them invalid. So
one process calls the library on one device.

Scales of activations must be column-major with a pitch of a multiple of 4 rows (TMA wants 16 bytes). DeepGEMM
transposes others with a kernel that it compiles for every K; :func:`column_major` copies them with ATen instead.
"""

import functools
import importlib
import threading
from types import ModuleType
from typing import Any

import torch

from . import _deep_gemm_keys as keys, _runtime
from ._aligned import aligned
from ._backends import REMEDIES

RELEASE = "2.5.0.post20260604"
_RECIPE = (1, keys.BLOCK, keys.BLOCK)
_cold = threading.RLock()
_device: torch.device | None = None  # of this process


@functools.cache
def library() -> ModuleType:
    """``deep_gemm``, imported when first needed.

    Raises:
        NotImplementedError: it cannot be imported, or it is not the release whose keys are known.
    """
    try:
        module = importlib.import_module("deep_gemm")
    except (ImportError, OSError) as error:
        raise NotImplementedError(f"deep_gemm must be installed ({REMEDIES['deep_gemm']}), got: {error}") from error
    found = getattr(module, "__version__", "an unknown release")
    if found != RELEASE:
        raise NotImplementedError(f"deep_gemm must be {RELEASE}, whose kernel keys are known, got {found}")
    return module


def check_device(device: torch.device) -> None:
    """Raise ``NotImplementedError`` unless ``device``, which has an index, can be the library's in this process: it is
    of compute capability 9.x, and no other was used before."""
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        raise NotImplementedError(f"deep_gemm keys are known for SM90, got {device} of SM{major}{minor}")
    if _device not in (None, device):
        raise NotImplementedError(f"deep_gemm must stay on one device, {_device} in this process, got {device}")


def _settle_device(device: torch.device) -> None:
    global _device
    with _cold:
        check_device(device)
        _device = device


def num_sms() -> int:
    """Multiprocessors that DeepGEMM uses: part of most keys, and settable in the library."""
    return library().get_num_sms()


def _call(key: keys.Key, device: torch.device, name: str, *args: Any, **kwargs: Any) -> Any:
    if device.type == "cuda" and device != _device:
        _settle_device(device)
    function = getattr(library(), name)
    _runtime.require_known(key)
    if _runtime.is_warm(key):
        return function(*args, **kwargs)
    with _runtime.first_launch(key), _cold:
        return function(*args, **kwargs)


def column_major(scales: torch.Tensor) -> torch.Tensor:
    """fp32 scales ``[T, blocks]`` with strides ``(1, 4 * ceil(T / 4))``, copied unless they are so already.

    The copy's padding is left as it is: the tensor cores read it for rows that are never stored.
    """
    rows, blocks = scales.shape
    pitch = keys.align(rows, 4)
    if scales.stride() == (1, pitch):
        return scales
    out = scales.new_empty(blocks, pitch).t()[:rows]
    return out.copy_(scales)


def fits(out_features: int, in_features: int) -> bool:
    """Whether a weight ``[out_features, in_features]`` suits: whole scale blocks of K, and TMA rows of the result."""
    return in_features % keys.BLOCK == 0 and out_features % 8 == 0 and in_features > 0 and out_features > 0


def gemm_nt(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, out: torch.Tensor
) -> None:
    """``out = (x * x_scale) @ (weight * weight_scale).T``: FP8 tensor cores, fp32 promotion per 128 of K, one rounding.

    Args:
        x, x_scale: e4m3 ``[T, K]``; fp32 ``[T, K / 128]``, best in the layout of :func:`column_major`.
        weight, weight_scale: e4m3 ``[N, K]``; fp32 ``[ceil(N / 128), K / 128]``.
        out: bf16 ``[T, N]`` contiguous, overwritten. Nothing happens for T = 0.

    Raises:
        ValueError: ``out`` is not bf16, or the sizes do not fit (:func:`fits`).
        ColdKernelError: see ``_runtime.require_known``.
    """
    _check("gemm_nt", weight, out)
    if x.shape[0] == 0:
        return
    key = keys.gemm(x.shape[0], *weight.shape, num_sms())
    operands = (aligned(x), column_major(x_scale)), (aligned(weight), aligned(weight_scale))
    _call(key, x.device, "fp8_gemm_nt", *operands, out, recipe=_RECIPE, compiled_dims="")


def m_grouped_gemm_nt_contiguous(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    out: torch.Tensor,
    groups: torch.Tensor,
) -> None:
    """:func:`gemm_nt` where every run of 128 rows belongs to one group with a weight of its own.

    Args:
        x, x_scale: as in :func:`gemm_nt`; T is a multiple of 128. Pad rows need no values.
        weight, weight_scale: e4m3 ``[G, N, K]`` and fp32 ``[G, ceil(N / 128), K / 128]``.
        out: bf16 ``[T, N]`` contiguous. Runs of group −1 are not computed: their rows hold no defined values.
        groups: int32 ``[T]`` contiguous: the group of every row, equal within a run; −1 for runs without work.

    Raises:
        ValueError: as :func:`gemm_nt`, or T is not a multiple of 128.
        ColdKernelError: see ``_runtime.require_known``.
    """
    _check("m_grouped_gemm_nt_contiguous", weight[0], out)
    if x.shape[0] % keys.GROUP_ROWS:
        raise ValueError(f"deep_gemm grouped rows must be a multiple of {keys.GROUP_ROWS}, got {x.shape[0]}")
    if x.shape[0] == 0:
        return
    num_groups, *size = weight.shape
    key = keys.grouped_gemm(x.shape[0], *size, num_groups, num_sms())
    operands = (aligned(x), column_major(x_scale)), (aligned(weight), aligned(weight_scale))
    name = "m_grouped_fp8_gemm_nt_contiguous"
    _call(key, x.device, name, *operands, out, groups, recipe=_RECIPE, compiled_dims="")


def mqa_logits(
    q: torch.Tensor,
    entries: torch.Tensor,
    scales: torch.Tensor,
    weights: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    width: int,
) -> torch.Tensor:
    """Indexer scores of every row against its own range of entries, counted from the range's start.

    Args:
        q: e4m3 ``[T, heads, dim]`` contiguous, 32 or 64 heads; T at least 1.
        entries, scales: e4m3 ``[E, dim]`` and fp32 ``[E]``, contiguous; E a multiple of 4.
        weights: fp32 ``[T, heads]`` contiguous.
        starts, ends: int32 ``[T]`` contiguous, ``0 <= start <= end <= E``. The kernel reads them as unsigned: a
            negative length would make it wait for entries that never come, so the caller clamps.
        width: columns of the result, at least the longest range.

    Returns:
        fp32 ``[T, width]``, a view of rows with a longer pitch: ``sum_h relu(q_h . entry) * weight_h * scale``; columns
        beyond a row's range hold no defined values.

    Raises:
        ValueError: other head counts.
        ColdKernelError: see ``_runtime.require_known``.
    """
    if q.shape[1] not in (32, 64):
        raise ValueError(f"deep_gemm logits must have 32 or 64 heads, got {q.shape[1]}")
    key = keys.mqa_logits(q.shape[1], q.shape[2], num_sms())
    arguments = q, (entries, scales), weights, starts, ends
    return _call(key, q.device, "fp8_mqa_logits", *arguments, clean_logits=False, max_seqlen_k=width)


def hc_prenorm_gemm(streams: torch.Tensor, fn: torch.Tensor, out: torch.Tensor, square_sums: torch.Tensor) -> None:
    """Products and sums of squares of mHC before its normalisation, in TF32, split over K; a peer to measure against.

    Args:
        streams: bf16 ``[T, K]`` contiguous, K a multiple of 64.
        fn: fp32 ``[N, K]`` contiguous, N at most 32 and a multiple of 8.
        out: fp32 ``[splits, T, N]`` contiguous: partial products.
        square_sums: fp32 ``[splits, T]`` contiguous: partial sums of squares.

    Raises:
        ColdKernelError: see ``_runtime.require_known``.
    """
    if streams.shape[0] == 0:
        return
    splits = out.shape[0]
    key = keys.hc_prenorm_gemm(*fn.shape, splits)
    _call(key, streams.device, "tf32_hc_prenorm_gemm", streams, fn, out, square_sums, splits)


def _check(name: str, weight: torch.Tensor, out: torch.Tensor) -> None:
    if out.dtype != torch.bfloat16:
        raise ValueError(f"deep_gemm {name} result must be bfloat16, got {out.dtype}")
    if not fits(*weight.shape):
        raise ValueError(f"deep_gemm {name} weight must be [multiple of 8, multiple of 128], got {list(weight.shape)}")
