"""DeepSeek-V4 as custom ops: one fullgraph trace, compiled pieces, graph-safe prewarm."""

from pathlib import Path as _Path

_here = _Path(__file__).resolve().parent
if not (_here / "ops").is_dir() and (_here.parent / "ops" / "__init__.py").is_file():
    __path__.append(str(_here.parent))  # a bare checkout: ops/, compile/ and graphs/ stand beside dsv4/

__version__ = "0.1.0"
