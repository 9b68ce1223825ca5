import expecttest
import pytest
import torch

from dsv4.compile import compile_model, mark_unbacked_sizes
from dsv4.compile.split import custom_op_name, op_name

from . import toy


def traced(fn, *args, boundary=("toy::mark", "toy::pick"), **kwargs):
    model = compile_model(fn, boundary, backend="eager", **kwargs)
    model.prepare(*args)
    return model


def kinds(model) -> list[str]:
    return [p.kind for p in model.plan.pieces]


@pytest.fixture(scope="module")
def toy_model():
    model = compile_model(toy.Model(), toy.BOUNDARY, backend="eager")
    inputs = toy.make_inputs(7, 2, 3)
    mark_unbacked_sizes(inputs, toy.SIZES)
    model.prepare(inputs)
    return model


def test_op_names():
    assert op_name(torch.ops.toy.norm) == op_name(torch.ops.toy.norm.default) == "toy::norm"
    assert op_name(torch.ops.aten.add_.Tensor) == "aten::add_" and custom_op_name(torch.ops.aten.add_.Tensor) is None
    assert op_name(torch.add) is None


def test_default_boundaries_alternate(toy_model):
    assert kinds(toy_model) == ["compiled", "boundary"] * 6 + ["compiled"]
    regions = [p.op_names for p in toy_model.plan.pieces if p.kind == "boundary"]
    assert regions == [("toy::attention",), ("toy::pick", "toy::attention")] * 3


def test_pieces_keep_the_order_of_the_trace(toy_model):
    layer = ["toy::norm", "toy::store"]
    expected = (layer + ["toy::attention"] + layer + ["toy::pick", "toy::attention"]) * 3
    assert [name for p in toy_model.plan.pieces for name in p.op_names] == expected


def test_custom_boundaries_leave_other_ops_compiled():
    inputs = toy.make_inputs(7, 2, 3)
    mark_unbacked_sizes(inputs, toy.SIZES)
    model = traced(toy.Model(), inputs, boundary=("toy::attention",))
    assert {p.op_names for p in model.plan.pieces if p.kind == "boundary"} == {("toy::attention",)}
    assert model.report.boundary_ops == ("toy::attention",)


@pytest.mark.parametrize("mode", ["full", "none"])
def test_empty_set_is_one_piece(mode):
    model = traced(toy.Model(), toy.make_inputs(7, 2, 3), mode=mode)
    assert kinds(model) == ["compiled"] and model.report.boundary_ops == ()


def test_views_and_sizes_between_boundary_ops_join_them():
    def fn(x, out, other):
        h = x + 1
        torch.ops.toy.mark(h, out)
        torch.ops.toy.mark(h.view(h.shape[0], -1, 2).flatten(1), other)  # size arithmetic and views only
        return out * other

    x = torch.randn(5, 4)
    torch._dynamo.decorators.mark_unbacked(x, 0)
    model = traced(fn, x, torch.empty(5, 4), torch.empty(5, 4))
    assert kinds(model) == ["compiled", "boundary", "compiled"]
    out, other = torch.empty(5, 4), torch.empty(5, 4)
    assert torch.equal(model(x, out, other), (x + 1) ** 2) and torch.equal(out, x + 1)


def test_a_view_that_a_compiled_piece_needs_too_is_compiled():
    def fn(x, out, other):
        torch.ops.toy.mark(x, out)
        view = x.view(2, 8)
        torch.ops.toy.mark(view, other)
        return view + 1

    assert kinds(traced(fn, torch.randn(4, 4), torch.empty(4, 4), torch.empty(2, 8))) == [
        "boundary", "compiled", "boundary", "compiled"
    ]  # fmt: skip


def test_arithmetic_between_boundary_ops_is_compiled():
    def fn(x, out, other):
        torch.ops.toy.mark(x, out)
        torch.ops.toy.mark(out * 2, other)
        return other + 0

    assert kinds(traced(fn, torch.randn(3, 4), torch.empty(3, 4), torch.empty(3, 4))) == [
        "boundary", "compiled", "boundary", "compiled"
    ]  # fmt: skip


def test_write_by_index_is_not_taken_for_a_view():
    def fn(x, out, other):
        torch.ops.toy.mark(x, out)
        out[0] = 7
        torch.ops.toy.mark(out, other)
        return other + 0

    model = traced(fn, torch.randn(3, 4), torch.empty(3, 4), torch.empty(3, 4))
    assert kinds(model)[1] == "compiled"
    x = torch.randn(3, 4)
    assert torch.equal(model(x, torch.empty(3, 4), torch.empty(3, 4)), torch.cat((torch.full((1, 4), 7.0), x[1:])))


def test_parts_of_a_tuple_stay_with_the_op_that_returns_it():
    def fn(x, out):
        low, high = x.split(2, 1)
        low = low + 1
        torch.ops.toy.mark(low, out)
        return high * out

    model = traced(fn, torch.randn(3, 4), torch.empty(3, 2))
    assert all(isinstance(model.plan.values[o], torch.Tensor) for p in model.plan.pieces for o in p.outputs)
    x = torch.randn(3, 4)
    assert torch.equal(model(x, torch.empty(3, 2)), x[:, 2:] * (x[:, :2] + 1))


def test_sizes_are_repeated_rather_than_passed():
    def fn(x, starts, out):
        rows = x.new_zeros(starts.shape[0] - 1) + 1
        torch.ops.toy.mark(x, out)
        return out.sum() + x.new_ones(starts.shape[0] - 1).sum() + rows.sum()

    x, starts = torch.randn(3, 4), torch.arange(6)
    torch._dynamo.decorators.mark_unbacked(starts, 0)
    model = traced(fn, x, starts, torch.empty(3, 4))
    assert all(isinstance(model.plan.values[o], torch.Tensor) for p in model.plan.pieces for o in p.outputs)
    torch.testing.assert_close(model(x, starts, torch.empty(3, 4)), x.sum() + 10)
    torch.testing.assert_close(model(x, torch.arange(2), torch.empty(3, 4)), x.sum() + 2)


def test_writing_one_of_two_values_in_one_memory_is_refused():
    def fn(x):
        h = x + 1
        half = h[:, :2]
        torch.ops.toy.mark(x[:, :2], half)
        return h * 2

    message = "a tensor that toy::mark writes must not share memory with another value that leaves piece 0"
    with pytest.raises(NotImplementedError, match=message):
        traced(fn, torch.randn(3, 4))


def test_boundary_ops_must_be_registered():
    with pytest.raises(ValueError, match="must name registered ops as 'namespace::op', got 'toy::nothing'"):
        compile_model(lambda x: x, ["toy::nothing"])
    with pytest.raises(ValueError, match="got 'toy.norm'"):
        compile_model(lambda x: x, ["toy.norm"])
    with pytest.raises(ValueError, match="mode must be one of"):
        compile_model(lambda x: x, mode="half")


def test_listing_golden():
    inputs = toy.make_inputs(7, 2, 3)
    mark_unbacked_sizes(inputs, toy.SIZES)
    model = traced(toy.Model(epsilons=(1e-6,) * 3), inputs, boundary=toy.BOUNDARY)
    expecttest.assert_expected_inline(
        model.report.plan,
        """\
0 compiled program 0
    toy::norm(f32[s0,16], f32[16]) -> f32[s0,16]
    toy::store(f32[s0,16], i64[s0], f32[64,16]!)
1 boundary
    toy::attention(f32[s0,2,8], f32[64,16]!, i64[s0], i64[s1], i64[s2], i64[s0], f32[s0,2,8]!, f32[s0,2]!)
2 compiled program 1
    toy::norm(f32[s0,16], f32[16]) -> f32[s0,16]
    toy::store(f32[s0,16], i64[s0], f32[64,16]!)
3 boundary
    toy::pick(f32[s0,2,8], f32[64,16], i64[s2,8], i64[s0]) -> i64[s0]
    toy::attention(f32[s0,2,8], f32[64,16]!, i64[s0], i64[s0], i64[s1], i64[s2], i64[s0], f32[s0,2,8]!, f32[s0,2]!)
4 compiled program 1
    toy::norm(f32[s0,16], f32[16]) -> f32[s0,16]
    toy::store(f32[s0,16], i64[s0], f32[64,16]!)
5 boundary
    toy::attention(f32[s0,2,8], f32[64,16]!, i64[s0], i64[s1], i64[s2], i64[s0], f32[s0,2,8]!, f32[s0,2]!)
6 compiled program 2
""",
    )
