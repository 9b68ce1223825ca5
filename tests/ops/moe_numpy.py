"""An independent numpy MoE (per-token loops, its own number formats) and random experts of every weight format."""

from dataclasses import dataclass

import numpy as np
import torch

FORMATS = ("fp32", "bf16_weights", "bf16", "fp8", "fp4")
FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def bf16(x: np.ndarray) -> np.ndarray:
    """Round to bf16, ties to even; fp64 in, fp64 out (through fp32, like the products of the op)."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def e4m3_values() -> np.ndarray:
    """Value of every e4m3 byte."""
    byte = np.arange(256)
    sign, exponent, mantissa = np.where(byte & 128, -1.0, 1.0), (byte >> 3) & 15, byte & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    value[(byte & 127) == 127] = np.nan
    return sign * value


def round_e4m3(x: np.ndarray) -> np.ndarray:
    """Nearest e4m3 value of ``|x| <= 448``, ties to the even code."""
    grid = e4m3_values()[:127]
    size = np.abs(x)
    upper = np.clip(np.searchsorted(grid, size), 1, 126)
    low, high = size - grid[upper - 1], grid[upper] - size
    take_low = (low < high) | ((low == high) & (upper % 2 == 1))
    return np.sign(x) * np.where(take_low, grid[upper - 1], grid[upper])


def simulate_fp8(x: np.ndarray) -> np.ndarray:
    """One row through the 1 x 128 quantiser."""
    out = np.empty_like(x)
    for start in range(0, len(x), 128):
        block = x[start : start + 128]
        mantissa, exponent = np.frexp(max(np.abs(block).max(), 1e-4) / 448)
        scale = 2.0 ** (exponent - (mantissa == 0.5))
        out[start : start + 128] = round_e4m3(np.clip(block / scale, -448, 448)) * scale
    return out


def expert(x, weight, w13, w2, *, limit: float, rounds: bool, quantize: bool, weight_after: bool = False):
    """One expert on one row in fp64; ``weight_after`` plants the wrong place of the routing weight."""
    cast = bf16 if rounds else (lambda v: v)
    inner = len(w13) // 2
    gate, up = cast(w13[:inner] @ x), cast(w13[inner:] @ x)
    gate = np.minimum(gate, limit)
    a = gate / (1 + np.exp(-gate)) * np.clip(up, -limit, limit)
    a = cast(a if weight_after else a * weight)
    if quantize:
        a = simulate_fp8(a)
    return cast(w2 @ a) * (weight if weight_after else 1.0)


@dataclass(frozen=True)
class Experts:
    """Op tensors of E experts, and their values in fp64 decoded without the library."""

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    w13_values: np.ndarray
    w2_values: np.ndarray

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.w13, self.w13_scale, self.w2, self.w2_scale

    @property
    def first(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Expert 0 without the expert dimension."""
        return tuple(t[0] if t.numel() else t for t in self.tensors)


def make_experts(rng, kind: str, num_experts: int, hidden: int, inner: int) -> Experts:
    """Random experts of one of :data:`FORMATS`."""
    if kind == "fp4":
        w13, w13_scale, v13 = _fp4(rng, num_experts, 2 * inner, hidden)
        w2, w2_scale, v2 = _fp4(rng, num_experts, hidden, inner)
    elif kind == "fp8":
        halves = [_fp8(rng, num_experts, inner, hidden) for _ in range(2)]
        w13, w13_scale, v13 = (np.concatenate([h[i] for h in halves], axis=1) for i in range(3))
        w2, w2_scale, v2 = _fp8(rng, num_experts, hidden, inner)
    else:
        dtype = torch.float32 if kind == "fp32" else torch.bfloat16
        dense = [
            torch.tensor(rng.normal(size=(num_experts, *size)) * size[1] ** -0.5).to(dtype)
            for size in ((2 * inner, hidden), (hidden, inner))
        ]
        return Experts(dense[0], torch.empty(0), dense[1], torch.empty(0), *(d.double().numpy() for d in dense))
    tensors = [torch.tensor(t) for t in (w13, w13_scale, w2, w2_scale)]
    if kind == "fp8":
        tensors[0], tensors[2] = (tensors[i].view(torch.float8_e4m3fn) for i in (0, 2))
    return Experts(*tensors, v13, v2)


def _fp4(rng, num_experts: int, rows: int, cols: int):
    packed = rng.integers(0, 256, size=(num_experts, rows, cols // 2), dtype=np.uint8)
    exponents = rng.integers(122, 126, size=(num_experts, rows, cols // 32), dtype=np.uint8)
    codes = np.empty((num_experts, rows, cols), np.uint8)
    codes[..., 0::2], codes[..., 1::2] = packed & 15, packed >> 4
    scale = np.repeat(2.0 ** (exponents.astype(float) - 127), 32, axis=-1)
    return packed, exponents, FP4_VALUES[codes] * scale


def _fp8(rng, num_experts: int, rows: int, cols: int):
    codes = rng.integers(0, 256, size=(num_experts, rows, cols), dtype=np.uint8)
    codes[(codes & 127) > 0x68] &= 0x87  # no NaN, and no outliers that would drown the other columns
    scale = rng.uniform(0.01, 0.05, size=(num_experts, -(-rows // 128), -(-cols // 128))).astype(np.float32)
    spread = np.repeat(np.repeat(scale.astype(float), 128, axis=1)[:, :rows], 128, axis=2)[..., :cols]
    return codes, scale, e4m3_values()[codes] * spread


def make_rows(rng, kind: str, num_tokens: int, hidden: int):
    """x and x_scale as the op takes them for weights of ``kind``, and the values in fp64."""
    x = torch.tensor(rng.normal(size=(num_tokens, hidden)), dtype=torch.float32)
    if kind in ("fp32", "bf16_weights"):
        return x, torch.empty(0), x.double().numpy()
    if kind == "bf16":
        x = x.bfloat16()
        return x, torch.empty(0), x.double().numpy()
    codes = rng.integers(0, 256, size=(num_tokens, hidden), dtype=np.uint8)
    codes[(codes & 127) > 0x58] &= 0xC7
    exponents = rng.integers(-3, 1, size=(num_tokens, -(-hidden // 128)))
    scale = (2.0**exponents).astype(np.float32)
    value = e4m3_values()[codes] * np.repeat(scale.astype(float), 128, axis=1)[:, :hidden]
    return torch.tensor(codes).view(torch.float8_e4m3fn), torch.tensor(scale), value


def make_routing(rng, num_tokens: int, topk: int, num_experts: int):
    """Distinct random experts, some of them −1, every fifth row without any; int32 ids and fp32 weights."""
    ids = rng.random((num_tokens, num_experts)).argsort(axis=1)[:, :topk]
    ids = np.where(rng.random(ids.shape) < 0.2, -1, ids).astype(np.int32)
    ids[4::5] = -1
    return torch.tensor(ids), torch.tensor(rng.uniform(0.05, 0.6, size=ids.shape).astype(np.float32))


def routed(x, ids, weights, experts: Experts, *, limit: float, kind: str, weight_after: bool = False) -> np.ndarray:
    """The routed experts of every row, one token and one expert at a time, in fp64."""
    rounds, quantize = kind in ("bf16", "fp8", "fp4"), kind in ("fp8", "fp4")
    out = np.zeros(x.shape)
    for t in range(len(x)):
        for e, weight in zip(ids[t].tolist(), weights[t].double().tolist(), strict=True):
            if 0 <= e < len(experts.w13_values):
                w13, w2 = experts.w13_values[e], experts.w2_values[e]
                out[t] += expert(
                    x[t], weight, w13, w2, limit=limit, rounds=rounds, quantize=quantize, weight_after=weight_after
                )
    return out


def relative_rms(got: torch.Tensor, want: np.ndarray | torch.Tensor) -> float:
    want = torch.as_tensor(want).double()
    return ((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt()).item()
