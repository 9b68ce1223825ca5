"""Inputs that broke other implementations, on the GPU; the test suite has the same cases on the CPU."""

from dataclasses import replace

import torch

from dsv4.caches import allocate_caches
from dsv4.execution import Execution
from dsv4.model import DeepseekV4
from dsv4.runner import Runner, Sequence

from .common import Record, differs, random_tokens
from .models import random_weights, wide_config
from .place import Place
from .replay import padded_inputs


def _runner(place: Place, *, deterministic: bool = False) -> Runner:
    """Two Flash-width layers, ratios 4 and 128, top-k 512, FP8 caches."""
    config = wide_config("flash", place, layers=2, ratios=(4, 128), experts=8)
    execution = Execution(numerics="official", dtype=torch.bfloat16, deterministic=deterministic)
    model = DeepseekV4(config, execution, random_weights(config, place.device), max_positions=4096)
    caches = allocate_caches(
        config, execution, num_blocks=40, num_window_pages=80, num_slots=4, storage="fp8", device=place.device
    )
    return Runner.eager(model, caches, 16)


@torch.no_grad()
def bad_lengths(place: Place, record: Record) -> None:
    """C5: context lengths that are all zero. C6: signed padding, where lengths are 5, 0, −1 and −4."""
    with record.block("case_C5", "case_C6") as found:
        zero, signed = (samples.setdefault("model", {}) for samples in found)
        runner = _runner(place)
        valid = runner.inputs([])
        for rows in (32, 33, 64, 128, 250, 256):
            inputs = padded_inputs(valid, rows, rows, rows)
            logits, streams = runner.step(inputs, runner.caches)
            _, drafted = runner.draft(inputs, runner.caches, streams)
            zero[str(rows)] = sum(int(not t.isfinite().all()) for t in (logits, streams, drafted))
        place.synchronize()
        for deterministic in (False, True):
            for name, count in _signed_padding(place, deterministic).items():
                signed[name] = signed.get(name, 0) + count


def _signed_padding(place: Place, deterministic: bool) -> dict[str, int]:
    """Five rows with pads whose lengths are 0, -1 and -4, against what must have the same bits: the same batch with
    lengths of 0, and the rows without pads in deterministic mode (elsewhere sums depend on the number of rows)."""
    runner = _runner(place, deterministic=deterministic)
    sequence = Sequence(3, 6, 1)
    sequence.segment(random_tokens(2000, 1))
    runner.run([replace(sequence.segment(random_tokens(2000, 1), start=0))])  # more entries than top-k picks
    step = runner.inputs([Sequence(3, 6, 1).segment(random_tokens(5, 2), range(5), start=0)])
    padded = padded_inputs(step, 8, 4, 5)
    wanted = [t[:5].clone() for t in runner.step(step if deterministic else padded, runner.caches)]
    padded.seq_lens.copy_(torch.tensor([5, 0, -1, -4], dtype=torch.int32))
    logits, streams = runner.step(padded, runner.caches)
    _, drafted = runner.draft(padded, runner.caches, streams)
    place.synchronize()
    return {
        "pads_not_zero": int(bool(streams[5:].any())) + int(bool(drafted[5:].any())),
        "valid_changed": differs(logits, wanted[0]) + differs(streams[:5].clone(), wanted[1]),
        "not_finite": sum(int(not t.isfinite().all()) for t in (logits, streams, drafted)),
    }


def public_cases(place: Place, record: Record) -> None:
    """C3, C5, C6, C8 and C11 as the test suite measures them."""
    from tests.gpu_cases import c3, c5, c6, c8, c11

    device = place.device.type
    with record.block("case_C5") as (found,):
        found["ops"] = {str(rows): counts for rows, counts in c5(device)["samples"].items()}
    with record.block("case_C6") as (found,):
        found["ops"] = c6(device)["samples"]
    with record.block("case_C8") as (found,):
        found["suite"] = c8(device)["samples"]
    with record.block("case_C11") as (found,):
        found |= c11(device)["samples"]
    with record.block("case_C3") as (found,):
        found |= c3(device)["samples"]


def processes(place: Place, record: Record) -> None:
    """C1 and C12: several processes that warm this GPU at once."""
    from tests.graphs.gpu_processes import c1, c12

    device = place.device.type
    for name, names in (("triton", None), ("tilelang", ("mhc_post",))):
        with record.block("case_C12") as (found,):
            found[name] = c12(device, "triton" if place.dry else name, names)["samples"]
    with record.block("case_C1") as (found,):
        found |= c1(device, **({"slow_s": 2.0, "limit_s": 1.0} if place.dry else {}))["samples"]
