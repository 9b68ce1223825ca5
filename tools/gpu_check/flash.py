"""Models of Flash width through graphs: 8 layers with all experts, 43 layers with few; memory of FP4 experts."""

import torch

from dsv4 import ops
from dsv4.config import ModelConfig, flash_config
from dsv4.engine import Engine
from dsv4.ops.shapes import flash
from dsv4.runner import Sequence

from .common import Record, random_tokens
from .models import random_engine, settings_of
from .place import NANO, Place
from .points import FLASH_BATCHES


def _engine(config: ModelConfig, place: Place) -> Engine:
    budget = 256 if place.dry else 8192
    settings = settings_of(
        place, "full", numerics="official", max_seq_len=budget + 256, max_requests=budget // 32, num_blocks=600,
        token_budget=budget, cache_storage="fp8", prefix_reuse=False,
    )  # fmt: skip
    return random_engine(place, config, settings, "full")


def flash_width(place: Place, record: Record) -> None:
    """8 layers of 256 experts: prefill of 8,192 rows and decode of 1 to 256 requests; capture of 20 buckets."""
    points = ("flash_width", "flash_width_graphs", "flash_width_capture_s", "flash_width_graph_mib", "fp4_residency")
    with record.block(*points) as (steps, graphs, seconds, mib, residency):
        config = ModelConfig.from_json(NANO) if place.dry else flash_config().resized(num_hidden_layers=8)
        engine = _engine(config, place)
        _capture_numbers(engine, graphs, seconds, mib)
        with record.profiling():
            for batch in FLASH_BATCHES[: 3 if place.dry else None]:
                made = [Sequence(i, i, i).segment([17 + i], (0,), start=100) for i in range(batch)]
                steps[f"decode_{batch}"] = _step(engine, made)
            rows = 64 if place.dry else 8192
            steps[f"prefill_{rows}"] = _step(engine, [Sequence().segment(random_tokens(rows, 9), (rows - 1,))])
        if not place.dry:
            buffers = {b.data_ptr(): b for b in engine.runner.model.buffers()}.values()
            weights = sum(b.numel() * b.element_size() for b in buffers)
            residency["flash_width"] = {  # everything the process ever held, graphs and start-up included
                "peak_bytes": torch.cuda.max_memory_reserved(),
                "before_bytes": weights + engine.runner.caches.bytes(),
                "unit_bytes": _layer_bytes(flash.num_experts, flash.hidden, flash.expert_hidden),
            }  # fmt: skip


def _layer_bytes(experts: int, hidden: int, inner: int) -> int:
    """An 8-bit copy of the experts of one layer, three matrices each."""
    return experts * 3 * hidden * inner


def _capture_numbers(engine: Engine, graphs: dict, seconds: dict, mib: dict) -> None:
    report = engine.started.capture_reports.get("step")
    if report is None:
        return
    for bucket in report.buckets:
        name = str(bucket.bucket.tokens)
        graphs.setdefault("graphs", {})[name] = bucket.graphs
        mib.setdefault("by_bucket", {})[name] = bucket.mib
        seconds.setdefault("by_bucket", {})[name] = bucket.seconds
    seconds["capture_s"], mib["mib"] = report.capture_seconds, report.mib


@torch.no_grad()
def _step(engine: Engine, segments: list) -> dict[str, int]:
    runner = engine.runner
    logits, streams = runner.step(runner.inputs(segments), runner.caches)
    finite = bool(logits.isfinite().all()) and bool(streams.isfinite().all())
    step = engine.started.captured.get("step")
    return {"not_finite": int(not finite), "not_replayed": int(step is not None and step.last_path.kind != "full")}


def layers_43(place: Place, record: Record) -> None:
    """All 43 layers with 8 experts each, so that they fit: graphs, seconds and MiB of at most 20 buckets."""
    points = ("layers_43_graphs", "layers_43_capture_s", "layers_43_graph_mib")
    with record.block(*points) as (graphs, seconds, mib):
        config = ModelConfig.from_json(NANO) if place.dry else flash_config().resized(n_routed_experts=8)
        _capture_numbers(_engine(config, place), graphs, seconds, mib)


@torch.no_grad()
def expert_memory(place: Place, record: Record) -> None:
    """Peak memory of the expert op over FP4 experts of Flash, against an 8-bit copy of one layer's experts."""
    with record.block("fp4_residency") as (found,):
        shape = flash
        experts, hidden, inner = (8, 256, 128) if place.dry else (shape.num_experts, shape.hidden, shape.expert_hidden)
        g = torch.Generator(device=place.device).manual_seed(0)
        kind = {"dtype": torch.uint8, "device": place.device, "generator": g}
        sizes = (experts, 2 * inner, hidden // 2), (experts, hidden, inner // 2)
        w13, w2 = (torch.randint(256, size, **kind) for size in sizes)
        scales = [torch.randint(117, 120, (*w.shape[:2], w.shape[2] // 16), **kind) for w in (w13, w2)]
        for rows in (1, 256, 8192 if not place.dry else 300):
            act = torch.randn(rows, hidden, device=place.device, generator=g).to(torch.bfloat16)
            x, x_scale = ops.quant_fp8(act)
            ids = torch.rand(rows, experts, device=place.device, generator=g).topk(6).indices.int()
            weights = torch.rand(rows, 6, device=place.device, generator=g)
            arguments = (x, x_scale, ids, weights, w13, scales[0], w2, scales[1])
            ops.expert_ffn(*arguments, limit=10.0, deterministic=False)
            if place.dry:
                continue
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            ops.expert_ffn(*arguments, limit=10.0, deterministic=False)
            torch.cuda.synchronize()
            found[f"op_{rows}"] = {
                "peak_bytes": torch.cuda.max_memory_allocated(), "before_bytes": before,
                "unit_bytes": _layer_bytes(experts, hidden, inner),
            }  # fmt: skip
