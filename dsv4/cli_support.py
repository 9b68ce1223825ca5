"""What the commands of ``cli.py`` share: checked reading of their files and options, and one way to print."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def choice(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {list(allowed)}, got {value!r}")
    return value


def emit(as_json: bool, payload: dict[str, Any], show: Callable[[dict[str, Any]], None]) -> None:
    check_finite(payload, "result")
    if as_json:
        print(json.dumps(payload, allow_nan=False))
    else:
        show(payload)
    sys.stdout.flush()  # a closed pipe must fail here, not while the interpreter shuts down


def check_finite(value: Any, name: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}: weights or recorded values out of range")
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in pairs:
        check_finite(each, f"{name}.{key}")


def read_json(path: Path, subject: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{subject} must be a readable file, got {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{subject} must be JSON, got {path}: {error}") from error


def vocab_size(model: Path) -> int:
    """Lets token ids be checked before any weight is read."""
    from .config import ModelConfig

    return ModelConfig.from_json(model).vocab_size


def token_ids(value: Any, vocab_size: int, subject: str) -> list[int]:
    from .inputs import check_token_ids

    if not isinstance(value, list) or not value:
        got = "an empty list" if value == [] else type(value).__name__
        raise ValueError(f"{subject} must be a non-empty list of token ids, got {got}")
    check_token_ids(value, vocab_size, subject)
    return value


def check_positive(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError(f"{name} must be at least 1 token, got {value}")
