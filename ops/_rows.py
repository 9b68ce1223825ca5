"""Row-wise products whose result for one row can be made independent of the other rows."""

import torch


def product(x: torch.Tensor, weight: torch.Tensor, *, deterministic: bool) -> torch.Tensor:
    """``x @ weight.T`` in fp32.

    A blocked matrix product may sum a row in another order when the number of rows changes (edge tiles, another
    kernel for few rows). With ``deterministic`` every row is its own matrix-vector product of one fixed shape, so it
    cannot see its neighbours.

    Args:
        x: ``[rows, in]``, any float dtype.
        weight: ``[out, in]``, any float dtype.
        deterministic: one matrix-vector product per row.

    Returns:
        ``[rows, out]`` fp32.
    """
    x, weight = x.float(), weight.float()
    if not deterministic:
        return x @ weight.t()
    x = x.contiguous()
    out = x.new_empty(x.shape[0], weight.shape[0])
    for row, target in zip(x, out):
        torch.mv(weight, row, out=target)
    return out


def rms_normalize(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension in fp32, returned in ``x.dtype``: ``x * rsqrt(mean(x^2) + eps) * weight``."""
    value = x.float()
    value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    return (value * weight.float()).to(x.dtype)
