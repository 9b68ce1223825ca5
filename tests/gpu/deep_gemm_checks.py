"""What only a GPU can show of DeepGEMM: its kernels are the ones that the keys name, and its results are ours."""

import json
from pathlib import Path

import torch

from dsv4 import ops
from dsv4.graphs import deep_gemm_cache
from dsv4.ops import _backends, _deep_gemm, _runtime
from dsv4.ops._indexer_deep_gemm import ROWS_PER_REQUEST
from dsv4.ops.shapes import flash

ROOT = Path(__file__).resolve().parents[2]
CUDA = torch.device("cuda")
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
CALLS = [
    ["gemm", 1, 1024, 4096], ["gemm", 16, 512, 2048], ["gemm", 17, 1024, 4096], ["grouped_gemm", 256, 512, 256, 4],
    ["mqa_logits", 5, 64, 128], ["hc_prenorm_gemm", 70, 24, 16384, 4], ["gemm", 40, 512, 4096], ["gemm", 64, 512, 1024],
]  # fmt: skip
"""Six kernels: the second and the last call share one with an earlier call."""


def observe(cache_dir: Path, calls: list[list] = CALLS, *, wrong: bool = False) -> deep_gemm_cache.Observation:
    """What a child that makes ``calls`` compiled and loaded; ``wrong`` makes it announce a key without the tile."""
    program = ["-m", "tests.graphs.deep_gemm_calls", json.dumps(calls), *(["wrong"] if wrong else [])]
    return deep_gemm_cache.observe(program, cache_dir, timeout=120, cwd=ROOT)


def linear_operands(rows: int, outs: int, width: int) -> tuple[torch.Tensor, ...]:
    g = torch.Generator(device=CUDA).manual_seed(rows + outs)
    x, x_scale = ops.quant_fp8(torch.randn(rows, width, device=CUDA, generator=g).bfloat16())
    weight = torch.randn(outs, width, device=CUDA, generator=g).to(FP8)
    return x, x_scale, weight, torch.exp2(torch.randint(-8, -3, (-(-outs // 128), width // 128), device=CUDA).float())


def linear_errors(sizes: list[tuple[int, int]], counts: list[int]) -> dict[str, float]:
    """Relative RMS distance to the reference, worst over ``counts``; NaN if an output element was not written."""
    worst = {}
    for outs, width in sizes:
        for rows in counts:
            args = linear_operands(rows, outs, width)
            with _backends.using("gemm", "deep_gemm"), _runtime.in_prewarm():
                torch.full((rows, outs), float("nan"), dtype=BF16, device=CUDA)  # what the allocator hands out next
                got = ops.fp8_linear(*args, dtype=BF16, deterministic=False)
            with _runtime.use_references():
                want = ops.fp8_linear(*args, dtype=torch.float32, deterministic=False)
            error = (got.float() - want).square().mean().sqrt() / want.square().mean().sqrt()
            worst[f"{outs}x{width}"] = max(worst.get(f"{outs}x{width}", 0.0), error.item())
    return worst


def dependent_rows(outs: int, width: int, counts: list[int]) -> list[int]:
    """Row counts at which a row's result differs from its result in a batch of the largest count."""
    x, x_scale, weight, weight_scale = linear_operands(max(counts), outs, width)

    def run(rows: slice) -> torch.Tensor:
        with _backends.using("gemm", "deep_gemm"), _runtime.in_prewarm():
            return ops.fp8_linear(x[rows], x_scale[rows], weight, weight_scale, dtype=BF16, deterministic=True)

    full = run(slice(None))
    return [
        n for n in counts
        if not (torch.equal(run(slice(n)), full[:n]) and torch.equal(run(slice(-n, None)), full[-n:]))
    ]  # fmt: skip


def replay_equals_eager(rows: int, outs: int, width: int) -> bool:
    """A captured call, replayed on other inputs, against an eager call."""
    x, x_scale, weight, weight_scale = linear_operands(rows, outs, width)
    others = ops.quant_fp8(torch.randn(rows, width, device=CUDA).bfloat16())

    def call() -> torch.Tensor:
        return ops.fp8_linear(x, x_scale, weight, weight_scale, dtype=BF16, deterministic=False)

    with _backends.using("gemm", "deep_gemm"), _runtime.in_prewarm():
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call()
        x.copy_(others[0]), x_scale.copy_(others[1])
        graph.replay()
        return torch.equal(captured, call())


def cold_call_during_capture(rows: int, outs: int, width: int) -> str:
    """The error of a call under a cold key inside a capture."""
    args = linear_operands(rows, outs, width)
    key = _deep_gemm.keys.gemm(rows, outs, width, _deep_gemm.num_sms())
    assert not _runtime.is_warm(key), key
    side = torch.cuda.Stream()
    with _backends.using("gemm", "deep_gemm"), torch.cuda.stream(side):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        try:
            ops.fp8_linear(*args, dtype=BF16, deterministic=False)
        except _runtime.ColdKernelError as error:
            return str(error)
        finally:
            graph.capture_end()
    return "no error"


def index_operands(rows: int, tokens: int, num_requests: int) -> tuple[torch.Tensor, ...]:
    """Rows of several requests whose caches hold ``tokens``, with pads, absent and shuffled pages, lengths from 0."""
    g = torch.Generator(device=CUDA).manual_seed(rows)
    pages = -(-tokens // 4 // 64)
    total = pages * num_requests
    codes = torch.randn(total, 64 * 128, device=CUDA, generator=g).to(FP8).view(torch.uint8)
    scales = torch.exp2(torch.randint(-3, 3, (total, 64), device=CUDA, generator=g).float()).view(torch.uint8)
    cache = torch.cat([codes, scales], 1)
    tables = torch.randperm(total, device=CUDA, generator=g).view(num_requests, pages).int()
    tables[0, pages // 2] = -1
    positions = torch.randint(0, tokens, (rows,), device=CUDA, generator=g)
    positions[:2] = 0  # nothing is visible
    requests = torch.sort(torch.randint(0, num_requests, (rows,), device=CUDA, generator=g)).values.int()
    pad = slice(rows // 2, rows // 2 + 3)
    positions[pad], requests[pad] = -1, -1
    q = torch.randn(rows, flash.index_heads, 128, device=CUDA, generator=g).to(FP8)
    return q, torch.rand(rows, flash.index_heads, device=CUDA, generator=g), cache, positions, requests, tables


def index_scores(args: tuple[torch.Tensor, ...], backend: str) -> torch.Tensor:
    options = {"ratio": 4, "dtype": torch.float32, "deterministic": False}
    with _backends.using("gemm", backend), _runtime.in_prewarm():
        return ops.indexer_logits(*args, **options)


def index_distance(rows: int, tokens: int, num_requests: int) -> tuple[float, bool, bool]:
    """Largest error in standard deviations, whether the same entries are visible, whether rows are independent."""
    args = index_operands(rows, tokens, num_requests)
    got, want = index_scores(args, "deep_gemm"), index_scores(args, "triton")
    seen = want.isfinite()
    error = (got - want)[seen].abs().max() / want[seen].std()
    q, weights, cache, positions, requests, tables = args
    fewest = ROWS_PER_REQUEST * num_requests  # fewer rows are not DeepGEMM's
    parts = (slice(0, fewest), slice(rows - fewest - 3, rows - 3))
    alone = [index_scores((q[i], weights[i], cache, positions[i], requests[i], tables), "deep_gemm") for i in parts]
    same_rows = all(torch.equal(a, got[i]) for a, i in zip(alone, parts, strict=True))
    return error.item(), torch.equal(got.isfinite(), seen), same_rows
