"""Engine checks on a GPU: prewarm, graphs against eager, nothing compiled once ready. Run through tools/gpu_check.sh."""

import argparse
import json
import logging
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dsv4.config import ModelConfig, flash_config  # noqa: E402
from dsv4.engine import Engine  # noqa: E402
from dsv4.engine_config import EngineConfig  # noqa: E402
from dsv4.graphs.jit_monitor import JitMonitor  # noqa: E402
from dsv4.ops._jit_libraries import jit_libraries  # noqa: E402
from dsv4.runner import Runner, Sequence  # noqa: E402
from dsv4.sampling import SamplingParams  # noqa: E402
from dsv4.start_up import warm_kernels  # noqa: E402

NANO = ROOT / "assets" / "nano"
# first and last token counts of split buckets at 132 multiprocessors, tile edges, and odd sizes
TOKEN_COUNTS = (1, 7, 8, 15, 16, 17, 31, 32, 33, 64, 65, 66, 128, 129, 192, 193, 257, 321, 385, 449, 511)


def settings(**more: Any) -> EngineConfig:
    base = {"device": "cuda", "max_seq_len": 1024, "max_requests": 4, "token_budget": 512, "compile": "off"}
    return EngineConfig(**base | more)


def segments(total: int, requests: int, seed: int) -> list:
    g = torch.Generator().manual_seed(seed)
    made, left = [], total
    for index in range(requests):
        count = left if index == requests - 1 else max(1, left // 2)
        tokens = torch.randint(7, 2048, (count,), generator=g).tolist()
        sequence = Sequence(first_block=4 * index, first_page=8 * index, state_slot=index)
        made.append(sequence.segment(tokens, (count - 1,)))
        left -= count
    return made


def check_prewarm() -> dict[str, Any]:
    """All kernels of Flash from an empty kernel cache, then again in the same process."""
    config = settings(numerics="official", token_budget=8192)
    first = warm_kernels(flash_config(), config, count=True)
    again = warm_kernels(flash_config(), config)
    slowest = sorted(first.seconds.items(), key=lambda item: -item[1])[:8]
    return {
        "keys": len(first.keys), "run": len(first.seconds), "wall_s": first.wall_seconds, "again_s": again.wall_seconds,
        "repeated": again.repeated, "mhc_keys": sum(str(k[0]).startswith("mhc") for k in first.keys),
        "jit": {name: vars(first.jit.total(name)) for name in first.jit.libraries} if first.jit else None,
        "slowest": [(str(k), round(s, 2)) for k, s in slowest],
    }  # fmt: skip


def check_graphs(numerics: str, **more: Any) -> dict[str, Any]:
    """Replays against eager calls: the same padded batch bitwise, and no compilation once ready."""
    began = time.perf_counter()
    engine = Engine.from_checkpoint(NANO, settings(numerics=numerics, **more), progress=False)
    ready = time.perf_counter() - began
    captured, eager = engine.started.captured, Runner.eager(engine.runner.model, engine.runner.caches, 4)
    differing, kinds = [], {}
    with JitMonitor(libraries=jit_libraries()) as monitor:
        for seed, total in enumerate(TOKEN_COUNTS):
            made = segments(total, min(3, total), seed)
            got = [t.clone() for t in engine.runner.run(made)]
            kinds[total] = str(captured.last_path.kind) if captured else "eager"
            bucket = captured.last_path.bucket if captured else None
            pads = {"num_rows": bucket.tokens, "num_requests": bucket.requests} if bucket else {}
            want = eager.run(made, **pads)
            same = [torch.equal(a, b[: a.shape[0]]) for a, b in zip(got, want, strict=True)]
            if not all(same):
                error = max((a - b[: a.shape[0]]).abs().max().item() for a, b in zip(got, want, strict=True))
                differing.append((total, error))
        jit = monitor.report()
    report = engine.started.capture_report
    return {
        "ready_s": ready, "stages": engine.started.seconds, "differing": differing, "paths": kinds,
        "compilations": jit.compilations, "loads": jit.loads,
        "jit_keys": {n: sorted(k)[:10] for n, k in jit.libraries.items()},
        "graphs": report.graphs if report else 0, "graph_mib": report.mib if report else 0.0,
        "capture_s": report.capture_seconds if report else 0.0,
        "problems": list(report.problems) if report else [],
        "pass": not differing and jit.compilations == 0 and jit.loads == 0,
    }  # fmt: skip


def check_generation(**more: Any) -> dict[str, Any]:
    """Greedy golden prompts: tokens per second, agreement with the fp32 goldens up to the first difference."""
    golden = json.loads((ROOT / "tests" / "golden" / "exact_greedy.json").read_text())
    engine = Engine.from_checkpoint(NANO, settings(**more), progress=False)
    first = time.perf_counter()
    engine.generate([golden[0]["prompt"]], SamplingParams(max_new_tokens=4))
    first = time.perf_counter() - first
    times = []
    for index in range(10):
        began = time.perf_counter()
        engine.generate([f"{index} {golden[0]['prompt']}"], SamplingParams(max_new_tokens=4))
        times.append(time.perf_counter() - began)
    done, stats = engine.generate_with_stats([g["prompt"] for g in golden], SamplingParams(max_new_tokens=48))
    agreed = [
        next((i for i, (a, b) in enumerate(zip(c.token_ids, g["continuation"])) if a != b), 48)
        for c, g in zip(done, golden, strict=True)
    ]
    return {
        "tokens_per_second": stats.tokens_per_second, "agreed_tokens": agreed, "errors": [c.error for c in done],
        "acceptance": stats.acceptance_rate, "first_request_s": first, "tenth_request_s": times[-1],
        "text": done[0].text, "stages": engine.started.seconds,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    assert ModelConfig.from_json(NANO)
    sections: dict[str, Callable[[], Any]] = {
        "prewarm_flash": check_prewarm,
        "eager": lambda: check_generation(),
        "full_exact": lambda: check_graphs("exact", graphs="full"),
        "full_official": lambda: check_graphs("official", graphs="full"),
        "full_generation": lambda: check_generation(graphs="full"),
        "full_drafting": lambda: check_generation(graphs="full", draft_tokens=1),
        "piecewise_official": lambda: check_graphs("official", compile="piecewise", graphs="piecewise"),
        "piecewise_generation": lambda: check_generation(compile="piecewise", graphs="piecewise"),
    }
    report: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name, section in sections.items():
        began = time.perf_counter()
        try:
            report[name] = section()
        except Exception as error:
            report[name] = {
                "error": f"{type(error).__name__}: {str(error)[:700]}",
                "trace": traceback.format_exc()[-2500:],
            }
        report[name]["section_s"] = round(time.perf_counter() - began, 1)
        arguments.out.write_text(json.dumps(report, indent=1, default=str))
        print(name, json.dumps(report[name], default=str)[:1400])


if __name__ == "__main__":
    main()
