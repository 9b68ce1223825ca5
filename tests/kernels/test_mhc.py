"""Kernels of mhc_post, mhc_pre, mhc_post_pre and mhc_head against their references."""

import pytest
import torch

from dsv4 import ops
from dsv4.ops import OpSpec, _mhc, _triton
from dsv4.ops.shapes import Shape, flash, nano, pro, tiny

from ..ops import contract
from . import interpreter
from .against_reference import compare, outputs

interpreter.repair()

SIZES = [(tiny, 0), (tiny, 1), (tiny, 7), (tiny, 33), (nano, 1), (nano, 66)]
DTYPES = [torch.float32, torch.bfloat16]


def name(value: object) -> str:
    return value.name if isinstance(value, Shape) else str(value)


def check(spec: OpSpec, args: tuple, kwargs: dict) -> None:
    """fp32 outputs within a few rounding steps; a bf16 x within two of its own, and differing in few elements at all.

    Both sides add fp32 products, in another order: the arguments of the gates differ by a few times 2^-24, and so do
    post and comb, which are at most 2. A bf16 x is rounded twice (after the collapse, after the norm): where an fp32
    difference lies on a tie each rounding may differ by one step, at most 2^-7 of the value. The atol is for sums
    that cancel.
    """
    got, want = outputs(spec, spec.cuda, args, kwargs), outputs(spec, spec.reference, args, kwargs)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.is_contiguous()
        if a.dtype == torch.float32:
            torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)
        else:
            torch.testing.assert_close(a, b, rtol=2**-6, atol=1e-5)
            assert (a != b).sum() <= 1 + 0.01 * a.numel()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "num_tokens"), SIZES, ids=name)
def test_post(shape, num_tokens, dtype):
    spec = ops.spec("mhc_post")
    # A contracted multiplication and addition may round a tie the other way: one step.
    rtol = 2e-6 if dtype == torch.float32 else 2**-7
    compare(spec, *contract.example(spec, shape, num_tokens, dtype, seed=num_tokens), rtol=rtol, atol=2e-6)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "num_tokens"), SIZES, ids=name)
def test_pre(shape, num_tokens, dtype, deterministic):
    spec = ops.spec("mhc_pre")
    args, kwargs = contract.example(spec, shape, num_tokens, dtype, seed=num_tokens)
    check(spec, args, {**kwargs, "deterministic": deterministic})


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "num_tokens"), [(tiny, 0), (tiny, 5), (nano, 1), (nano, 17)], ids=name)
def test_head(shape, num_tokens, dtype, deterministic):
    spec = ops.spec("mhc_head")
    args, kwargs = contract.example(spec, shape, num_tokens, dtype, seed=num_tokens)
    check(spec, args, {**kwargs, "deterministic": deterministic})


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "num_tokens"), [(tiny, 0), (tiny, 7), (nano, 1), (nano, 9), (nano, 17)], ids=name)
def test_post_pre_is_post_then_pre(shape, num_tokens, dtype, deterministic):
    spec = ops.spec("mhc_post_pre")
    args, kwargs = contract.example(spec, shape, num_tokens, dtype, seed=num_tokens)
    kwargs["deterministic"] = deterministic
    streams = ops.spec("mhc_post").cuda(*args[:4])
    expected = (streams, *ops.spec("mhc_pre").cuda(streams, *args[4:], **kwargs))
    for got, want in zip(spec.cuda(*args, **kwargs), expected, strict=True):
        assert torch.equal(got, want)


def served(name: str, shape: Shape, num_tokens: int, dtype: torch.dtype, **changes) -> list[str]:
    """Kernels that an example call launches."""
    args, kwargs = contract.example(ops.spec(name), shape, num_tokens, dtype)
    with _triton.recording() as launches:
        ops.spec(name).cuda(*args, **(kwargs | changes))
    return [launch.kernel.fn.__name__ for launch in launches]


def test_which_rows_are_few():
    """bf16 rows outside deterministic mode, where their parts are not those of deterministic mode; not the head."""
    few, other = ["_few_products", "_few_finish"], ["_mhc_products", "_mhc_finish"]
    for num_tokens, kernels in ((0, few), (1, few), (16, few), (17, other)):
        assert served("mhc_pre", nano, num_tokens, torch.bfloat16, deterministic=False) == kernels
        assert served("mhc_pre", nano, num_tokens, torch.bfloat16, deterministic=True) == other
    assert served("mhc_post_pre", nano, 3, torch.bfloat16, deterministic=False) == few
    assert served("mhc_post_pre", nano, 3, torch.bfloat16, deterministic=True) == ["_mhc_post", *other]
    assert served("mhc_pre", tiny, 3, torch.bfloat16, deterministic=False) == other
    assert served("mhc_pre", nano, 3, torch.float32, deterministic=False) == other
    assert served("mhc_head", nano, 3, torch.bfloat16, deterministic=False) == other


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 16])
def test_few_rows(monkeypatch, num_tokens):
    """Whole and partial groups of rows; workspace and outputs hold NaN before; the same bits every time."""
    spec = ops.spec("mhc_post_pre")
    args, kwargs = contract.example(spec, nano, num_tokens, torch.bfloat16, seed=num_tokens)
    kwargs["deterministic"] = False
    original = _mhc.alloc_partials
    monkeypatch.setattr(_mhc, "alloc_partials", lambda *a, **k: original(*a, **k).fill_(float("nan")))
    monkeypatch.setattr(torch, "empty", lambda *a, **k: torch.full(a[0], float("nan"), **k))
    check(spec, args, kwargs)
    first, second = (outputs(spec, spec.cuda, args, kwargs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_few_rows_with_nan_and_one_sinkhorn_round():
    spec = ops.spec("mhc_pre")
    args, kwargs = contract.example(spec, nano, 5, torch.bfloat16, seed=6)
    args[0][1, 2, 3] = float("nan")
    kwargs |= {"sinkhorn_iters": 1, "deterministic": False}
    got, want = outputs(spec, spec.cuda, args, kwargs), outputs(spec, spec.reference, args, kwargs)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.isnan(), b.isnan()) and a[1].isnan().all()
        torch.testing.assert_close(a, b, rtol=2**-6, atol=1e-5, equal_nan=True)


def test_a_row_does_not_see_the_batch():
    spec = ops.spec("mhc_pre")
    args, kwargs = contract.example(spec, nano, 66, torch.bfloat16, seed=1)
    kwargs["deterministic"] = True
    all_rows = spec.cuda(*args, **kwargs)
    for rows in (slice(0, 1), slice(3, 7), slice(63, 66)):
        alone = spec.cuda(args[0][rows].clone(), *args[1:], **kwargs)
        for part, whole in zip(alone, all_rows, strict=True):
            assert torch.equal(part, whole[rows])


def test_one_sinkhorn_round_and_nan():
    """A row with a NaN is NaN as in the reference, and does not touch its neighbours."""
    spec = ops.spec("mhc_pre")
    args, kwargs = contract.example(spec, tiny, 5, torch.bfloat16, seed=2)
    args[0][1, 2, 3] = float("nan")
    kwargs["sinkhorn_iters"] = 1
    got, want = outputs(spec, spec.cuda, args, kwargs), outputs(spec, spec.reference, args, kwargs)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.isnan(), b.isnan()) and a[1].isnan().all()
        torch.testing.assert_close(a, b, rtol=2**-6, atol=1e-5, equal_nan=True)


def test_slices_and_parameters_of_any_stride():
    """Read-only arguments need not be contiguous; a bf16 norm weight is taken as its fp32 value."""
    spec = ops.spec("mhc_post_pre")
    args, kwargs = contract.example(spec, tiny, 6, torch.bfloat16, seed=3)
    want = outputs(spec, spec.cuda, args, kwargs)
    wide = [torch.stack((a, torch.full_like(a, float("nan"))), dim=-1)[..., 0] for a in args]
    assert not any(a.is_contiguous() for a in wide)
    wide[-1] = args[-1].float()
    for a, b in zip(outputs(spec, spec.cuda, tuple(wide), kwargs), want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [flash, pro], ids=lambda s: s.name)
def test_parts_cover_the_width(shape):
    """The numbers of parts are those of the published kernels, and the workspace stays small while there are many."""
    width = shape.num_streams * shape.hidden
    counts = [_mhc.num_splits(t, width, deterministic=False) for t in (0, 1, 64, 129, 193, 1024, 2113, 4224, 4225)]
    assert counts == [*[{"flash": 64, "pro": 112}[shape.name]] * 3, 44, 33, 8, 3, 2, 1]
    assert all(_mhc.num_splits(t, width, deterministic=False) * t <= max(64 * 132, t) for t in range(1, 8000))
    assert {_mhc.num_splits(t, width, deterministic=True) for t in (0, 1, 65, 4225)} == {width // 1024}


@pytest.mark.parametrize("splits", [3, 7, 40])
def test_any_number_of_parts(monkeypatch, splits):
    """Parts of unequal size, empty parts, and more of them than one pass of the second launch reads."""
    spec = ops.spec("mhc_pre")
    monkeypatch.setattr(_mhc, "num_splits", lambda *_, **__: splits)
    check(spec, *contract.example(spec, nano, 5, torch.bfloat16, seed=splits))


@pytest.mark.parametrize("num_tokens", [3, 70])
@pytest.mark.parametrize("wrong", [lambda w: w[1:], lambda w: w[:, 1:], lambda w: w[..., ::2]])
@pytest.mark.parametrize("op", ["mhc_pre", "mhc_post_pre", "mhc_head"])
def test_workspace_is_checked(op, wrong, num_tokens, monkeypatch):
    original = _mhc.alloc_partials
    monkeypatch.setattr(_mhc, "alloc_partials", lambda *a, **k: wrong(original(*a, **k)))
    args, kwargs = contract.example(ops.spec(op), nano, num_tokens, torch.bfloat16)
    with pytest.raises(ValueError, match="mHC workspace must be contiguous, .* parts of .*, got"):
        ops.spec(op).cuda(*args, **kwargs)


@pytest.mark.parametrize("deterministic", [True, False])
def test_workspace_is_what_the_kernels_write(monkeypatch, deterministic):
    """Every value that the second launch reads was written by the first: a poisoned workspace does not show."""
    spec = ops.spec("mhc_pre")
    args, kwargs = contract.example(spec, nano, 9, torch.bfloat16, seed=4)
    kwargs["deterministic"] = deterministic
    original = _mhc.alloc_partials
    monkeypatch.setattr(_mhc, "alloc_partials", lambda *a, **k: original(*a, **k).fill_(float("nan")))
    check(spec, args, kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [flash, pro], ids=lambda s: s.name)
@pytest.mark.parametrize("name", ["mhc_pre", "mhc_post_pre", "mhc_head"])
def test_production_widths(name, shape):
    spec = ops.spec(name)
    args, kwargs = contract.example(spec, shape, 3, torch.bfloat16, seed=5)
    check(spec, args, {**kwargs, "deterministic": False})


def test_other_numbers_of_streams_are_refused():
    args, kwargs = contract.example(ops.spec("mhc_head"), tiny, 2, torch.float32)
    streams, fn = args[0][:, :2].contiguous(), args[1][:2, :128].contiguous()
    with pytest.raises(NotImplementedError, match="need 4 streams and hidden <= 8192, got 2 and 64"):
        ops.spec("mhc_head").cuda(streams, fn, args[2], args[3][:2], args[4], **kwargs)
