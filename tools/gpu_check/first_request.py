"""First requests against tenth ones, in fresh processes, with the speed of the core beside each.

A virtual core of a shared host is at times up to 1.9 times slower, for tenths of a second, with nothing else on it, as
when the other thread of the physical core works for somebody else. A fixed loop of Python, which has nothing to do with
the library, shows that as well as any request does: ``bench/core_speed.json``. So the loop runs beside every request,
and an engine counts if its core was as fast at the first as at the tenth.
"""

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from dsv4.sampling import SamplingParams

from .children import REQUEST_PATHS, REQUEST_REPEATS, Child, servers, wait_for_turn
from .common import Record, random_tokens
from .models import nano_engine
from .place import Place
from .rules import is_steady, same_core

PATHS = {
    "eager": ("off", {}),
    "full": ("full", {}),
    "piecewise": ("piecewise", {}),
    "full.drafting": ("full", {"draft_tokens": 1}),
}
REQUESTS = 10
AWAKE_S = 0.5
STEADY_S = 3.0  # how long to wait for a core of one speed
WAVES = 4
_LOOPS, _ADDITIONS = 5, 20_000  # half a millisecond each
_ALIKE = 5  # loops in a row, with 20 ms of work between, that make a core steady


def first_request(place: Place, record: Record, prepared: Sequence[Child]) -> None:
    """Fresh processes, all ready: each serves ten requests, in turn, on a machine that does nothing else.

    Paths with too few engines whose core kept its speed get another wave of engines. What requests took does not decide
    about it.
    """
    children, wave = list(prepared), 1
    try:
        while children:
            for child in children:
                with record.block("first_request") as (found,):
                    child.go()
                    samples = found.setdefault(child.purpose[1], {})
                    for name, value in child.result().items():
                        samples.setdefault(name, []).append(value)
            lacking = _lacking(record) if wave < WAVES and not place.dry else ()
            children, wave = servers(place, lacking) if lacking else [], wave + 1
            for child in children:
                child.wait_ready()
    finally:
        for child in children:
            child.process.kill()


def _lacking(record: Record) -> list[str]:
    """Paths of which fewer engines count than must."""
    found = record.samples["first_request"]
    counts = {path: sum(map(same_core, found.get(path, {}).get("core_s", ()))) for path in REQUEST_PATHS}
    return [path for path, count in counts.items() if count < REQUEST_REPEATS]


def serve(place: Place, path: str) -> dict[str, Any]:
    """Start an engine, say so, wait for a line, then serve ten prompts of the same length, 4 new tokens each."""
    mode, more = PATHS[path]
    budget = 32 if place.dry else 512
    engine = nano_engine(place, mode, max_seq_len=1024, max_requests=4, num_blocks=16, token_budget=budget, **more)
    params = SamplingParams(max_new_tokens=4)
    prompts = [random_tokens(60, seed) for seed in range(REQUESTS)]
    x = torch.randn(2048, 2048, device=place.device, dtype=torch.float32 if place.dry else torch.bfloat16)
    wait_for_turn()
    awake_s = stay_awake(place, x)
    engine.rehearse()  # with which start-up ended, long ago: the first request follows it
    core_s, request_s = [core_seconds()], []
    for prompt in prompts:
        began = time.perf_counter()
        engine.generate([prompt], params)
        request_s.append(time.perf_counter() - began)
        core_s.append(core_seconds())
    return {"awake_s": awake_s, "request_s": request_s, "core_s": core_s}


def core_seconds() -> float:
    """A fixed loop of additions, the median of a few: what this core needs for it right now."""
    times = []
    for _ in range(_LOOPS):
        began, number = time.perf_counter(), 0
        for _ in range(_ADDITIONS):
            number += 1
        times.append(time.perf_counter() - began)
    return median(times)


def stay_awake(place: Place, x: torch.Tensor) -> float:
    """Keep the device and this core busy, with nothing of the library, until the core has one speed; seconds it took.

    Both had slept while the process waited. What is asked is what compiling and loading leave to the first request;
    clocks that rise are no part of it. Nor are caches of the core that others have used meanwhile: the last stage of
    start-up, which is a rehearsal, comes again.
    """
    began, speeds = time.perf_counter(), []
    while True:
        turn = time.perf_counter()
        while time.perf_counter() - turn < 0.02:
            for _ in range(8):
                x @ x
            place.synchronize()
        speeds.append(core_seconds())
        taken = time.perf_counter() - began
        if taken > STEADY_S or taken > AWAKE_S and is_steady(speeds[-_ALIKE:]):
            return taken
