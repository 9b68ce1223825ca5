"""The kernel libraries that compile at run time, as this process has them; for the JIT monitor."""

import importlib
import sys
from types import ModuleType

NAMES = ("triton", "tilelang")
NOT_IMPORTED = "not imported in this process"


def jit_libraries() -> dict[str, ModuleType | str]:
    """Each library as its module, imported here, or as the reason why it is absent."""
    found: dict[str, ModuleType | str] = {}
    for name in NAMES:
        try:
            found[name] = importlib.import_module(name)
        except ModuleNotFoundError as error:
            found[name] = "not installed" if error.name == name else f"cannot be imported: {error}"
        except (ImportError, OSError) as error:  # OSError: a shared library that it needs is missing
            found[name] = f"cannot be imported: {error}"
    return found


def imported_libraries() -> dict[str, ModuleType | str]:
    """The same without importing any: one that this process has not imported cannot compile anything."""
    return {name: sys.modules.get(name, NOT_IMPORTED) for name in NAMES}
