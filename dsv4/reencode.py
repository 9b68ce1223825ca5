"""FP4 matrices as FP8 ones of the same values, checked while loading.

An FP4 value is ``c * 2^g`` with ``c`` in 0, 0.5, 1, 1.5, 2, 3, 4, 6 and one ``g`` per row and 32 columns; an FP8 value
is an e4m3 number times one power of two per 128 x 128 block. One scale for what had 512 is exact only where the values
of a block are close enough: the largest goes to the top binade of e4m3 (256 or 384), and every other one must be a
multiple of 2^-9 there. Groups whose codes reach from 0.5 to 6 may therefore differ by 2^14 within a block, and further
where the smallest or the largest codes do not occur.

The matrix is decoded again and compared bit by bit, signs of zeros included. One that lost anything is refused; it is
never rounded.
"""

import torch

from .checkpoint import CheckpointError
from .ops._formats import (
    FP4_BLOCK,
    FP8_MAX,
    WEIGHT_BLOCK,
    dequantize_fp4,
    dequantize_fp8_weight,
    power_of_two_at_least,
)

SMALLEST_SCALE = 2.0**-126  # block scales are normal fp32 numbers: kernels may flush others


def fp4_to_fp8(name: str, packed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Re-encode one FP4 matrix without loss.

    Args:
        name: of the tensor, for errors.
        packed: ``[N, K/2]`` uint8, the low nibble first.
        scale: ``[N, K/32]`` E8M0 bytes without NaN.

    Returns:
        e4m3 codes ``[N, K]`` and fp32 powers of two ``[ceil(N/128), ceil(K/128)]`` with the same values, bitwise.

    Raises:
        CheckpointError: a block that e4m3 cannot hold with one scale.
    """
    values = dequantize_fp4(packed, scale)
    codes, block_scale = _quantize(values)
    decoded = dequantize_fp8_weight(codes, block_scale)
    lost = decoded.view(torch.int32) != values.view(torch.int32)
    if bool(lost.any()):
        raise CheckpointError(_refusal(name, values, scale, lost))
    return codes, block_scale


def _tiles(values: torch.Tensor) -> torch.Tensor:
    """``[N, K]`` as zero-padded ``[N/128, 128, K/128, 128]``."""
    rows, cols = values.shape
    padded = torch.nn.functional.pad(values, (0, -cols % WEIGHT_BLOCK, 0, -rows % WEIGHT_BLOCK))
    return padded.unflatten(1, (-1, WEIGHT_BLOCK)).unflatten(0, (-1, WEIGHT_BLOCK))


def _quantize(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Nearest e4m3 codes with the smallest scale that lets the largest value of a block fit."""
    rows, cols = values.shape
    tiles = _tiles(values)
    amax = tiles.abs().amax((1, 3)).clamp_min(FP8_MAX * SMALLEST_SCALE)
    scale = power_of_two_at_least(amax / FP8_MAX)
    codes = (tiles / scale[:, None, :, None]).flatten(2, 3).flatten(0, 1)[:rows, :cols]
    return codes.to(torch.float8_e4m3fn), scale


def _refusal(name: str, values: torch.Tensor, scale: torch.Tensor, lost: torch.Tensor) -> str:
    """Error text: the first block that is lost, and the scales of its largest value and of its first lost one."""
    row, col = (int(i) for i in lost.nonzero()[0])
    top, left = row // WEIGHT_BLOCK * WEIGHT_BLOCK, col // WEIGHT_BLOCK * WEIGHT_BLOCK
    block = values[top : top + WEIGHT_BLOCK, left : left + WEIGHT_BLOCK].abs()
    largest = divmod(int(block.argmax()), block.shape[1])
    places = ((top + largest[0], left + largest[1]), (row, col))
    high, low = (int(scale[r, c // FP4_BLOCK]) for r, c in places)
    return (
        f"tensor {name} must fit e4m3 with one scale per 128 x 128 block to be kept as FP8, got in "
        f"block [{top // WEIGHT_BLOCK}, {left // WEIGHT_BLOCK}] the values {_shown(values, places[0])} "
        f"(scale byte {high}) and {_shown(values, places[1])} (scale byte {low}); "
        "expert_weights 'fp4' keeps it as it is"
    )


def _shown(values: torch.Tensor, place: tuple[int, int]) -> str:
    return f"{float(values[place]):g} at [{place[0]}, {place[1]}]"
