import traceback
import weakref

import expecttest
import pytest
import torch

from dsv4.compile import compile_model, mark_unbacked_sizes
from dsv4.compile.stitch import stitch

from . import toy


@pytest.fixture
def model():
    compiled = compile_model(toy.Model(epsilons=(1e-6,) * 2), toy.BOUNDARY, backend="eager")
    inputs = toy.make_inputs(7, 2, 3)
    mark_unbacked_sizes(inputs, toy.SIZES)
    compiled.prepare(inputs)
    return compiled


def test_source_golden(model):
    expecttest.assert_expected_inline(
        model.source,
        """\
def step(
    a0, n0, a1, a2, a3, a4, a5, a6, a7, n1, a8, n2, a9, a10, a11, a12, a13, a14, a15, a16, a17, a18, n3, a19,
    a20, a21
):
    v23, v29, v30, v31 = piece_0(n0, n1, n2, n3, a5, a10, a17, a1, a0, a2, a3, a4, a6, a7)
    # toy::attention
    boundary_1(v29, a4, a5, a8, a9, a10, v30, v31)
    del v29
    v38, v44, v45, v46 = piece_2(n0, v30, a11, v31, v23, a12, a13, a1, a5, a14, a15, a16)
    del v30, v31, v23
    # toy::pick, toy::attention
    boundary_3(v44, a14, a17, a10, a5, a8, a9, v45, v46)
    del v44
    (v56,) = piece_4(n0, n3, v45, a18, v46, v38, a19, a20, a21)
    del v45, v46, v38
    return (v56,)
""",
    )


def test_intermediates_die_after_their_last_use(model):
    outputs: list[weakref.ref] = []
    alive: list[int] = []

    def wrap(piece, call):
        def run(*args):
            alive.append(sum(r() is not None for r in outputs))
            result = call(*args)
            outputs.extend(weakref.ref(t) for t in result)
            return result

        return run

    model.wrap_pieces(wrap)
    result = model(toy.make_inputs(5, 1, 2))
    made = [len(p.outputs) for p in model.plan.pieces]
    assert made == [4, 0, 4, 0, 1]
    assert alive == [0, 4, 3, 4, 3]  # q is dead after its attention, the first layer's values after the second's piece
    assert sum(r() is not None for r in outputs) == 1 and result.shape == (2, toy.VOCAB)


def test_wrapped_pieces_run_in_order_and_a_second_wrapper_replaces_the_first(model):
    seen: list[int] = []

    def noting(piece, call):
        def run(*args):
            seen.append(piece.index)
            return call(*args)

        return run

    inputs = toy.make_inputs(5, 1, 2)
    model.wrap_pieces(noting)
    model.wrap_pieces(noting)
    model(inputs)
    assert seen == list(range(5))


def test_errors_show_the_stitched_line(model):
    def failing(piece, call):
        def run(*args):
            raise ZeroDivisionError(piece.index)

        return run

    model.wrap_pieces(failing)
    with pytest.raises(ZeroDivisionError) as caught:
        model(toy.make_inputs(5, 1, 2))
    assert "= piece_0(" in "".join(traceback.format_exception(caught.value))


def test_constants_of_the_model_are_kept():
    table = torch.arange(4.0)

    def fn(x, out):
        torch.ops.toy.mark(x, out)
        return out + torch.tensor([1.0, 2.0, 3.0, 4.0]) * table

    x = torch.randn(4)
    torch.testing.assert_close(
        compile_model(fn, ["toy::mark"], backend="eager")(x, torch.empty(4)), x + torch.arange(1.0, 5.0) * table
    )


def test_one_call_per_piece(model):
    with pytest.raises(ValueError, match=r"calls must have one entry per piece \(5\), got 1"):
        stitch(model.plan, [lambda: ()])
