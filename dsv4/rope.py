"""Rotary tables: plain RoPE for window-only layers, YaRN for layers with compressed entries.

A table is ``[max_positions, rope_dim]`` fp32: cosines of the ``rope_dim / 2`` angles, then sines. The angle is the fp32
product of position and frequency, as in the official complex table; amplitude is 1 (no YaRN magnitude factor).
Source: official inference code; YaRN is Peng et al., 2023.
"""

import math

import torch

from .config import RATIOS, ModelConfig


def yarn_range(config: ModelConfig) -> tuple[int, int]:
    """Frequency indices between which YaRN blends from kept (below) to divided by ``factor`` (above)."""
    dim, scaling = config.qk_rope_head_dim, config.rope_scaling

    def index(rotations: float) -> float:
        original = scaling.original_max_position_embeddings
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(config.compress_rope_theta))

    return max(math.floor(index(scaling.beta_fast)), 0), min(math.ceil(index(scaling.beta_slow)), dim - 1)


def frequencies(config: ModelConfig, ratio: int) -> torch.Tensor:
    """``[rope_dim / 2]`` fp32 angles per position of a layer with compression ``ratio``."""
    if ratio not in RATIOS:
        raise ValueError(f"ratio must be one of {list(RATIOS)}, got {ratio!r}")
    dim = config.qk_rope_head_dim
    theta = config.compress_rope_theta if ratio else config.rope_theta
    plain = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if not ratio:
        return plain
    low, high = yarn_range(config)
    width = max(high - low, 0.001)  # bounds that meet make a step
    divided = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    kept = 1 - divided
    return plain / config.rope_scaling.factor * (1 - kept) + plain * kept


def rope_table(config: ModelConfig, ratio: int, max_positions: int) -> torch.Tensor:
    """``[max_positions, rope_dim]`` fp32, cosines then sines, of a layer with compression ``ratio``.

    Raises:
        ValueError: ``ratio`` or ``max_positions`` outside the model's.
    """
    if not 1 <= max_positions <= config.max_position_embeddings:
        raise ValueError(f"max_positions must be in 1...{config.max_position_embeddings}, got {max_positions}")
    freqs = frequencies(config, ratio)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), freqs)
    table = torch.empty(max_positions, 2 * freqs.numel())
    torch.cos(angles, out=table[:, : freqs.numel()])
    torch.sin(angles, out=table[:, freqs.numel() :])
    return table
