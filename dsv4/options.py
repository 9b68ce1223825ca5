"""One rule for options of every kind: what was asked for and can have no effect is an error, never dropped.

An option left at its default, or at ``off`` or ``auto`` where it has these, asks for nothing and is always fine.
"""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

MAX_SEED = 2**63
_ASK_FOR_NOTHING = ("off", "auto")


def require_left_out(options: Any, names: Iterable[str], where: str) -> None:
    """Raise ``ValueError`` for the first option that was set although it can have no effect.

    Args:
        options: a dataclass whose fields are options with defaults.
        names: those without an effect.
        where: what they have no effect with, such as ``on cpu``.
    """
    defaults = {f.name: f.default for f in fields(options)}
    for name in names:
        value = getattr(options, name)
        if value != defaults[name] and value not in _ASK_FOR_NOTHING:
            raise ValueError(f"{name} must be left out {where}, where it has no effect, got {value!r}")


def is_seed(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_SEED
