import copy

import torch

from dsv4.compile import compile_model, mark_unbacked_sizes
from dsv4.compile.dedupe import distinct

from . import toy


def num_distinct(fn, *args) -> int:
    return compile_model(fn, ["toy::mark"], backend="eager").prepare(*args).num_distinct_pieces


def pieces(*bodies):
    """A function of one argument tuple per body, with a boundary before each body."""

    def fn(out, *groups):
        results = []
        for body, group in zip(bodies, groups, strict=True):
            torch.ops.toy.mark(out, out)
            results.append(body(*group))
        return results

    return fn


def add(x, y):
    return torch.ops.toy.norm(x, y, eps=1e-6) + y


def prepare(model, tokens=(7, 2, 3)):
    inputs = toy.make_inputs(*tokens)
    mark_unbacked_sizes(inputs, toy.SIZES)
    return model.prepare(inputs)


def test_identical_layers_share_a_program():
    report = prepare(compile_model(toy.Model(), toy.BOUNDARY, backend="eager"))
    assert (report.num_pieces, report.num_distinct_pieces) == (13, 3)  # first, middle (5 times), last


def test_layers_that_differ_in_a_scalar_do_not():
    model = toy.Model(epsilons=(1e-6, 1e-6, 1e-5, 1e-6, 1e-5, 1e-6))
    report = prepare(compile_model(model, toy.BOUNDARY, backend="eager"))
    assert report.num_distinct_pieces == 4


def test_scalars_are_equal_only_with_their_type():
    out, x = torch.empty(4), torch.randn(3, 4)
    assert num_distinct(pieces(lambda a: a * 2, lambda a: a * 2), out, (x,), (x,)) == 1
    assert num_distinct(pieces(lambda a: a * 2, lambda a: a * 2.0), out, (x,), (x,)) == 2
    assert num_distinct(pieces(lambda a: a * 1, lambda a: a * True), out, (x,), (x,)) == 2


def test_every_property_of_an_input_counts():
    out, x, y = torch.empty(4), torch.randn(3, 4), torch.randn(4)

    def count(other):
        return num_distinct(pieces(add, add), out, (x, y), (other, y))

    assert count(torch.randn(3, 4)) == 1
    assert count(torch.randn(5, 4)) == 2  # size
    assert count(torch.randn(4, 3).t()) == 2  # stride
    assert count(torch.randn(3, 4, dtype=torch.float64)) == 2  # dtype
    assert count(torch.randn(13)[1:].view(3, 4)) == 2  # four bytes off an aligned address
    assert count(torch.randn(16)[4:].view(3, 4)) == 1  # sixteen bytes off


def test_inputs_in_one_memory_are_not_inputs_in_two():
    def body(x, y):
        return x + y

    out, base = torch.empty(4), torch.randn(64)
    apart = (torch.randn(8), torch.randn(8))
    assert num_distinct(pieces(body, body), out, apart, (torch.randn(8), torch.randn(8))) == 1
    assert num_distinct(pieces(body, body), out, apart, (base[:8], base[8:16])) == 2
    near, far = (base[:8], base[8:16]), (torch.randn(64)[:8], torch.randn(8))
    assert num_distinct(pieces(body, body), out, near, far) == 2
    other = torch.randn(64)
    assert num_distinct(pieces(body, body), out, near, (other[:8], other[8:16])) == 1
    assert num_distinct(pieces(body, body), out, near, (other[:8], other[4:12])) == 2


def test_argument_order_and_output_order_count():
    out, x, y = torch.empty(4), torch.randn(4), torch.randn(4)
    assert num_distinct(pieces(lambda a, b: a - b, lambda a, b: b - a), out, (x, y), (x, y)) == 1  # roles, not names
    swapped = pieces(lambda a, b: (a + b, a - b), lambda a, b: (a - b, a + b))
    assert num_distinct(swapped, out, (x, y), (x, y)) == 2


def sized(*tensors):
    for t in tensors:
        torch._dynamo.decorators.mark_unbacked(t, 0)
    return tensors


def test_symbols_in_equal_roles_are_equal():
    out, y = torch.empty(4), torch.randn(4)
    a, b = sized(torch.randn(3, 4), torch.randn(5, 4))
    assert num_distinct(pieces(add, add), out, (a, y), (b, y)) == 1


def test_checks_on_a_symbol_count():
    def fn(out, a, b, y):
        torch._check(b.shape[0] % 8 == 0)
        return pieces(add, add)(out, (a, y), (b, y))

    out, y = torch.empty(4), torch.randn(4)
    a, b = sized(torch.randn(3, 4), torch.randn(8, 4))
    report = compile_model(fn, ["toy::mark"], backend="eager").prepare(out, a, b, y)
    assert report.num_distinct_pieces == 2  # without the check: one, by the test above


def test_shared_program_uses_each_layers_own_weights_tables_and_cache(cache_dir):
    """Two layers of one kind run one compiled program with their own tensors."""
    torch.manual_seed(1)
    layers = torch.nn.ModuleList(toy.Layer(False, 1e-6) for _ in range(3))
    reference = copy.deepcopy(layers)

    def run(layers, x, inputs):
        outputs = []
        for layer in layers:
            torch.ops.toy.mark(x[:, 0], torch.empty_like(x[:, 0]))
            outputs.append(layer(x, inputs))
        return outputs

    model = compile_model(lambda x, i: run(layers, x, i), ["toy::mark", "toy::attention"], cache_dir=cache_dir)
    x, inputs = torch.randn(6, toy.HIDDEN), toy.make_inputs(6, 2, 2)
    got = model(x, inputs)
    with torch.no_grad():
        expected = run(reference, x, inputs)
    assert not torch.allclose(got[0], got[1]) and not torch.allclose(got[1], got[2])
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    for layer, ref in zip(layers, reference, strict=True):
        torch.testing.assert_close(layer.cache, ref.cache)
    programs = [p for p in model.plan.pieces if "toy::norm" in p.op_names]
    assert len(programs) == 3 and model.report.num_distinct_pieces < model.report.num_pieces - 3


def test_keys_depend_on_the_program_alone():
    def keys(seed, tokens):
        model = compile_model(toy.Model(seed=seed), toy.BOUNDARY, backend="eager")
        prepare(model, tokens)
        return list(distinct(model.plan.pieces, model.plan.values))

    assert keys(0, (7, 2, 3)) == keys(1, (1, 1, 1))
