"""Measure on a GPU what CI cannot see; writes one JSON report. Run through tools/gpu_check.sh.

Every section catches its own failure and records it, so that one run shows as much as it can.
"""

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dsv4 import evaluate, ops  # noqa: E402
from dsv4.caches import allocate_caches  # noqa: E402
from dsv4.checkpoint import Checkpoint  # noqa: E402
from dsv4.config import ModelConfig  # noqa: E402
from dsv4.execution import Execution  # noqa: E402
from dsv4.model import DeepseekV4  # noqa: E402
from dsv4.ops import _runtime  # noqa: E402
from dsv4.ops.shapes import flash, nano, tiny  # noqa: E402
from dsv4.runner import Runner  # noqa: E402
from dsv4.weights import load_weights  # noqa: E402

CUDA = torch.device("cuda")
GOLDEN = ROOT / "tests" / "golden"
TOKEN_COUNTS = (0, 1, 7, 33, 129)
SHAPES = (tiny, nano, replace(flash, name="flash-16-experts", num_experts=16, vocab=2048))


def on_gpu(tree: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(CUDA), tree)


def outputs(spec: ops.OpSpec, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Returned tensors, then mutated arguments, of one call on clones of the mutated ones."""
    writes = [s.alias_info is not None and s.alias_info.is_write for s in spec.overload._schema.arguments]
    args = tuple(a.clone() if w else a for a, w in zip(args, writes, strict=False))
    out = spec.overload(*args, **kwargs)
    returned = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
    return returned + [a for a, w in zip(args, writes, strict=False) if w]


def distance(got: torch.Tensor, want: torch.Tensor) -> dict[str, float]:
    """Largest absolute difference and relative RMS of floats; share of differing elements of anything else."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return {"mismatch": 1.0}
    if not got.numel():
        return {"rms": 0.0}
    if got.dtype not in (torch.float32, torch.bfloat16):
        a, b = got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)
        return {"bytes_differ": (a != b).float().mean().item()}
    a, b = got.double(), want.double()
    special = ~b.isfinite()
    if not torch.equal(a[special].nan_to_num(7.0, 8.0, 9.0), b[special].nan_to_num(7.0, 8.0, 9.0)):
        return {"special_differ": 1.0}
    a, b = a[~special], b[~special]
    if not a.isfinite().all():
        return {"not_finite": 1.0}
    scale = b.square().mean().sqrt().item() if b.numel() else 1.0
    error = (a - b).abs()
    return {
        "rms": (error.square().mean().sqrt().item() / scale if scale else error.max().item()) if b.numel() else 0.0,
        "max": error.max().item() if b.numel() else 0.0,
    }


def check_ops(only: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, spec in ops.specs().items():
        if spec.cuda is None or (only and only != name):
            continue
        rows = found.setdefault(name, {})
        for shape in SHAPES:
            for dtype in (torch.bfloat16, torch.float32):
                worst: dict[str, float] = {}
                try:
                    for num_tokens in TOKEN_COUNTS:
                        args, kwargs = spec.example(
                            shape, num_tokens=num_tokens, device=torch.device("cpu"), dtype=dtype, seed=num_tokens
                        )
                        args = on_gpu(args)
                        with _runtime.use_references():
                            want = outputs(spec, args, kwargs)
                        got = outputs(spec, args, kwargs)
                        torch.cuda.synchronize()
                        for index, (a, b) in enumerate(zip(got, want, strict=True)):
                            for kind, value in distance(a, b).items():
                                worst[f"{index}.{kind}"] = max(worst.get(f"{index}.{kind}", 0.0), value)
                except Exception as error:  # recorded: the other ops must still be seen
                    worst["error"] = f"T={num_tokens}: {type(error).__name__}: {str(error)[:300]}"
                    if "CUDA error" in str(error) or "illegal" in str(error):
                        rows[f"{shape.name}.{str(dtype)[6:]}"] = worst
                        return found  # the context is lost
                rows[f"{shape.name}.{str(dtype)[6:]}"] = worst
    return found


def nano_runner(
    numerics: str, dtype: torch.dtype, *, deterministic: bool = False, storage: str | None = None
) -> Runner:
    config = ModelConfig.from_json(ROOT / "assets" / "nano")
    execution = Execution(numerics=numerics, dtype=dtype, deterministic=deterministic)
    checkpoint = Checkpoint.open(ROOT / "assets" / "nano")
    weights = load_weights(checkpoint, config, numerics, dtype=dtype, device=CUDA, progress=False)
    model = DeepseekV4(config, execution, weights, max_positions=2048)
    storage = storage or ("fp32" if dtype == torch.float32 else "bf16")
    caches = allocate_caches(
        config, execution, num_blocks=8, num_window_pages=16, num_slots=1, storage=storage, device=CUDA
    )
    return Runner.eager(model, caches, 8)


def check_references() -> dict[str, Any]:
    """Nano in fp32 with the references on CUDA, against the goldens."""
    prompts = json.loads((GOLDEN / "prompts.json").read_text())
    golden = load_file(GOLDEN / "exact_logits.safetensors")
    runner = nano_runner("exact", torch.float32)
    with _runtime.use_references():
        errors = [
            (evaluate.last_logits(runner, prompts[i]).cpu() - golden[f"logits_{i}"]).abs().max().item()
            for i in (0, 7, 9, 12, 13)
        ]
    return {"samples": errors, "value": max(errors), "bar": 5e-4, "pass": max(errors) <= 5e-4}


def check_nano_exact(windows: int) -> dict[str, Any]:
    """Nano in exact mode, bf16 activations through the kernels: NLL of the first windows, top-1 of the prompts."""
    record = json.loads((GOLDEN / "exact_nll.json").read_text())
    golden = load_file(GOLDEN / "exact_logits.safetensors")
    prompts = json.loads((GOLDEN / "prompts.json").read_text())
    runner = nano_runner("exact", torch.bfloat16)
    result = evaluate.score(runner, record["tokens"][: windows * 1024 + 3], window=1024, mtp=True)
    differences = [a - b for a, b in zip(result.nll_per_window, record["nll_per_window"])]
    logits = [evaluate.last_logits(runner, p).cpu() for p in prompts]
    top1 = sum(a.argmax() == golden[f"logits_{i}"].argmax() for i, a in enumerate(logits)).item() / len(prompts)
    mean = sum(differences) / len(differences)
    return {"samples": differences, "top1": top1, "mtp_nll": result.mtp_nll, "value": abs(mean), "bar": 5e-3,
            "pass": abs(mean) <= 5e-3}  # fmt: skip


def check_nano_official() -> dict[str, Any]:
    found = {}
    for storage in ("bf16", "fp8"):
        runner = nano_runner("official", torch.bfloat16, storage=storage)
        found[storage] = evaluate.compare(runner, load_file(GOLDEN / "layers_official.safetensors")).worst
    bars = {"attn_out": 0.010, "ffn_out": 0.006, "index_score": 0.03, "picks_changed": 0.003}
    return {"samples": found, "bar": bars, "pass": all(w[k] <= bars[k] for w in found.values() for k in bars)}


def timings() -> dict[str, Any]:
    """Microseconds of a few kernels at Flash width, and of one eager decode step of nano."""
    found: dict[str, Any] = {}
    source = torch.empty(2**30, dtype=torch.uint8, device=CUDA)
    target = torch.empty_like(source)
    us = _bench(lambda: target.copy_(source))
    found["copy_tb_s"] = 2 * source.numel() / us / 1e6
    streams = torch.randn(16384, 4, 4096, device=CUDA, dtype=torch.bfloat16)
    y = torch.randn(16384, 4096, device=CUDA, dtype=torch.bfloat16)
    post, comb = torch.rand(16384, 4, device=CUDA), torch.rand(16384, 4, 4, device=CUDA)
    if ops.spec("mhc_post").cuda is not None:
        us = _bench(lambda: ops.mhc_post(y, streams, post, comb))
        moved = 2 * streams.numel() * 2 + y.numel() * 2
        found["mhc_post_16384_us"], found["mhc_post_share_of_copy"] = us, moved / us / 1e6 / found["copy_tb_s"]
    return found


def _bench(call: Callable[[], Any], repeats: int = 20) -> float:
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", help="only this op, and no model checks")
    parser.add_argument("--model", action="store_true", help="only the model checks")
    parser.add_argument("--windows", type=int, default=4)
    arguments = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": commit.stdout.strip() or None,
    }
    sections: dict[str, Callable[[], Any]] = {} if arguments.model else {"ops": lambda: check_ops(arguments.only)}
    if not arguments.only:
        sections |= {
            "references_fp32": check_references,
            "nano_exact": lambda: check_nano_exact(arguments.windows),
            "nano_official": check_nano_official,
            "timings": timings,
        }
    for name, section in sections.items():
        began = time.perf_counter()
        try:
            report[name] = section()
        except Exception as error:
            report[name] = {
                "error": f"{type(error).__name__}: {str(error)[:500]}",
                "trace": traceback.format_exc()[-3000:],
            }
        report.setdefault("seconds", {})[name] = round(time.perf_counter() - began, 1)
        arguments.out.write_text(json.dumps(report, indent=1))
    report["warm_keys"] = sorted(map(list, _runtime.warm_keys()), key=str)
    arguments.out.write_text(json.dumps(report, indent=1))
    for name, rows in report.get("ops", {}).items():
        for variant, worst in rows.items() if isinstance(rows, dict) else ():
            print(
                f"{name:20s} {variant:28s}",
                " ".join(f"{k}={v:.2g}" if isinstance(v, float) else f"{k}={v}" for k, v in worst.items()),
            )
    for name in sections:
        if name != "ops":
            print(name, json.dumps(report[name])[:1500])
    print("seconds", report["seconds"])


if __name__ == "__main__":
    main()
