"""How a value follows from raw samples. Every rule is a pure function of what a report holds under ``samples``.

Samples are nested dicts and lists; numbers are the leaves that rules read, texts are there for named errors and logs.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

AWAKE_S = 0.4
SAME_CORE = 1.1
BAD_AGREEMENT = 0.75
FAILED = 1e9  # stands for "infinitely bad", which JSON cannot hold
# fp32: sums of up to 28,672 products in another order, sqrt(28672) * 2^-24. bf16: half of all elements off by 2^-8.
# FP8 tensor cores add in about 14 bits: parts in 1e3 where no rounding to bf16 hides it.
RMS_TOLERANCES = {"float32": 1e-5, "bfloat16": 2.0**-9, "fp8_sums": 2.0**-7}
# Largest error of an element, over its reference, the RMS of its row or of all, whichever is most. fp32: ten times the
# RMS, as the extremes of 1e9 sums are 6 standard deviations out. bf16: one step is at most 2^-7 of a value; eight of
# them, since an intermediate of bf16 may round the other way too.
PEAK_TOLERANCES = {"float32": 1e-4, "bfloat16": 2.0**-4, "fp8_sums": 3 / 16}
# Values on their way to or in a coarse format, where rounding the other way costs one of its steps: at most 1/8 of an
# FP8 value, half as much again for what comes on top; 1/2 of an FP4 value, or of a typical one in a block like others.
FP8_PEAK, FP4_PEAK = 3 / 16, 0.6
COARSE = {
    "expert_ffn": FP8_PEAK, "shared_expert": FP8_PEAK, "pcp_moe_shard": FP8_PEAK, "qkv_rope_cache": FP8_PEAK,
    "compressor_update": FP8_PEAK, "compressor_merge": FP8_PEAK, "indexer_query": FP4_PEAK,
}  # fmt: skip


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


def _positive(name: str, values: Sequence[float]) -> None:
    if not values or min(values) <= 0:
        raise SampleError(f"{name} must be more than 0, got {min(values, default='none')}")


def _not_negative(samples: Any) -> list[float]:
    found = _some(samples)
    if min(found) < 0:
        raise SampleError(f"numbers must be at least 0, got {min(found)}")
    return found


def largest(samples: Any) -> float:
    """The largest number; none may be negative: distances, seconds, counts."""
    return max(_not_negative(samples))


def longest_call(samples: Any) -> float:
    """The largest ``call_s``."""
    return max(_not_negative([one["call_s"] for one in samples.values()]))


def total(samples: Any) -> float:
    """The sum of all numbers, none of which may be negative: a count."""
    return sum(_not_negative(samples))


def zeros(samples: Any) -> float:
    """How many numbers are 0; none may be negative."""
    return sum(value == 0 for value in _not_negative(samples))


def abs_mean(samples: Any) -> float:
    """Absolute value of the mean."""
    found = _some(samples)
    return abs(sum(found) / len(found))


def agreement(samples: Any) -> float:
    """``agreed`` over ``rows``, both summed over the entries; of one entry if that is bad, however few rows it has."""
    entries = list(samples.values())
    for one in entries:
        if not 0 <= one["agreed"] <= one["rows"]:
            raise SampleError(f"rows that agree must be 0 to all {one['rows']}, got {one['agreed']}")
    bad = (e["agreed"] / e["rows"] for e in entries if e["agreed"] < BAD_AGREEMENT * e["rows"])
    return min(sum(e["agreed"] for e in entries) / sum(e["rows"] for e in entries), *bad, 1.0)


def speed_up(samples: Any) -> float:
    """Median of ``theirs`` over median of ``ours``."""
    for name in ("theirs", "ours"):
        _positive(f"milliseconds of {name}", samples[name])
    return median(samples["theirs"]) / median(samples["ours"])


def worst_copy_share(samples: Any) -> float:
    """Per kernel: its bytes per median second over the copy's; the smallest."""
    shares = []
    for one in samples.values():
        for name in ("kernel_us", "copy_us"):
            _positive(name, one[name])
        kernel = one["kernel_bytes"] / median(one["kernel_us"])
        shares.append(kernel / (one["copy_bytes"] / median(one["copy_us"])))
    return min(shares)


def is_steady(core_s: Sequence[float]) -> bool:
    """Whether a core needed the same time for the same loop, within a tenth."""
    return max(core_s) <= SAME_CORE * min(core_s)


def same_core(core_s: Sequence[float]) -> bool:
    """Whether a core was as fast before and after the first request as before and after the tenth.

    ``core_s``: seconds of a fixed loop before every request and after the last.
    """
    return is_steady([*core_s[:2], *core_s[-2:]])


def _left_running(core_s: Sequence[float]) -> bool:
    """Whether the loop after the first request alone took longer: by chance, or by what that request left running."""
    return not same_core(core_s) and is_steady([core_s[0], *core_s[-2:]]) and core_s[1] > core_s[0]


def first_over_tenth(samples: Any, engines: int) -> float:
    """Per path: the median of first request over tenth over the engines whose core kept its speed; the largest.

    Lists are as long as there were engines: ``request_s`` holds ten times of each, ``core_s`` eleven.
    """
    worst = []
    for path, found in samples.items():
        awake, every, cores = (found[name] for name in ("awake_s", "request_s", "core_s"))
        if {len(times) for times in every} != {10} or {len(core) for core in cores} != {11}:
            raise SampleError(f"{path} must hold ten requests of each engine and its core beside them")
        for times in (*every, *cores):
            _positive("seconds", times)
        if len(awake) != len(every) or min(awake) < AWAKE_S:
            raise SampleError(f"a device must be kept busy for {AWAKE_S} s before its first request, got {awake}")
        excused = sum(map(_left_running, cores))
        if excused > len(cores) / 4:
            raise SampleError(
                f"engines of {path} whose core was slower right after the first request alone must be at most a "
                f"quarter, got {excused} of {len(cores)}: the request may have left something running"
            )
        counted = [times[0] / times[9] for times, core in zip(every, cores, strict=True) if same_core(core)]
        if len(counted) < engines:
            raise SampleError(f"engines of {path} whose core kept its speed must be {engines}, got {len(counted)}")
        worst.append(median(counted))
    return max(worst)


def worst_memory(samples: Any) -> float:
    """``(peak_bytes - before_bytes) / unit_bytes`` of every entry; the largest."""
    worst = []
    for name, one in samples.items():
        _positive(f"bytes of {name}", [one["unit_bytes"], one["before_bytes"]])
        if one["peak_bytes"] < one["before_bytes"]:
            raise SampleError(f"peak_bytes of {name} must be at least what was there before, got {one}")
        worst.append((one["peak_bytes"] - one["before_bytes"]) / one["unit_bytes"])
    return max(worst)


def worst_error(samples: Any, *, outputs: Callable[[], Mapping[str, int]]) -> float:
    """Errors of outputs against the tolerance of their case; the largest. Differing bytes, shapes or NaNs are failures.

    ``samples[op][case]`` maps ``<output>.<kind>`` to a number; a case is named ``….float32``, ``….bfloat16`` or
    ``….fp8_sums``. Every one of an op's outputs (``outputs``, by op) must be there: floats with ``rms`` and ``peak``,
    or differing bytes.
    """
    counts, worst = outputs(), 0.0
    for op, cases in samples.items():
        for case, errors in cases.items():
            dtype = case.rpartition(".")[2]
            tolerances = {"rms": RMS_TOLERANCES[dtype], "peak": max(PEAK_TOLERANCES[dtype], COARSE.get(op, 0.0))}
            kinds: dict[str, dict[str, float]] = {}
            for name, error in errors.items():
                output, _, kind = name.partition(".")
                kinds.setdefault(output, {})[kind] = error
            if sorted(map(int, kinds)) != list(range(counts[op])):
                raise SampleError(f"{op} {case} must hold its {counts[op]} outputs, got {sorted(kinds)}")
            for output, found in kinds.items():
                worst = max(worst, _error_of(f"{op} {case} output {output}", found, tolerances))
    return worst


def _error_of(what: str, found: Mapping[str, float], tolerances: Mapping[str, float]) -> float:
    if min(found.values()) < 0:
        raise SampleError(f"errors of {what} must be at least 0, got {found}")
    failed = any(error for kind, error in found.items() if kind not in (*tolerances, "max"))
    if not failed and "bytes_differ" not in found and not tolerances.keys() <= found.keys():
        raise SampleError(f"{what} must hold {' and '.join(tolerances)} or bytes_differ, got {sorted(found)}")
    shares = [found[kind] / bar for kind, bar in tolerances.items() if kind in found]
    return FAILED if failed else max(shares, default=0.0)


def unnamed(samples: Any, *, texts: Mapping[str, Sequence[str]]) -> float:
    """Entries whose ``message`` lacks one of the ``texts`` of their name."""
    if samples.keys() != texts.keys():
        raise SampleError(f"messages must be of {sorted(texts)}, got {sorted(samples)}")
    return sum(any(text not in samples[name]["message"] for text in expected) for name, expected in texts.items())


def uncounted_kernels(samples: Any) -> float:
    """Per backend: kernels in DeepGEMM's cache that no counted key names, and such keys without a kernel, added."""
    different = 0
    for one in samples.values():
        by_op, keys, kernels = one["by_op"], one["deep_gemm_keys"], one["deep_gemm_kernels"]
        if sum(by_op.values()) != one["gemm_keys"] or by_op.get("deep_gemm", 0) != len(keys):
            raise SampleError(f"GEMM keys must be those by op, got {one['gemm_keys']}, {len(keys)} and {by_op}")
        different += len(set(keys) ^ set(kernels))
    return different


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
    """Tests that did not pass, those that never ended among them, over the parts of the suite."""
    found = 0
    for name, part in samples.items():
        if sum(part["functions"].values()) != part["passed"] or part["passed"] > part["collected"]:
            raise SampleError(f"passed tests of {name} must be those of its functions, got {part['passed']}")
        bad = part["failed"] + part["errors"] + part["skipped"]
        if min(part["failed"], part["errors"], part["skipped"]) < 0:
            raise SampleError(f"counts of {name} must be at least 0, got {part}")
        found += bad + max(0, part["collected"] - part["passed"] - bad)
    return found


TEXTUAL = ("unnamed", "uncounted_kernels", "captures_before_prewarm", "not_passed")  # rules that read texts too
RULES: dict[str, Callable[..., float]] = {
    rule.__name__: rule
    for rule in (
        largest, longest_call, total, zeros, abs_mean, agreement, speed_up, worst_copy_share, first_over_tenth,
        worst_memory, worst_error, unnamed, uncounted_kernels, captures_before_prewarm, not_passed,
    )
}  # fmt: skip
