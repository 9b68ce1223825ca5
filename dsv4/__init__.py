"""DeepSeek-V4 as custom ops: one fullgraph trace, compiled pieces, graph-safe prewarm."""

from pathlib import Path as _Path
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    import torch as _torch

    from .engine_config import EngineConfig as _EngineConfig
    from .prewarming import PrewarmReport as _PrewarmReport

_here = _Path(__file__).resolve().parent
if not (_here / "ops").is_dir() and (_here.parent / "ops" / "__init__.py").is_file():
    __path__.append(str(_here.parent))  # a bare checkout: ops/, compile/ and graphs/ stand beside dsv4/

__version__ = "0.1.0"
__all__ = ["prewarm"]


def prewarm(
    model: "_torch.nn.Module",
    settings: "_EngineConfig | None" = None,
    *,
    group: "_torch.distributed.ProcessGroup | None" = None,
    store: "_torch.distributed.Store | None" = None,
) -> "_PrewarmReport":
    """Compile and load every kernel that steps of ``model`` can need, before the first step or capture.

    Call it on every rank, once the weights are in place: no rank returns before all are warm, and no collective may
    run before that. A second call of the same decision compares and meets, and compiles nothing. An ``Engine`` calls it
    by itself. ``DSV4_PREWARM=0`` in the environment skips the kernels, not the comparison or the meeting.

    Args:
        model: a ``dsv4.model.DeepseekV4`` on a GPU, or a module that contains one.
        settings: token budget, backends and worker threads; by default 8,192 rows and the process's backends.
        group: ranks that must agree; by default all ranks of ``torch.distributed`` where it is in use.
        store: in place of the store of ``group``.

    Returns:
        Keys, seconds, what was compiled and what was loaded, and the seconds of every rank.

    Raises:
        RuntimeError: the current stream is being captured.
        ValueError: no DeepSeek-V4 in ``model``, layers that the prewarm does not recognise, or not on a GPU.
        dsv4.graphs.warmer.PrewarmError: ranks differ, or a kernel could not be compiled, here or on another rank.
        TimeoutError: a rank did not come.
    """
    from .prewarming import prewarm_model

    return prewarm_model(model, settings, group=group, store=store)
