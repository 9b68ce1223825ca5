"""Rows: whether arguments have the same number of them, and products that keep them independent of each other."""

import torch

INDEX_DTYPES = (torch.int32, torch.int64)


def check_rows(op: str, like: str, rows: int, *, dim: int = 0, **tensors: torch.Tensor) -> None:
    """Raise ``ValueError`` unless every tensor has ``rows`` rows, in dimension ``dim``; ``like`` says whose they are.

    For references, fakes and kernels alike. A traced fake sees sizes that are not numbers yet: they pass, and leave
    no guard, since what a call passes is compared when it runs.
    """
    for name, tensor in tensors.items():
        if tensor.dim() <= dim:
            raise ValueError(f"{op} {name} must have the {rows} rows of {like}, got {tensor.dim()} dimensions")
        got = tensor.shape[dim]
        if isinstance(got, int) and isinstance(rows, int) and got != rows:
            raise ValueError(f"{op} {name} must have the {rows} rows of {like}, got {got}")


def check_indices(op: str, num_dims: int, **tensors: torch.Tensor) -> None:
    """Raise ``ValueError`` unless every tensor has ``num_dims`` dimensions and holds int32 or int64."""
    for name, tensor in tensors.items():
        if tensor.dim() != num_dims or tensor.dtype not in INDEX_DTYPES:
            raise ValueError(f"{op} {name} must be {num_dims}-D int32 or int64, got {tensor.dim()}-D {tensor.dtype}")


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
