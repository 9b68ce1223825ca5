"""One call of an op against its reference, as numbers: used by every section on ops."""

from typing import Any

import torch

from dsv4 import ops
from dsv4.ops import _runtime

FLOATS = (torch.float32, torch.bfloat16)


def to_device(tree: Any, device: torch.device) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), tree)


def outputs(spec: ops.OpSpec, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Returned tensors, then mutated arguments, of one call on clones of the mutated ones."""
    writes = [s.alias_info is not None and s.alias_info.is_write for s in spec.overload._schema.arguments]
    args = tuple(a.clone() if w else a for a, w in zip(args, writes, strict=False))
    out = spec.overload(*args, **kwargs)
    returned = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
    return returned + [a for a, w in zip(args, writes, strict=False) if w]


def errors_of(spec: ops.OpSpec, args: tuple, kwargs: dict) -> dict[str, float]:
    """``<output>.<kind>`` of one call: the kernel's distance from the reference on the same inputs."""
    got = outputs(spec, args, kwargs)
    with _runtime.use_references():
        want = outputs(spec, args, kwargs)
    found = {}
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        for kind, value in distance(a, b).items():
            found[f"{index}.{kind}"] = value
    return found


def distance(got: torch.Tensor, want: torch.Tensor) -> dict[str, float]:
    """Largest absolute difference and relative RMS of floats; share of differing bytes of anything else."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return {"mismatch": 1.0}
    if not got.numel():
        return {"rms": 0.0}
    if got.dtype not in FLOATS:
        a, b = got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)
        return {"bytes_differ": (a != b).float().mean().item()}
    square = reference_square = 0.0
    worst, count = 0.0, 0
    parts = (t.reshape(-1).split(1 << 27) for t in (got, want))  # doubles of 2^30 elements would not fit
    for a, b in zip(*parts, strict=True):
        special = ~b.isfinite()
        if not torch.equal(a[special].nan_to_num(7.0, 8.0, 9.0), b[special].nan_to_num(7.0, 8.0, 9.0)):
            return {"special_differ": 1.0}
        if not a[~special].isfinite().all():
            return {"not_finite": 1.0}
        error = torch.where(special, 0.0, a.double() - b.double())
        square += error.square().sum().item()
        reference_square += torch.where(special, 0.0, b.double()).square().sum().item()
        worst, count = max(worst, error.abs().max().item()), count + int((~special).sum())
    if not count:
        return {"rms": 0.0}
    return {"rms": (square / reference_square) ** 0.5 if reference_square else worst, "max": worst}


def merge_worst(into: dict[str, float], errors: dict[str, float]) -> None:
    for name, value in errors.items():
        into[name] = max(into.get(name, 0.0), value)


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with a stride of 2 in the last dimension, garbage between them."""
    wide = torch.empty(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype, device=tensor.device)
    wide.view(torch.uint8).fill_(0x7F)
    wide[..., ::2] = tensor
    return wide[..., ::2]
