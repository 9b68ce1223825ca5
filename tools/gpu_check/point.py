"""A question of the report: what its samples must hold, and how its value and pass follow from them.

Samples are of nested dicts; ``a/b/c`` is a path in them. A run that measured less than a point needs cannot pass it.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal

from .rules import RULES, TEXTUAL, SampleError

Sense = Literal["<=", ">=", "=="]
_HOLDS = {"<=": operator.le, ">=": operator.ge, "==": operator.eq}


@dataclass(frozen=True, kw_only=True)
class Point:
    """One question that the report answers with a number.

    Attributes:
        question: one sentence.
        rule: name of the function of :mod:`.rules` that makes the value from the samples.
        bar: what the value is compared with.
        sense: how.
        needs: paths that the samples must hold, or what lists them where that takes an import of the library.
        least: by path, the smallest number that may stand there, or the shortest list.
        given: by path, the number that must stand there: sizes that were set, not measured.
        may_be_empty: paths at which an empty list says something.
        closed: nothing but what is needed may be there, since it would move a mean.
        options: further arguments of the rule.
    """

    question: str
    rule: str
    bar: float
    sense: Sense = "<="
    needs: Sequence[str] | Callable[[], Sequence[str]]
    least: Mapping[str, float] = field(default_factory=dict)
    given: Mapping[str, float] = field(default_factory=dict)
    may_be_empty: Sequence[str] = ()
    closed: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def required(self) -> tuple[str, ...]:
        """Every path that samples must hold."""
        needs = self.needs() if callable(self.needs) else self.needs
        return tuple(dict.fromkeys((*needs, *self.least, *self.given)))

    def judge(self, samples: Any) -> tuple[float, bool]:
        """Value and pass; :class:`SampleError` if the samples do not allow them."""
        try:
            self._require(samples)
            value = RULES[self.rule](samples, **self.options)
        except SampleError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise SampleError(f"samples must fit the rule {self.rule}, got {type(error).__name__}: {error}") from error
        return value, bool(_HOLDS[self.sense](value, self.bar))

    def _require(self, samples: Any) -> None:
        needed = self.required()
        for path, leaf in _leaves(samples):
            if leaf in ({}, []) and path not in self.may_be_empty:
                raise SampleError(f"samples must hold {path or 'something'}, got an empty one")
            if isinstance(leaf, bool) or not isinstance(leaf, (int, float, *((str, list) if self._has_texts else ()))):
                raise SampleError(f"{path} must be a number, got {leaf!r}")
            if isinstance(leaf, float) and not isfinite(leaf):
                raise SampleError(f"samples must be finite, got {leaf} at {path}")
            if self.closed and not any(path == one or path.startswith(f"{one}/") for one in needed):
                raise SampleError(f"samples must hold nothing but what is needed, got {path}")
        for path in needed:
            inner = samples
            for part in path.split("/"):
                if not isinstance(inner, dict) or part not in inner:
                    raise SampleError(f"samples must hold {path}")
                inner = inner[part]
            size = len(inner) if isinstance(inner, list) else inner
            if path in self.least and not size >= self.least[path]:
                raise SampleError(f"{path} must be at least {self.least[path]}, got {size}")
            if path in self.given and inner != self.given[path]:
                raise SampleError(f"{path} must be {self.given[path]}, got {inner}")

    @property
    def _has_texts(self) -> bool:
        return self.rule in TEXTUAL


def _leaves(samples: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Whatever is no dict or list with something in it, and its path."""
    if not samples or not isinstance(samples, dict | list):
        yield at, samples
        return
    for key, value in samples.items() if isinstance(samples, dict) else enumerate(samples):
        yield from _leaves(value, f"{at}/{key}" if at else str(key))
