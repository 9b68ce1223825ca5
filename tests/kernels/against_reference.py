"""Compare an op's CUDA dispatch with its reference on the same fresh random inputs."""

import torch

from dsv4.ops import OpSpec

from ..ops import contract


def outputs(spec: OpSpec, function, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Returned tensors, then mutated arguments, of ``function`` on clones of ``args``."""
    writes = [s.alias_info is not None and s.alias_info.is_write for s in spec.overload._schema.arguments]
    args = tuple(a.clone() if w else a for a, w in zip(args, writes, strict=False))
    out = function(*args, **kwargs)
    return contract.tensors(out) + [a for a, w in zip(args, writes, strict=False) if w]


def compare(spec: OpSpec, args: tuple, kwargs: dict, *, rtol: float, atol: float) -> None:
    """Integers, codes and copied bytes must be equal; floats within the tolerance, NaN where the reference has NaN."""
    want = outputs(spec, spec.reference, args, kwargs)
    got = outputs(spec, spec.cuda, args, kwargs)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        if a.dtype in (torch.float32, torch.bfloat16):
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)
        else:
            assert torch.equal(a.view(torch.uint8) if a.numel() else a, b.view(torch.uint8) if b.numel() else b)
