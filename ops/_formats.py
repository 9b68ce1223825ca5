"""Number formats of DeepSeek-V4: FP8 e4m3 and FP4 e2m1 with power-of-two (E8M0) scales, and the Hadamard rotation.

Rules (official inference code, current revision): an FP8 block of ``amax = max(|x|, 1e-4)`` has scale
``2^ceil(log2(amax / 448))`` and codes ``e4m3(clamp(x / scale, ±448))``; an FP4 block of ``amax = max(|x|, 6 * 2^-126)``
has scale ``2^ceil(log2(amax / 6))`` and codes ``e2m1(clamp(x / scale, ±6))``. Both round to nearest, ties to even.
"""

from functools import lru_cache

import torch

FP8_MAX = 448.0
FP8_AMAX_FLOOR = 1e-4
FP4_MAX = 6.0
FP4_AMAX_FLOOR = 6.0 * 2.0**-126
WEIGHT_BLOCK = 128
ACTIVATION_BLOCK = 128
KV_BLOCK = 64
FP4_BLOCK = 32
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def power_of_two_at_least(x: torch.Tensor) -> torch.Tensor:
    """Smallest power of two that is ``>= x``, elementwise and exact, for positive normal fp32 ``x``."""
    bits = x.float().contiguous().view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return (exponent << 23).view(torch.float32)


def decode_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """fp32 value ``2^(byte - 127)`` of E8M0 bytes (uint8, or float8_e8m0fnu viewed as bytes); 255 gives NaN."""
    codes = codes.view(torch.uint8).to(torch.int32)
    bits = torch.where(codes == 0, torch.full_like(codes, 1 << 22), codes << 23)  # 2^-127 is subnormal in fp32
    bits = torch.where(codes == 255, torch.full_like(codes, 0x7FC00000), bits)
    return bits.view(torch.float32)


def encode_e8m0(scale: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes (uint8) of fp32 scales that are powers of two ``>= 2^-126``."""
    return ((scale.float().contiguous().view(torch.int32) >> 23) & 0xFF).to(torch.uint8)


def _blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """``x`` as fp32 ``[..., ceil(last / block), block]``, zero-padded."""
    pad = -x.shape[-1] % block
    value = torch.nn.functional.pad(x.float(), (0, pad))
    return value.unflatten(-1, (value.shape[-1] // block, block))


def quantize_fp8(x: torch.Tensor, block: int = ACTIVATION_BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes ``x.shape`` and fp32 scales ``[..., ceil(last / block)]`` of blocks along the last dimension."""
    value = _blocks(x, block)
    amax = value.abs().amax(-1).clamp_min(FP8_AMAX_FLOOR)
    scale = power_of_two_at_least(amax / FP8_MAX)
    codes = (value / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(-2)[..., : x.shape[-1]].contiguous(), scale


def dequantize_fp8(codes: torch.Tensor, scale: torch.Tensor, block: int = ACTIVATION_BLOCK) -> torch.Tensor:
    """fp32 values of e4m3 codes ``[..., n]`` with scales ``[..., ceil(n / block)]``."""
    spread = scale.float().repeat_interleave(block, dim=-1)[..., : codes.shape[-1]]
    return codes.float() * spread


def dequantize_fp8_weight(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """fp32 values of an e4m3 weight ``[..., N, K]`` with fp32 scales ``[..., ceil(N/128), ceil(K/128)]``."""
    rows, cols = weight.shape[-2:]
    spread = scale.float().repeat_interleave(WEIGHT_BLOCK, dim=-2)[..., :rows, :]
    return weight.float() * spread.repeat_interleave(WEIGHT_BLOCK, dim=-1)[..., :cols]


@lru_cache(maxsize=8)
def _fp4_table(device: torch.device) -> torch.Tensor:
    return torch.tensor(_FP4_VALUES + tuple(-v for v in _FP4_VALUES), dtype=torch.float32, device=device)


def quantize_fp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e2m1 codes 0…15 (uint8, ``x.shape``) and fp32 scales ``[..., last / 32]`` of blocks of 32."""
    value = _blocks(x, FP4_BLOCK)
    amax = value.abs().amax(-1).clamp_min(FP4_AMAX_FLOOR)
    scale = power_of_two_at_least(amax / FP4_MAX)
    scaled = (value / scale.unsqueeze(-1)).clamp(-FP4_MAX, FP4_MAX)
    size = scaled.abs()
    code = torch.zeros(size.shape, dtype=torch.uint8, device=x.device)
    for tie, upwards in (
        (0.25, False),
        (0.75, True),
        (1.25, False),
        (1.75, True),
        (2.5, False),
        (3.5, True),
        (5.0, False),
    ):
        code += (size >= tie) if upwards else (size > tie)
    code += torch.signbit(scaled).to(torch.uint8) * 8
    return code.flatten(-2)[..., : x.shape[-1]].contiguous(), scale


def pack_fp4(codes: torch.Tensor) -> torch.Tensor:
    """Two 4-bit codes per byte along the last dimension; the even element is the low nibble."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).contiguous()


def unpack_fp4(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`pack_fp4`: codes 0…15 (uint8)."""
    packed = packed.view(torch.uint8)
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def dequantize_fp4(packed: torch.Tensor, scale_bytes: torch.Tensor) -> torch.Tensor:
    """fp32 values of packed FP4 ``[..., N, K/2]`` with E8M0 bytes ``[..., N, K/32]``."""
    values = _fp4_table(packed.device)[unpack_fp4(packed).int()]
    return values * decode_e8m0(scale_bytes).repeat_interleave(FP4_BLOCK, dim=-1)


def simulate_fp8(x: torch.Tensor, block: int) -> torch.Tensor:
    """``x`` rounded to FP8 blocks and back, in ``x.dtype``."""
    return dequantize_fp8(*quantize_fp8(x, block), block).to(x.dtype)


def simulate_kv(x: torch.Tensor, rope_dim: int) -> torch.Tensor:
    """``x`` with all but its last ``rope_dim`` dimensions rounded to FP8 blocks of 64 and back, in ``x.dtype``."""
    split = x.shape[-1] - rope_dim
    return torch.cat((simulate_fp8(x[..., :split], KV_BLOCK), x[..., split:]), dim=-1)


def simulate_fp4(x: torch.Tensor) -> torch.Tensor:
    """``x`` rounded to FP4 blocks of 32 and back, in ``x.dtype``."""
    codes, scale = quantize_fp4(x)
    values = _fp4_table(x.device)[codes.int()]
    return (values * scale.repeat_interleave(FP4_BLOCK, dim=-1)[..., : x.shape[-1]]).to(x.dtype)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Hadamard transform of the last dimension (Sylvester order) times ``n^-0.5``; fp32 sums, result in ``x.dtype``."""
    size = x.shape[-1]
    if size & (size - 1):
        raise ValueError(f"Hadamard size must be a power of two, got {size}")
    value = x.float().reshape(-1, size)
    half = 1
    while half < size:  # butterflies: the sum of one row never depends on the number of rows
        pair = value.view(-1, size // (2 * half), 2, half)
        value = torch.stack((pair[:, :, 0] + pair[:, :, 1], pair[:, :, 0] - pair[:, :, 1]), dim=2).view(-1, size)
        half *= 2
    return (value * size**-0.5).view(x.shape).to(x.dtype)
