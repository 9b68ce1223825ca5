"""mHC in plain Python loops and float64, written from the formulas; the nano checkpoint and its recorded values."""

import json
import math
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
NANO = ROOT / "assets" / "nano"
KEYWORDS = {"eps": 1e-6, "hc_eps": 1e-6, "sinkhorn_iters": 20, "deterministic": True}


def golden(name: str) -> dict[str, torch.Tensor]:
    return load_file(ROOT / "tests" / "golden" / f"{name}.safetensors")


def nano(name: str) -> torch.Tensor:
    shard = json.loads((NANO / "model.safetensors.index.json").read_text())["weight_map"][name]
    with safe_open(NANO / shard, "pt") as tensors:
        return tensors.get_tensor(name)


def nano_site(block: str, sublayer: str) -> list[torch.Tensor]:
    """fn, scale, base and norm weight of ``attn`` or ``ffn`` of a block such as ``layers.3``."""
    names = [f"hc_{sublayer}_{part}" for part in ("fn", "scale", "base")]
    return [nano(f"{block}.{name}") for name in (*names, f"{sublayer}_norm.weight")]


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def mixes(streams, fn, eps: float) -> list[float]:
    """Row results of fn on the flattened streams divided by their root mean square."""
    flat = [value for stream in streams for value in stream]
    rms = math.sqrt(math.fsum(v * v for v in flat) / len(flat) + eps)
    return [math.fsum(w * v for w, v in zip(row, flat, strict=True)) / rms for row in fn]


def normalise_rows(c, eps: float):
    return [[v / (math.fsum(row) + eps) for v in row] for row in c]


def normalise_columns(c, eps: float):
    sums = [math.fsum(row[k] for row in c) for k in range(len(c))]
    return [[row[k] / (sums[k] + eps) for k in range(len(c))] for row in c]


def sinkhorn(logits, iters: int, eps: float):
    c = [[math.exp(v - max(row)) for v in row] for row in logits]
    c = [[v + eps for v in row] for row in normalise_rows(c, 0.0)]
    for i in range(iters):
        c = normalise_columns(normalise_rows(c, eps) if i else c, eps)
    return c


def collapse(streams, weights) -> list[float]:
    return [math.fsum(w * v for w, v in zip(weights, column, strict=True)) for column in zip(*streams, strict=True)]


def rms_norm(x, weight, eps: float) -> list[float]:
    rms = math.sqrt(math.fsum(v * v for v in x) / len(x) + eps)
    return [v / rms * w for v, w in zip(x, weight, strict=True)]


def round_bf16(values) -> list[float]:
    return torch.tensor(values, dtype=torch.float64).bfloat16().tolist()


def pre_row(streams, fn, scale, base, norm_weight, *, eps, hc_eps, sinkhorn_iters, round_x=list, **_):
    """``(x, post, comb)`` of one row of streams ``[M][D]``; ``round_x`` acts on the collapsed x before the norm."""
    n = len(streams)
    m = mixes(streams, fn, eps)
    weights = [logistic(m[j] * scale[0] + base[j]) + hc_eps for j in range(n)]
    post = [2 * logistic(m[n + j] * scale[1] + base[n + j]) for j in range(n)]
    at = [[2 * n + n * j + k for k in range(n)] for j in range(n)]
    comb = sinkhorn([[m[i] * scale[2] + base[i] for i in row] for row in at], sinkhorn_iters, hc_eps)
    return rms_norm(round_x(collapse(streams, weights)), norm_weight, eps), post, comb


def pre(streams, *parameters, **keywords) -> tuple[torch.Tensor, ...]:
    """``pre_row`` over all rows of tensors, as float64 tensors."""
    lists = [p.tolist() for p in parameters]
    rows = [pre_row(row, *lists, **keywords) for row in streams.tolist()]
    return tuple(torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))


def post(y, streams, post_weights, comb) -> torch.Tensor:
    """New streams; the FIRST index of comb is the stream that is read."""
    out = torch.zeros(streams.shape, dtype=torch.float64)
    for t in range(streams.shape[0]):
        for k in range(streams.shape[1]):
            out[t, k] = post_weights[t, k].double() * y[t].double()
            for j in range(streams.shape[1]):
                out[t, k] += comb[t, j, k].double() * streams[t, j].double()
    return out


def assert_rows_independent(call, num_tokens: int = 4225) -> None:
    """``call(rows)`` on slices equals the slice of ``call`` on all rows, bit for bit."""
    full = call(slice(0, num_tokens))
    assert all(part.isfinite().all() for part in full)
    for length in (1, 65, 129):
        for start in (0, 1, 67, num_tokens - length):
            rows = slice(start, start + length)
            for part, whole in zip(call(rows), full, strict=True):
                assert torch.equal(part, whole[rows]), f"{length} rows from {start} differ from the same rows of all"
