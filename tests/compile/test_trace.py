import copy

import pytest
import torch
from torch.library import opcheck

from dsv4.compile import (
    CompilerMissingError,
    GraphBreakError,
    RecompileError,
    compile_model,
    inductor,
    mark_unbacked_sizes,
)

from . import toy

toy.define("wrong_stride", "(Tensor x) -> Tensor", lambda x: x.t().contiguous().t(), lambda x: x.new_empty(x.shape))
toy.define("undeclared_write", "(Tensor x) -> Tensor", lambda x: x.add_(1).clone(), lambda x: torch.empty_like(x))


def check_all_shapes(compiled, model, reference) -> None:
    """Output and caches equal eager for every shape, the first call first."""
    for n, shape in enumerate(toy.SHAPES):
        inputs = toy.make_inputs(*shape, seed=n)
        if n == 0:
            mark_unbacked_sizes(inputs, toy.SIZES)
        got = compiled(inputs)
        with torch.no_grad():
            expected = reference(inputs)
        assert got.shape == (shape[2], toy.VOCAB)
        torch.testing.assert_close(got, expected)
        for a, b in zip(toy.caches(model), toy.caches(reference), strict=True):
            torch.testing.assert_close(a, b)


@pytest.fixture(scope="module")
def compiled_toy(cache_dir):
    """The toy model through Inductor, traced with zero tokens, zero requests and zero logit rows."""
    model = toy.Model()
    reference = copy.deepcopy(model)
    compiled = compile_model(model, toy.BOUNDARY, cache_dir=cache_dir, cache_salt="toy")
    return compiled, model, reference


def test_no_recompile_over_all_sizes(compiled_toy):
    compiled, model, reference = compiled_toy
    check_all_shapes(compiled, model, reference)
    report = compiled.report
    assert (report.num_recompiles, report.graph_breaks) == (0, 0)
    assert (report.num_pieces, report.num_distinct_pieces) == (13, 3)


def test_an_op_in_a_compiled_piece_writes_the_cache_itself(compiled_toy):
    """Zero copies: the op sees the addresses of the model's own caches."""
    compiled, model, _ = compiled_toy
    toy.seen_pointers["store"].clear()
    compiled(toy.make_inputs(7, 7, 7))
    assert toy.seen_pointers["store"] == [c.data_ptr() for c in toy.caches(model)]


def test_a_boundary_op_writes_the_buffer_that_the_next_piece_reads(compiled_toy):
    compiled, _, _ = compiled_toy
    written, read = [], []

    def wrap(piece, call):
        def run(*args):
            pointers = {a.data_ptr() for a in args if isinstance(a, torch.Tensor)}
            (written if piece.kind == "boundary" else read).append(pointers)
            return call(*args)

        return run

    compiled.wrap_pieces(wrap)
    toy.seen_pointers["attention"].clear()
    compiled(toy.make_inputs(7, 7, 7))
    compiled.wrap_pieces(lambda piece, call: call)
    outs = toy.seen_pointers["attention"]
    assert len(outs) == 6 and all(o in w and o in r for o, w, r in zip(outs, written, read[1:], strict=True))


def test_full_mode_is_one_compiled_piece(cache_dir):
    model = toy.Model(epsilons=(1e-6,) * 2)
    reference = copy.deepcopy(model)
    compiled = compile_model(model, toy.BOUNDARY, mode="full", cache_dir=cache_dir)
    check_all_shapes(compiled, model, reference)
    assert (compiled.report.num_pieces, compiled.report.num_recompiles) == (1, 0)


def test_writes_through_views_of_an_argument_are_visible(cache_dir):
    """One stacked cache: a compiled op writes one view of it, a boundary op another view made in the compiled piece."""

    def fn(x, slots, stacked):
        h = x * 2
        torch.ops.toy.store(h, slots, stacked[0])
        torch.ops.toy.mark(h, stacked[1, :3])
        return stacked.sum()

    x, slots, stacked = torch.randn(3, 4), torch.tensor([5, -1, 0]), torch.randn(2, 8, 4)
    expected = stacked.clone()
    expected[0, [5, 0]], expected[1, :3] = 2 * x[[0, 2]], 2 * x
    toy.seen_pointers["store"].clear()
    total = compile_model(fn, ["toy::mark"], cache_dir=cache_dir)(x, slots, stacked)
    torch.testing.assert_close(stacked, expected)
    torch.testing.assert_close(total, expected.sum())
    assert toy.seen_pointers["store"] == [stacked.data_ptr()]


def test_caches_of_any_number_of_pages(cache_dir):
    """Caches are arguments whose number of pages is settled after compiling; they are still written in place."""

    def fn(x, slots, caches):
        for cache in caches["layers"]:
            torch.ops.toy.mark(x[:1], torch.empty_like(x[:1]))
            x = x * 2 + 1
            torch.ops.toy.store(x, slots, cache)
        return x

    def make(num_pages):
        return {"layers": [torch.randn(num_pages, 4) for _ in range(3)]}

    x, slots, caches = torch.randn(3, 4), torch.tensor([5, -1, 0]), make(8)
    mark_unbacked_sizes(caches, {f"layers.{i}": {0: "pages"} for i in range(3)})
    compiled = compile_model(fn, ["toy::mark"], cache_dir=cache_dir)
    compiled(x, slots, caches)
    for num_pages in (6, 50):
        caches = make(num_pages)
        expected = [c.clone() for c in caches["layers"]]
        toy.seen_pointers["store"].clear()
        fn(x, slots, {"layers": expected})
        toy.seen_pointers["store"].clear()
        compiled(x, slots, caches)
        assert toy.seen_pointers["store"] == [c.data_ptr() for c in caches["layers"]]
        for got, want in zip(caches["layers"], expected, strict=True):
            torch.testing.assert_close(got, want)
    programs = [p for p in compiled.plan.pieces if "toy::store" in p.op_names]
    assert len(programs) == 3 and compiled.report.num_distinct_pieces <= 3


def test_prepare_executes_nothing():
    model = toy.Model()
    before = [c.clone() for c in toy.caches(model)]
    inputs = toy.make_inputs(7, 2, 3)
    mark_unbacked_sizes(inputs, toy.SIZES)
    for counts in toy.seen_pointers.values():
        counts.clear()
    compiled = compile_model(model, toy.BOUNDARY, backend="eager")
    assert compiled.prepare(inputs).num_distinct_pieces == 3
    assert not any(toy.seen_pointers.values())
    assert all(torch.equal(a, b) for a, b in zip(before, toy.caches(model), strict=True))
    assert compiled(toy.make_inputs(1, 1, 1)).shape == (1, toy.VOCAB)


def test_meta_device():
    """Inspection without memory: 43 layers traced on the meta device."""
    with torch.device("meta"):
        model = toy.Model(epsilons=(1e-6,) * 43)
    inputs = toy.make_inputs(7, 2, 3, device="meta")
    mark_unbacked_sizes(inputs, toy.SIZES)
    compiled = compile_model(model, toy.BOUNDARY, backend="eager")
    report = compiled.prepare(inputs)
    assert (report.num_pieces, report.num_distinct_pieces) == (87, 3)
    assert report.op_calls == {"toy::norm": 43, "toy::store": 43, "toy::attention": 43, "toy::pick": 21}
    assert report.piece_nodes[1].ops == {"toy::norm": 1, "toy::store": 1}
    assert report.piece_nodes[1].aten["aten::addmm"] == report.piece_nodes[1].aten["aten::mm"] == 1


def test_report_counts_what_is_left_for_the_compiler():
    def fn(x):
        rows = torch.zeros(x.shape[0], 4) + 1  # a factory sees no tensor that would tell it to be fake
        return torch.ops.toy.norm(x, rows[0], eps=1e-6) @ rows.t()

    x = torch.randn(3, 4)
    mark_unbacked_sizes({"x": x}, {"x": 0})
    (nodes,) = compile_model(fn, backend="eager").prepare(x).piece_nodes
    assert nodes.ops == {"toy::norm": 1}
    assert nodes.aten.keys() >= {"aten::zeros", "aten::add", "aten::select", "aten::t", "aten::mm"}


def test_calls_on_the_meta_device():
    result = compile_model(lambda x: x @ x.t(), backend="eager")(torch.empty(3, 4, device="meta"))
    assert result.is_meta and result.shape == (3, 3)


class TestRecompiles:
    @pytest.fixture
    def compiled(self):
        compiled = compile_model(toy.Model(epsilons=(1e-6,) * 2), toy.BOUNDARY, backend="eager")
        inputs = toy.make_inputs(4, 2, 2)
        mark_unbacked_sizes(inputs, toy.SIZES)
        compiled(inputs)
        return compiled

    def test_changed_dtype_names_the_guard(self, compiled):
        inputs = toy.make_inputs(4, 2, 2)
        inputs.slots = inputs.slots.int()
        with pytest.raises(RecompileError, match=r"args\[0\].slots.* dtype mismatch"):
            compiled(inputs)
        assert compiled.report.num_recompiles == 1

    def test_unmarked_size_names_the_guard(self, compiled):
        inputs = toy.make_inputs(4, 2, 2)
        inputs.tables = inputs.tables[:, :4].clone()
        with pytest.raises(RecompileError, match=r"args\[0\].tables.* (size|stride) mismatch"):
            compiled(inputs)
        assert compiled(toy.make_inputs(4, 2, 2)).shape == (2, toy.VOCAB)  # and the model still works

    def test_sizes_of_one_name_must_stay_equal(self, compiled):
        inputs = toy.make_inputs(4, 2, 2)
        inputs.slots = inputs.slots[:3].clone()
        with pytest.raises(RecompileError, match=r"slots.size\(\)\[0\] == args\[0\].ids.size\(\)\[0\]"):
            compiled(inputs)

    def test_lost_trace_is_refused(self, compiled):
        torch._dynamo.reset()
        with pytest.raises(RecompileError, match="must be traced once"):
            compiled(toy.make_inputs(4, 2, 2))

    def test_two_models_of_one_class_do_not_disturb_each_other(self, compiled):
        other = compile_model(toy.Model(epsilons=(1e-6,) * 2, seed=1), toy.BOUNDARY, backend="eager")
        inputs = toy.make_inputs(4, 2, 2)
        mark_unbacked_sizes(inputs, toy.SIZES)
        assert not torch.allclose(other(inputs), compiled(inputs))
        assert other.report.num_recompiles == compiled.report.num_recompiles == 0


class TestMarks:
    def test_sizes_of_one_name_must_agree(self):
        inputs = toy.make_inputs(4, 2, 2)
        inputs.slots = inputs.slots[:3]
        with pytest.raises(ValueError, match="T of slots must be 4 as in ids, got 3"):
            mark_unbacked_sizes(inputs, toy.SIZES)

    def test_unknown_field_dim_and_type(self):
        inputs = toy.make_inputs(4, 2, 2)
        with pytest.raises(ValueError, match="sizes must name fields of Inputs, got 'nothing'"):
            mark_unbacked_sizes(inputs, {"nothing": 0})
        with pytest.raises(ValueError, match="sizes must name fields of list, got 'caches.2'"):
            mark_unbacked_sizes({"caches": [torch.randn(3), torch.randn(3)]}, {"caches.2": 0})
        with pytest.raises(ValueError, match=r"dim of ids must be in \[0, 1\), got 1"):
            mark_unbacked_sizes(inputs, {"ids": 1})
        with pytest.raises(ValueError, match="sizes must name tensors, got 'ids.ndim' of type int"):
            mark_unbacked_sizes(inputs, {"ids.ndim": 0})

    def test_several_dims_of_a_tensor(self):
        x = torch.randn(3, 4)
        holder = type("Holder", (), {"x": x})()
        mark_unbacked_sizes(holder, {"x": (0, 1)})
        compiled = compile_model(lambda x: x + 1, backend="eager")
        compiled(x)
        for shape in ((1, 1), (0, 9), (5, 2)):
            y = torch.randn(shape)
            assert torch.equal(compiled(y), y + 1)


class TestFaults:
    """Each planted fault is caught."""

    def test_value_read_back_from_a_tensor(self):
        def fn(x):
            return x * x.sum().item()

        with pytest.raises(GraphBreakError, match="(?s)read values back from tensors, got item.*x.sum"):
            compile_model(fn, backend="eager")(torch.randn(3))

    def test_data_dependent_size(self):
        with pytest.raises(GraphBreakError):
            compile_model(lambda x: x[x > 0], backend="eager")(torch.randn(3))

    def test_function_that_leaves_the_graph(self):
        def fn(x):
            torch._dynamo.graph_break()
            return x + 1

        with pytest.raises(GraphBreakError, match="graph_break"):
            compile_model(fn, backend="eager")(torch.randn(3))

    def test_branch_on_a_marked_size(self):
        def fn(x):
            return x + 1 if x.shape[0] > 3 else x

        x = torch.randn(5)
        torch._dynamo.decorators.mark_unbacked(x, 0)
        with pytest.raises(Exception, match="data-dependent|Could not guard"):
            compile_model(fn, backend="eager")(x)

    def test_fake_with_another_stride(self, cache_dir):
        def fn(x):
            return torch.ops.toy.wrong_stride(x) + 1

        with pytest.raises(AssertionError, match="stride"):
            compile_model(fn, cache_dir=cache_dir)(torch.randn(3, 5))

    def test_undeclared_write(self):
        with pytest.raises(Exception, match="(?i)mutat"):
            opcheck(torch.ops.toy.undeclared_write.default, (torch.randn(3),), test_utils="test_schema")
        good = torch.ops.toy.norm.default
        opcheck(good, (torch.randn(3, 4), torch.randn(4)), {"eps": 1e-6}, test_utils="test_schema")

    def test_missing_compiler(self, monkeypatch):
        monkeypatch.setattr(inductor, "compile_piece", lambda *_: pytest.fail("compiled without a compiler"))
        missing = pytest.raises(CompilerMissingError, match=r"C\+\+ compiler, got none among .*/nonexistent/g\+\+")
        with torch._inductor.config.patch({"cpp.cxx": (None, "/nonexistent/g++")}), missing:
            compile_model(lambda x: x + 1)(torch.randn(3))
