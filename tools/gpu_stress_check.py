"""Batch independence, poisoned memory, cold keys under capture, and a Flash-width model through graphs, on a GPU."""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dsv4 import ops  # noqa: E402
from dsv4.caches import allocate_caches  # noqa: E402
from dsv4.checkpoint import Checkpoint  # noqa: E402
from dsv4.config import ModelConfig, flash_config  # noqa: E402
from dsv4.engine import Engine  # noqa: E402
from dsv4.engine_config import EngineConfig  # noqa: E402
from dsv4.execution import Execution  # noqa: E402
from dsv4.model import DeepseekV4  # noqa: E402
from dsv4.ops._runtime import ColdKernelError  # noqa: E402
from dsv4.runner import Runner, Sequence  # noqa: E402
from dsv4.weights import load_weights, meta_weights  # noqa: E402

CUDA = torch.device("cuda")


def nano(numerics: str, storage: str, *, deterministic: bool = False, blocks: int = 40) -> Runner:
    config = ModelConfig.from_json(ROOT / "assets" / "nano")
    execution = Execution(numerics=numerics, dtype=torch.bfloat16, deterministic=deterministic)
    weights = load_weights(
        Checkpoint.open(ROOT / "assets" / "nano"), config, numerics, dtype=torch.bfloat16, device=CUDA, progress=False
    )
    model = DeepseekV4(config, execution, weights, max_positions=8192)
    caches = allocate_caches(
        config, execution, num_blocks=blocks, num_window_pages=2 * blocks, num_slots=4, storage=storage, device=CUDA
    )
    return Runner.eager(model, caches, 20)


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(7, 2048, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def check_batch_independence() -> dict[str, Any]:
    """64 rows alone and inside 65, 129 and 4,225 rows, after a 200-token history: logits and streams bitwise."""
    found = {}
    for numerics in ("exact", "official"):
        runner = nano(numerics, "bf16", deterministic=True)
        for total in (65, 129, 4225):
            mine, other = tokens(264, 1), tokens(total - 64, 2)
            outcomes = []
            for together in (False, True):
                sequence, second = Sequence(), Sequence(first_block=4, first_page=8, state_slot=1)
                runner.run([sequence.segment(mine[:200])])
                made = [sequence.segment(mine[200:], range(64))]
                made += [second.segment(other, (0,))] if together else []
                logits, streams = runner.run(made)
                outcomes.append((logits[:64].clone(), streams[:64].clone()))
            found[f"{numerics}.{total}"] = all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
    return {"bitwise": found, "pass": all(found.values())}


def check_poison() -> dict[str, Any]:
    """Unowned cache bytes and pad rows cannot reach valid rows: three poisons, the same result."""
    found = {}
    for numerics, storage in (("exact", "bf16"), ("official", "bf16"), ("official", "fp8")):
        runner, results = nano(numerics, storage), []
        for poison in (0, 1, 2):
            for cache in (*runner.caches.layers, *runner.caches.mtp):
                for tensor in cache.tensors():
                    if tensor.dtype == torch.uint8:
                        tensor.fill_((0, 0x7F, 0xFF)[poison])
                    else:
                        tensor.fill_((0.0, float("nan"), float("inf"))[poison])
            first = Sequence(first_block=5, first_page=11, state_slot=1)
            second = Sequence(first_block=9, first_page=21, state_slot=2)
            runner.run([first.segment(tokens(150, 3)), second.segment(tokens(5, 4))], num_rows=200, num_requests=4)
            logits, streams = runner.run(
                [first.segment(tokens(70, 5), range(70)), second.segment(tokens(7, 6), range(7))],
                num_rows=128, num_requests=4,
            )  # fmt: skip
            results.append((logits, streams[:77]))
        finite = all(t.isfinite().all().item() for r in results for t in r)
        equal = all(torch.equal(a, b) for r in results[1:] for a, b in zip(results[0], r, strict=True))
        found[f"{numerics}.{storage}"] = finite and equal
    return {"unchanged": found, "pass": all(found.values())}


def check_pads_only() -> dict[str, Any]:
    """Steps of nothing but pads, as a capture warms up with: no fault, defined outputs."""
    runner, found = nano("official", "fp8"), {}
    for rows in (32, 33, 64, 128, 250, 256):
        _, streams = runner.run([], num_rows=rows, num_requests=3)
        found[rows] = bool(streams.isfinite().all())
    torch.cuda.synchronize()
    return {"finite": found, "pass": all(found.values())}


def check_cold_capture() -> dict[str, Any]:
    """A specialisation that nobody warmed, met while capturing, is an error that names its key."""
    x, weight = torch.randn(3, 1234, device=CUDA), torch.randn(1234, device=CUDA)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            ops.rms_norm(x, weight, eps=1e-6)
    except ColdKernelError as error:
        return {"message": str(error), "pass": "rms_norm" in str(error) and "1234" in str(error)}
    return {"message": "no error", "pass": False}


def random_weights(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Weights of any config in kernel layout, made on the GPU; scales keep activations near 1."""
    g = torch.Generator(device=CUDA).manual_seed(0)
    made = {}
    for name, meta in meta_weights(config, "official", torch.bfloat16).items():
        kind = {"device": CUDA, "generator": g}
        if meta.dtype == torch.uint8:
            low, high = (117, 120) if name.endswith("scale") else (0, 256)
            made[name] = torch.randint(low, high, meta.shape, dtype=torch.uint8, **kind)
        elif meta.dtype == torch.float8_e4m3fn:
            made[name] = torch.randn(meta.shape, **kind).to(meta.dtype)
        elif meta.dtype == torch.int32:
            made[name] = torch.randint(0, config.n_routed_experts, meta.shape, dtype=torch.int32, **kind)
        elif name.endswith(".scale") and meta.numel():
            made[name] = torch.full(meta.shape, 2.0**-6, dtype=meta.dtype, device=CUDA)
        elif "norm" in name:
            made[name] = torch.ones(meta.shape, dtype=meta.dtype, device=CUDA)
        else:
            made[name] = (torch.randn(meta.shape, **kind) * 0.02).to(meta.dtype)
    return made


def check_flash_width(layers: int = 8) -> dict[str, Any]:
    """A Flash-width model of 256 experts: capture of a 20-bucket ladder, prefill of 8,192, decode at 1 to 256."""
    config = flash_config().resized(num_hidden_layers=layers)
    settings = EngineConfig(
        numerics="official", device="cuda", compile="off", graphs="full", max_seq_len=8448, max_requests=256,
        num_blocks=600, token_budget=8192, chunk_tokens=8192, cache_storage="fp8", prefix_reuse=False,
    )  # fmt: skip
    model = DeepseekV4(config, settings.execution, random_weights(config), max_positions=settings.max_blocks * 256)
    torch.cuda.synchronize()
    weight_gib = torch.cuda.memory_allocated() / 2**30
    engine = Engine.from_model(model, settings)
    report = engine.started.capture_report
    runner, found = engine.runner, {}
    for batch in (1, 8, 32, 128, 256):
        made = [Sequence(i, i, i).segment([17], (0,), start=100) for i in range(batch)]
        inputs = runner.inputs(made)
        found[f"decode_{batch}_us"] = _median(lambda inputs=inputs: runner.step(inputs, runner.caches))
    inputs = runner.inputs([Sequence().segment(tokens(8192, 9), (8191,))])
    found["prefill_8192_us"] = _median(lambda: runner.step(inputs, runner.caches), 5)
    logits, _ = runner.step(inputs, runner.caches)
    return {
        "layers": layers, "weights_gib": weight_gib, "caches_gib": runner.caches.bytes() / 2**30,
        "buckets": len(report.buckets), "graphs": report.graphs, "capture_s": report.capture_seconds,
        "graph_mib": report.mib, "stages": engine.started.seconds, "finite": bool(logits.isfinite().all()),
        "paths": {str(k): v for k, v in engine.started.captured.path_counts.items()},
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30, **found,
    }  # fmt: skip


def _median(call: Callable[[], Any], repeats: int = 20) -> float:
    times = []
    for index in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if index >= 2:
            times.append(start.elapsed_time(end) * 1000)
    return sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    sections: dict[str, Callable[[], Any]] = {
        "batch_independence": check_batch_independence,
        "poison": check_poison,
        "pads_only": check_pads_only,
        "flash_width": check_flash_width,
        "cold_capture": check_cold_capture,  # last: an error during capture
    }
    report: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name, section in sections.items():
        began = time.perf_counter()
        try:
            report[name] = section()
        except Exception as error:
            report[name] = {
                "error": f"{type(error).__name__}: {str(error)[:900]}",
                "trace": traceback.format_exc()[-2500:],
            }
        report[name]["section_s"] = round(time.perf_counter() - began, 1)
        arguments.out.write_text(json.dumps(report, indent=1, default=str))
        print(name, json.dumps(report[name], default=str)[:1500])


if __name__ == "__main__":
    main()
