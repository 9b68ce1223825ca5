"""Row-wise products whose result for one row can be made independent of the other rows."""

import torch


def product(x: torch.Tensor, weight: torch.Tensor, *, deterministic: bool) -> torch.Tensor:
    """``x @ weight.T`` in fp32.

    A blocked matrix product may sum a row in another order when the number of rows changes (edge tiles, another
    kernel for few rows). With ``deterministic`` every row is its own matrix-vector product of one fixed shape, so it
    cannot see its neighbours; nor can it see where it lies, by which MKL chooses how to sum on some processors: it is
    copied to where the allocator puts a whole tensor, and its results are copied from such a place.

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
    out = x.new_empty(x.shape[0], weight.shape[0])
    own_row, own_out = x.new_empty(x.shape[1]), x.new_empty(weight.shape[0])
    for row, target in zip(x, out):
        target.copy_(torch.mv(weight, own_row.copy_(row), out=own_out))
    return out


def rms_normalize(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension in fp32, returned in ``x.dtype``: ``x * rsqrt(mean(x^2) + eps) * weight``."""
    value = x.float()
    value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    return (value * weight.float()).to(x.dtype)
