"""Independent numpy codecs of the number formats, written from their definitions; they share no code with ``dsv4``."""

from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
NANO = ROOT / "assets" / "nano"
GOLDEN = ROOT / "tests" / "golden"


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """uint16 bits of finite fp32 values rounded to bf16, ties to even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def bf16_values(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def e4m3_table() -> np.ndarray:
    """float64 values of the 256 codes: sign, 4 exponent bits (bias 7), 3 mantissa bits; S.1111.111 is NaN."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    size = np.where((codes & 127) == 127, np.nan, size)
    return np.where(codes >= 128, -size, size)


def e2m1_table() -> np.ndarray:
    """float64 values of the 16 codes: sign, 2 exponent bits (bias 1), 1 mantissa bit."""
    codes = np.arange(16)
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    size = np.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1.0))
    return np.where(codes >= 8, -size, size)


def nearest_code(x: np.ndarray, positive: np.ndarray, sign_bit: int) -> np.ndarray:
    """Code of the nearest of the ascending ``positive`` values, saturating; a tie takes the even code."""
    size = np.minimum(np.abs(x.astype(np.float64)), positive[-1])
    upper = np.searchsorted(positive, size).clip(1, len(positive) - 1)
    lower = upper - 1
    below, above = size - positive[lower], positive[upper] - size
    code = np.where((below < above) | ((below == above) & (lower % 2 == 0)), lower, upper)
    return (code + sign_bit * np.signbit(x)).astype(np.uint8)


def e4m3_encode(x: np.ndarray) -> np.ndarray:
    return nearest_code(x, e4m3_table()[:127], 128)


def e2m1_encode(x: np.ndarray) -> np.ndarray:
    return nearest_code(x, e2m1_table()[:8], 8)


def block_scale(amax: np.ndarray, limit: float) -> np.ndarray:
    """Smallest power of two s with ``amax <= limit * s``, exact in float64."""
    amax = amax.astype(np.float64)
    scale = 2.0 ** (np.frexp(amax / limit)[1] - 1.0)
    return np.where(amax <= limit * scale, scale, 2 * scale)


def quantize(x: np.ndarray, block: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes and float64 scales of blocks of ``block`` along the last axis; ``kind`` is "fp8" or "fp4"."""
    limit, floor, encode = {
        "fp8": (448.0, np.float32(1e-4), e4m3_encode),
        "fp4": (6.0, np.float32(6 * 2.0**-126), e2m1_encode),
    }[kind]
    codes = np.empty(x.shape, np.uint8)
    scales = np.empty((*x.shape[:-1], -(-x.shape[-1] // block)))
    for b in range(scales.shape[-1]):
        part = x[..., b * block : (b + 1) * block]
        scales[..., b] = block_scale(np.maximum(np.abs(part).max(-1), floor), limit)
        codes[..., b * block : (b + 1) * block] = encode(part.astype(np.float64) / scales[..., b, None])
    return codes, scales


def wide(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """fp32 normals whose rows differ in magnitude by up to 2^40."""
    return (rng.normal(size=shape) * 2.0 ** rng.integers(-20, 21, size=(*shape[:-1], 1))).astype(np.float32)


def as_numpy(x: torch.Tensor) -> np.ndarray:
    """float8 as code bytes, uint8 codes as they are, other floats as fp32."""
    if x.dtype in (torch.float8_e4m3fn, torch.uint8):
        return x.view(torch.uint8).numpy()
    return x.float().numpy()


def accumulation_bound(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Worst rounding error of an fp32 dot product in any order: ``K * 2^-24 * sum |x w|`` (Higham, 2002, eq. 3.5)."""
    return 1.01 * x.shape[-1] * 2.0**-24 * (np.abs(x).astype(np.float64) @ np.abs(weight).astype(np.float64).T)
