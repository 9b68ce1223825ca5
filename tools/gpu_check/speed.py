"""Timings, one at a time on an idle GPU: mHC post against a copy, decode against Hugging Face."""

import time
from collections.abc import Callable
from typing import Any

import torch

from dsv4 import ops
from dsv4.ops.shapes import flash
from dsv4.sampling import SamplingParams
from dsv4.step_plan import Request

from .common import Record, random_tokens
from .models import random_engine, settings_of, using_backend, wide_config
from .place import Place

REPEATS = 60
SETS = 3  # buffer sets in rotation: each is many times the 50 MB of L2


def mhc_post(place: Place, record: Record, backend: str, name: str) -> None:
    """The kernel and a copy of as many bytes in turn, on buffers that L2 has long lost."""
    with record.block("mhc_post_copy_share") as (found,), using_backend(backend, place), torch.no_grad():
        rows, hidden = (64, 256) if place.dry else (16384, flash.hidden)
        g = torch.Generator(device=place.device).manual_seed(0)
        act = {"device": place.device, "generator": g, "dtype": torch.bfloat16}
        sets = []
        for _ in range(SETS):
            y, streams = torch.randn(rows, hidden, **act), torch.randn(rows, 4, hidden, **act)
            post = torch.rand(rows, 4, device=place.device, generator=g)
            comb = torch.rand(rows, 4, 4, device=place.device, generator=g)
            sets.append((y, streams, post, comb))
        moved = sum(t.numel() * t.element_size() for t in sets[0]) + streams.numel() * 2
        sources = [torch.ones(moved // 2, dtype=torch.uint8, device=place.device) for _ in range(SETS)]
        targets = [torch.empty_like(source) for source in sources]
        ahead = torch.empty(2**20 if place.dry else 2**31, dtype=torch.uint8, device=place.device)
        times: dict[str, list[float]] = {"kernel_us": [], "copy_us": []}
        for index in range(REPEATS + 5):
            number = index % SETS
            kernel = _timed(place, lambda: ops.mhc_post(*sets[number]), ahead)
            copy = _timed(place, lambda: targets[number].copy_(sources[number]), ahead)
            if index >= 5:
                times["kernel_us"].append(kernel)
                times["copy_us"].append(copy)
        found[name] = {**times, "kernel_bytes": moved, "copy_bytes": 2 * (moved // 2)}


def _timed(place: Place, call: Callable[[], Any], ahead: torch.Tensor) -> float:
    """Microseconds on the device. ``ahead`` is filled first, which takes the device longer than the host needs to
    issue the call: otherwise the host's time would be measured."""
    if place.dry:
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e6
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    ahead.fill_(1)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000


def decode(place: Place, record: Record) -> None:
    """4 Flash-width layers (window, ratio 4, 128, 4), 64 experts, batch 1, after 128 tokens: milliseconds per step."""
    with record.block("decode_speed_up") as (found,):
        config = wide_config("flash", place, layers=4, ratios=(0, 4, 128, 4), experts=64)
        config = config.resized(num_hash_layers=0)
        steps, tokens = (3 if place.dry else 40), random_tokens(128, 5)
        found["ours"] = _ours(config, place, steps, tokens)
        found["theirs"] = _hugging_face(config, place, steps, tokens)


@torch.no_grad()
def _ours(config: Any, place: Place, steps: int, tokens: list[int]) -> list[float]:
    """Whole steps of the engine's loop: planned, built, copied, replayed, token chosen, read back and committed."""
    settings = settings_of(
        place,
        "full",
        numerics="official",
        token_budget=128,
        max_requests=1,
        max_seq_len=512,
        num_blocks=2,
        cache_storage="fp8",
    )
    engine = random_engine(place, config, settings, "full")
    ends = SamplingParams(max_new_tokens=steps + 4, ignore_eos=True)
    request = Request(id="decode", prompt_ids=tokens, params=ends)
    engine.loop.add(request)
    times = []
    while not request.generated:
        engine.loop.step()
    for _ in range(steps):
        began = time.perf_counter()
        engine.loop.step()
        times.append((time.perf_counter() - began) * 1000)
    captured = engine.started.captured.get("step")
    if captured is not None and captured.last_path.kind != "full":
        raise RuntimeError(f"decode must replay full graphs, got {captured.last_path}")
    return times[2:] if not place.dry else times


@torch.no_grad()
def _hugging_face(config: Any, place: Place, steps: int, tokens: list[int]) -> list[float]:
    """``DeepseekV4ForCausalLM`` in bf16, eager, with its own cache; random weights made on the device."""
    from transformers import DeepseekV4ForCausalLM

    from tests.hf_model import hf_config

    made = hf_config(config)
    made._attn_implementation = "eager"
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if place.dry else torch.bfloat16)
    try:
        with torch.device(place.device):
            model = DeepseekV4ForCausalLM(made).eval()
    finally:
        torch.set_default_dtype(default)
    for parameter in model.parameters():
        parameter.normal_(0, 0.02)
    out = model(input_ids=torch.tensor([tokens], device=place.device), use_cache=True)
    cache, token, times = out.past_key_values, out.logits[:, -1:].argmax(-1), []
    for _ in range(steps):
        place.synchronize()
        began = time.perf_counter()
        out = model(input_ids=token, past_key_values=cache, use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
        token.item()
        times.append((time.perf_counter() - began) * 1000)
    return times[2:] if not place.dry else times
