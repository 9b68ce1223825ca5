"""Which kernels serve the mHC ops: those of Triton or those of TileLang, imported when first used.

Both libraries' modules take the same arguments; their keys differ, so that both can be warm in one process.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from . import _backends
from ._registry import Arguments, PrewarmCase
from .shapes import Shape


def _post() -> ModuleType:
    if _backends.backend("mhc") == "tilelang":
        from . import mhc_post_tilelang_kernel

        return mhc_post_tilelang_kernel
    from . import mhc_post_kernel

    return mhc_post_kernel


def _pre() -> ModuleType:
    if _backends.backend("mhc") == "tilelang":
        from . import mhc_pre_tilelang_kernel

        return mhc_pre_tilelang_kernel
    from . import mhc_pre_kernel

    return mhc_pre_kernel


def post(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, out: torch.Tensor) -> None:
    """Write the mixed streams ``[T, M, D]`` to ``out``."""
    _post().run(y, streams, post, comb, out)


def pre(*args: Any, **keywords: Any) -> None:
    """Collapse before a sublayer or before the head; arguments as ``mhc_pre_kernel.run``."""
    _pre().run(*args, **keywords)


def post_pre(*args: Any, **keywords: Any) -> None:
    """Mix after a sublayer and collapse before the next one; arguments as ``mhc_pre_kernel.run_after_post``."""
    _pre().run_after_post(*args, **keywords)


def post_cases(op: str, shape: Shape, arguments: Callable[[], Arguments]) -> tuple[PrewarmCase, ...]:
    streams = torch.empty(1, shape.num_streams, shape.hidden, dtype=torch.bfloat16, device="meta")
    return (PrewarmCase(op=op, key=_post().key(streams), arguments=arguments),)


def pre_cases(op: str, shape: Shape, outputs: int, arguments: Callable[[], Arguments]) -> tuple[PrewarmCase, ...]:
    return _pre().cases(op, shape, outputs, arguments)


def post_pre_cases(op: str, shape: Shape, outputs: int, arguments: Callable[[], Arguments]) -> tuple[PrewarmCase, ...]:
    return _pre().cases(op, shape, outputs, arguments, after_post=True)
