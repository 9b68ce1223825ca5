"""Interleaved rotary embedding on the last dimensions of a vector (Su et al., 2021; pairs ``2i, 2i+1``)."""

import torch


def check(op: str, rope_table: torch.Tensor, dim: int) -> None:
    """Raise unless ``rope_table`` is fp32 ``[max_positions, rope_dim]`` with an even ``rope_dim`` up to ``dim``."""
    if rope_table.dim() != 2 or rope_table.dtype != torch.float32:
        raise ValueError(f"{op} rope_table must be 2-D float32, got {rope_table.dim()}-D {rope_table.dtype}")
    if rope_table.shape[1] % 2 or not 0 < rope_table.shape[1] <= dim:
        raise ValueError(f"{op} rope_dim must be even and in [2, {dim}], got {rope_table.shape[1]}")


def table_rows(rope_table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rows of ``rope_table [max_positions, rope_dim]`` at ``positions``; a pad position (negative) reads row 0."""
    return rope_table[positions.clamp(0, rope_table.shape[0] - 1)]


def rotate(x: torch.Tensor, rows: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
    """Rotate the last ``rope_dim`` dimensions of ``x``; the others are copied.

    Args:
        x: ``[T, ..., dim]``.
        rows: ``[T, rope_dim]`` fp32, cosines then sines of the ``rope_dim / 2`` angles.
        inverse: rotate by the negative angle.

    Returns:
        A new tensor of ``x``'s shape and dtype; the rotation is fp32 and rounds once.
    """
    rope_dim = rows.shape[-1]
    rows = rows.view(rows.shape[0], *([1] * (x.dim() - 2)), rope_dim)
    cos, sin = rows[..., : rope_dim // 2], rows[..., rope_dim // 2 :]
    if inverse:
        sin = -sin
    tail = x[..., -rope_dim:].float()
    even, odd = tail[..., 0::2], tail[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((x[..., :-rope_dim], turned.to(x.dtype)), dim=-1)
