"""Arguments that have a row per token, per request or per slot: fewer rows than the others are refused."""

import pytest
import torch

from dsv4 import ops

from . import contract, row_arguments


def refuse(name, values, kwargs, message):
    """Neither the reference nor the fake takes the values, and nothing is written before they are refused."""
    spec, before = ops.specs()[name], contract.clone(tuple(values.values()))
    with pytest.raises(ValueError, match=message):
        spec.reference(*values.values(), **kwargs)
    for old, new in zip(before, values.values(), strict=True):
        assert torch.equal(contract.as_bytes(old), contract.as_bytes(new))
    with pytest.raises(ValueError, match=message):
        spec.overload(*(t.to("meta") for t in values.values()), **kwargs)


def test_every_op_is_listed():
    assert sorted(row_arguments.ROW_WISE) == sorted(ops.specs())


@pytest.mark.parametrize("left", ["one fewer", "one", "none"])
@pytest.mark.parametrize(("name", "argument"), row_arguments.CASES)
def test_fewer_rows(name, argument, left):
    refuse(name, *row_arguments.cut(name, argument, left))


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=str)
@pytest.mark.parametrize(
    ("name", "argument"),
    [
        (op, a.name)
        for op, s in ops.specs().items()
        for a in s.overload._schema.arguments
        if a.name in row_arguments.INDICES
    ],
)
def test_indices_are_integers(name, argument, dtype):
    values, kwargs = row_arguments.example(name)
    values[argument] = values[argument].to(dtype)
    named = row_arguments.NAMED_BY_THEIR_ERRORS.get(name, name)
    refuse(name, values, kwargs, f"^{named} {argument} must be .*int64, got .*{dtype}$")


def test_sizes_that_are_not_known():
    """They may be equal while an op is traced; what its calls pass is compared then."""
    op, (values, _) = ops.specs()["mhc_post"].overload, row_arguments.example("mhc_post")

    def call(y, streams, post, comb):
        return op(y, streams, post, comb)

    for tensor in values.values():
        torch._dynamo.decorators.mark_unbacked(tensor, 0)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*values.values()), call(*values.values()))
    values["y"] = values["y"][:1].clone()
    with pytest.raises(ValueError, match="mhc_post y must have the 5 rows of streams, got 1"):
        compiled(*values.values())
