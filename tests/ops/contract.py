"""The contract every op is held to; ``tests/ops/test_contract.py`` runs it over the registry."""

import torch
from torch.library import opcheck

from dsv4.ops import OpSpec
from dsv4.ops.shapes import Shape

CPU = torch.device("cpu")
OPCHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


def tensors(tree: object) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def clone(tree: object) -> object:
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, tree)


def example(spec: OpSpec, shape: Shape, num_tokens: int, dtype: torch.dtype, seed: int = 0):
    return spec.example(shape, num_tokens=num_tokens, device=CPU, dtype=dtype, seed=seed)


def run(spec: OpSpec, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Outputs and mutated inputs of one call, in schema order."""
    args = clone(args)
    out = spec.overload(*args, **kwargs)
    mutated = [a for a, s in zip(args, spec.overload._schema.arguments) if s.alias_info and s.alias_info.is_write]
    return tensors(out) + mutated


def check_opcheck(spec: OpSpec, shape: Shape, num_tokens: int, dtype: torch.dtype) -> None:
    args, kwargs = example(spec, shape, num_tokens, dtype)
    checks = OPCHECKS
    if any(t.dtype == torch.float8_e4m3fn for t in tensors(args)):  # test_schema compares values and has no float8
        check_schema(spec, args, kwargs)
        checks = tuple(c for c in OPCHECKS if c != "test_schema")
    opcheck(spec.overload, args, kwargs, test_utils=checks)


def check_schema(spec: OpSpec, args: tuple, kwargs: dict) -> None:
    """What opcheck's ``test_schema`` asserts, bytewise: only declared arguments change, no output aliases an input."""
    before = clone(args)
    out = tensors(spec.overload(*args, **kwargs))
    for old, new, argument in zip(before, args, spec.overload._schema.arguments, strict=False):
        if isinstance(new, torch.Tensor) and not (argument.alias_info and argument.alias_info.is_write):
            assert torch.equal(as_bytes(old), as_bytes(new)), f"{spec.name} changed {argument.name}"
    inputs = {t.untyped_storage().data_ptr() for t in tensors(args) if t.numel()}
    assert not any(t.untyped_storage().data_ptr() in inputs for t in out if t.numel())


def as_bytes(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().flatten().view(torch.uint8)


def check_zero_tokens(spec: OpSpec, shape: Shape, dtype: torch.dtype) -> None:
    some = run(spec, *example(spec, shape, 3, dtype))
    none = run(spec, *example(spec, shape, 0, dtype))
    assert [t.dtype for t in some] == [t.dtype for t in none]
    assert [t.dim() for t in some] == [t.dim() for t in none]


def check_non_contiguous(spec: OpSpec, shape: Shape, dtype: torch.dtype) -> None:
    """Read-only inputs given as every second column of a wider tensor give the same result."""
    args, kwargs = example(spec, shape, 5, dtype)
    expected = run(spec, args, kwargs)

    def spread(value, argument):
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if not isinstance(value, torch.Tensor) or writes or value.dim() == 0:
            return value
        wide = value.new_zeros((*value.shape, 2))
        wide[..., 0] = value
        return wide[..., 0]

    spread_args = tuple(spread(a, s) for a, s in zip(args, spec.overload._schema.arguments))
    mutated = run_in_place(spec, spread_args, kwargs)
    for got, want in zip(mutated, expected, strict=True):
        tolerance = 0 if want.dtype == torch.float8_e4m3fn else 2e-5  # codes are compared bitwise
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)


def run_in_place(spec: OpSpec, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    writes = [s.alias_info is not None and s.alias_info.is_write for s in spec.overload._schema.arguments]
    args = tuple(a.clone() if w else a for a, w in zip(args, writes, strict=False))
    out = spec.overload(*args, **kwargs)
    return tensors(out) + [a for a, w in zip(args, writes, strict=False) if w]


def check_compiled(spec: OpSpec, shape: Shape, dtype: torch.dtype) -> None:
    """Eager equals a fullgraph trace for several token counts (``aot_eager``: no code generation in between)."""
    torch._dynamo.reset()

    def call(args, kwargs):
        return spec.overload(*args, **kwargs)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_tokens in (1, 5):
        args, kwargs = example(spec, shape, num_tokens, dtype)
        expected = run(spec, args, kwargs)
        args = clone(args)
        out = compiled(args, kwargs)
        writes = [s.alias_info is not None and s.alias_info.is_write for s in spec.overload._schema.arguments]
        got = tensors(out) + [a for a, w in zip(args, writes, strict=False) if w]
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a.view(torch.uint8) if a.numel() else a, b.view(torch.uint8) if b.numel() else b)
