"""mHC gates and collapse in TileLang: two launches, for mhc_pre, mhc_post_pre and mhc_head.

The first multiplies tiles of rows by ``fn``, each program over one part of the M*D values, so that few rows still
fill the GPU; for mhc_post_pre it also makes the streams, which are then not read again. The second sums the parts and
finishes. The numbers of rows and of parts are run-time values.
"""

from collections.abc import Callable

import torch

from . import _mhc, _mhc_finish_tilelang_kernel, _mhc_products_tilelang_kernel, mhc_post_tilelang_kernel
from ._aligned import aligned
from ._registry import Arguments, PrewarmCase
from ._runtime import Key
from ._tilelang import launch
from ._triton import dtype_key
from .mhc_post_tilelang_kernel import check
from .shapes import Shape

Weights = tuple[torch.Tensor, torch.Tensor]


def _key(kernel: str, streams: torch.Tensor, fn: torch.Tensor) -> Key:
    """What a launch for ``streams [T, M, D]`` and ``fn [outputs, M*D]`` is specialised on."""
    return ("tilelang", kernel, streams.shape[1], streams.shape[2], fn.shape[0], *dtype_key(streams))


def fuses(streams: torch.Tensor) -> bool:
    """Whether mhc_post_pre multiplies the streams while it makes them; fp32 ones do not fit beside each other."""
    return streams.dtype == torch.bfloat16


def keys(streams: torch.Tensor, fn: torch.Tensor) -> tuple[Key, ...]:
    """Keys of the launches of :func:`run`."""
    return _key("mhc_products", streams, fn), _key("mhc_finish", streams, fn)


def keys_after_post(streams: torch.Tensor, fn: torch.Tensor) -> tuple[Key, ...]:
    """Keys of the launches of :func:`run_after_post`."""
    if not fuses(streams):
        return (mhc_post_tilelang_kernel.key(streams), *keys(streams, fn))
    return _key("mhc_post_products", streams, fn), _key("mhc_finish", streams, fn)


def cases(
    op: str, shape: Shape, outputs: int, arguments: Callable[[], Arguments], *, after_post: bool = False
) -> tuple[PrewarmCase, ...]:
    """The specialisations of the production dtype, reached by one call of ``op`` with ``arguments``."""
    streams = torch.empty(1, shape.num_streams, shape.hidden, dtype=torch.bfloat16, device="meta")
    fn = torch.empty(outputs, shape.num_streams * shape.hidden, device="meta")
    names = keys_after_post(streams, fn) if after_post else keys(streams, fn)
    return tuple(PrewarmCase(op=op, key=key, arguments=arguments) for key in names)


def run(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    partials: torch.Tensor,
    x: torch.Tensor,
    weights: Weights | None,
    *,
    eps: float,
    hc_eps: float,
    sinkhorn_iters: int,
) -> None:
    """Write ``x [T, D]``, and ``post`` and ``comb`` if ``weights`` takes them; without, ``fn`` has M rows.

    ``partials``: fp32 workspace of :func:`_mhc.alloc_partials`; its first dimension is the number of parts.
    """
    check(streams)
    _mhc.check_partials(partials, streams, fn.shape[0])
    streams, hidden, outputs, (dtype,) = aligned(streams), streams.shape[2], fn.shape[0], dtype_key(streams)
    launch(
        _key("mhc_products", streams, fn), lambda: _mhc_products_tilelang_kernel.products(hidden, outputs, dtype),
        partials.shape[:2], streams, _by_stream(fn, streams), partials,
    )  # fmt: skip
    _finish(streams, fn, scale, base, norm_weight, partials, x, weights, eps, hc_eps, sinkhorn_iters)


def run_after_post(
    y: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    partials: torch.Tensor,
    new_streams: torch.Tensor,
    x: torch.Tensor,
    weights: Weights,
    *,
    eps: float,
    hc_eps: float,
    sinkhorn_iters: int,
) -> None:
    """Write what mhc_post makes to ``new_streams``, and of these what :func:`run` makes; bitwise the same."""
    if not fuses(streams):
        mhc_post_tilelang_kernel.run(y, streams, post, comb, new_streams)
        run(
            new_streams, fn, scale, base, norm_weight, partials, x, weights,
            eps=eps, hc_eps=hc_eps, sinkhorn_iters=sinkhorn_iters,
        )  # fmt: skip
        return
    check(streams)
    _mhc.check_partials(partials, streams, fn.shape[0])
    inputs, hidden, outputs = (aligned(t) for t in (y, streams, post, comb)), streams.shape[2], fn.shape[0]
    launch(
        _key("mhc_post_products", streams, fn), lambda: _mhc_products_tilelang_kernel.post_products(hidden, outputs),
        partials.shape[:2], *inputs, _by_stream(fn, streams), new_streams, partials,
    )  # fmt: skip
    _finish(new_streams, fn, scale, base, norm_weight, partials, x, weights, eps, hc_eps, sinkhorn_iters)


def _by_stream(fn: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    return aligned(fn).view(fn.shape[0], streams.shape[1], streams.shape[2])


def _finish(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    partials: torch.Tensor,
    x: torch.Tensor,
    weights: Weights | None,
    eps: float,
    hc_eps: float,
    sinkhorn_iters: int,
) -> None:
    hidden, outputs, (dtype,) = streams.shape[2], fn.shape[0], dtype_key(streams)
    key = _key("mhc_finish", streams, fn)
    norm_weight = norm_weight.float()  # a copy only in tests
    inputs = (partials, streams, *(aligned(t) for t in (scale, base, norm_weight)), x)
    rows = (streams.shape[0],)
    if weights is None:
        launch(key, lambda: _mhc_finish_tilelang_kernel.finish_head(hidden, dtype), rows, *inputs, eps, hc_eps)
    else:
        launch(
            key, lambda: _mhc_finish_tilelang_kernel.finish(hidden, outputs, dtype), rows,
            *inputs, *weights, eps, hc_eps, sinkhorn_iters,
        )  # fmt: skip
