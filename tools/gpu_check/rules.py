"""How a value follows from raw samples. Every rule is a pure function of what a report holds under ``samples``.

Samples are nested dicts and lists; numbers are the leaves that rules read, texts are there for named errors and logs.
"""

import math
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

AWAKE_S = 0.4
FAILED = 1e9  # stands for "infinitely bad", which JSON cannot hold
# fp32: sums of up to 28,672 products in another order, sqrt(28672) * 2^-24. bf16: half of all elements off by 2^-8.
RMS_TOLERANCES = {"float32": 1e-5, "bfloat16": 2.0**-9}


class SampleError(ValueError):
    """Samples from which a value cannot follow."""


def numbers(samples: Any) -> Iterator[float]:
    """The numeric leaves, in order; a leaf that is not finite is an error, not a number to compare with."""
    if isinstance(samples, dict):
        for value in samples.values():
            yield from numbers(value)
    elif isinstance(samples, list):
        for value in samples:
            yield from numbers(value)
    elif isinstance(samples, (int, float)):
        if not math.isfinite(samples):
            raise SampleError(f"samples must be finite, got {samples}")
        yield samples


def _some(samples: Any) -> list[float]:
    found = list(numbers(samples))
    if not found:
        raise SampleError("samples must hold a number, got none")
    return found


def largest(samples: Any) -> float:
    """The largest number."""
    return max(_some(samples))


def smallest(samples: Any) -> float:
    """The smallest number."""
    return min(_some(samples))


def total(samples: Any) -> float:
    """The sum of all numbers, none of which may be negative: a count."""
    found = _some(samples)
    if min(found) < 0:
        raise SampleError(f"counts must be at least 0, got {min(found)}")
    return sum(found)


def zeros(samples: Any) -> float:
    """How many numbers are 0."""
    return sum(value == 0 for value in _some(samples))


def abs_mean(samples: Any) -> float:
    """Absolute value of the mean."""
    found = _some(samples)
    return abs(sum(found) / len(found))


def agreement(samples: Any) -> float:
    """``agreed`` over ``rows``, both summed over the entries."""
    entries = list(samples.values())
    return sum(e["agreed"] for e in entries) / sum(e["rows"] for e in entries)


def speed_up(samples: Any) -> float:
    """Median of ``theirs`` over median of ``ours``."""
    return median(_some(samples["theirs"])) / median(_some(samples["ours"]))


def best_copy_share(samples: Any) -> float:
    """Per kernel: its bytes per median second over the copy's; the largest."""
    shares = []
    for one in samples.values():
        kernel = one["kernel_bytes"] / median(_some(one["kernel_us"]))
        shares.append(kernel / (one["copy_bytes"] / median(_some(one["copy_us"]))))
        if min(len(one["kernel_us"]), len(one["copy_us"])) < 30:
            raise SampleError(f"a rate needs 30 timings, got {len(one['kernel_us'])} and {len(one['copy_us'])}")
    return max(shares)


def first_over_tenth(samples: Any) -> float:
    """Per path: the median over its processes of first request over tenth; the largest."""
    worst = []
    for path in samples.values():
        first, tenth, awake = (_some(path[name]) for name in ("first_s", "tenth_s", "awake_s"))
        if not len(first) == len(tenth) == len(awake) >= 3:
            raise SampleError(f"a path needs 3 repeats, got {len(first)}, {len(tenth)} and {len(awake)}")
        if min(awake) < AWAKE_S:
            raise SampleError(f"a device must be kept busy for {AWAKE_S} s before its first request, got {min(awake)}")
        worst.append(median(a / b for a, b in zip(first, tenth, strict=True)))
    return max(worst)


def worst_memory(samples: Any) -> float:
    """``(peak_bytes - before_bytes) / unit_bytes`` of every entry; the largest."""
    return max((one["peak_bytes"] - one["before_bytes"]) / one["unit_bytes"] for one in samples.values())


def worst_error(samples: Any) -> float:
    """Errors of outputs against the tolerance of their case; the largest. Differing bytes, shapes or NaNs are failures.

    ``samples[op][case]`` maps ``<output>.<kind>`` to a number; a case is named ``….float32`` or ``….bfloat16``.
    """
    worst = 0.0
    for op in samples.values():
        for case, errors in op.items():
            tolerance = RMS_TOLERANCES[case.rpartition(".")[2]]
            for name, error in errors.items():
                _some(error)
                kind = name.rpartition(".")[2]
                if kind == "rms":
                    worst = max(worst, error / tolerance)
                elif kind != "max" and error:
                    worst = FAILED
    return worst


def unnamed(samples: Any) -> float:
    """Entries whose ``message`` lacks one of their ``must_name`` texts."""
    return sum(any(text not in one["message"] for text in one["must_name"]) for one in samples.values())


def uncounted_kernels(samples: Any) -> float:
    """Per backend: kernels in DeepGEMM's cache against the keys that name them; the differences, added."""
    if not all(one["gemm_keys"] for one in samples.values()):
        raise SampleError("a backend must have GEMM keys, got none")
    return sum(abs(one["deep_gemm_keys"] - one["deep_gemm_kernels"]) for one in samples.values())


def captures_before_prewarm(samples: Any) -> float:
    """Of the recorded ``events``: captures that came before the first prewarm; without both events nothing is shown."""
    found = 0
    for one in samples.values():
        events = one["events"]
        if "prewarm" not in events or "capture" not in events:
            raise SampleError(f"events must hold a prewarm and a capture, got {events}")
        found += events[: events.index("prewarm")].count("capture")
    return found


def not_passed(samples: Any) -> float:
    """Tests that did not pass, over the parts of the suite; no passed test at all is an error."""
    if not sum(part["passed"] for part in samples.values()):
        raise SampleError("a test run must have a passed test, got none")
    return sum(part["failed"] + part["errors"] + part["skipped"] for part in samples.values())


RULES: dict[str, Callable[[Any], float]] = {
    rule.__name__: rule
    for rule in (
        largest, smallest, total, zeros, abs_mean, agreement, speed_up, best_copy_share, first_over_tenth, worst_memory,
        worst_error, unnamed, uncounted_kernels, captures_before_prewarm, not_passed,
    )
}  # fmt: skip
