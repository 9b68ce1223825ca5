"""One fullgraph trace, cut at boundary ops, identical pieces compiled once and stitched into one flat function."""

if __name__ != "dsv4.compile":
    raise ImportError(f"import this package as dsv4.compile, not as {__name__}")

from .inductor import CompilerMissingError, GraphBreakError, RecompileError, jit_events  # noqa: E402
from .report import CompileReport  # noqa: E402
from .split import Piece, SplitPlan  # noqa: E402
from .trace import CompiledModel, compile_model, mark_unbacked_sizes  # noqa: E402

__all__ = [
    "CompileReport",
    "CompiledModel",
    "CompilerMissingError",
    "GraphBreakError",
    "Piece",
    "RecompileError",
    "SplitPlan",
    "compile_model",
    "jit_events",
    "mark_unbacked_sizes",
]
