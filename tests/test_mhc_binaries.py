"""How many binaries the mHC kernels need: the number of tokens must not add any, and prewarm must list them all."""

from importlib import import_module

import pytest
import torch

from dsv4 import ops
from dsv4.ops import _triton
from dsv4.ops.shapes import flash, nano, tiny

from .ops import contract

NAMES = ("mhc_pre", "mhc_post", "mhc_post_pre", "mhc_head", "embed_streams")
LAST_SPLIT_CHANGE = 4225  # from here on the products of a row are not divided


def launches(name: str, num_tokens: int, dtype: torch.dtype = torch.bfloat16, **changes) -> list[_triton.Launch]:
    spec = ops.spec(name)
    args, kwargs = contract.example(spec, tiny if num_tokens > 200 else nano, num_tokens, dtype)
    with _triton.recording() as calls:
        spec.cuda(*args, **{**kwargs, **changes})
    return calls


def binary(call: _triton.Launch) -> tuple:
    """What Triton compiles: constants, and types of the other arguments; not their values."""
    types = [(a.dtype, a.data_ptr() % 16) if isinstance(a, torch.Tensor) else type(a) for a in call.args]
    return call.kernel.fn.__name__, *types, *sorted(call.meta.items())


@pytest.mark.parametrize("name", NAMES)
def test_tokens_select_nothing(name):
    """One set of binaries for all rows; mhc_pre and mhc_post_pre have one more for few rows of either."""
    changes = {} if name in ("mhc_post", "embed_streams") else {"deterministic": False}
    for sizes in ((1, 2, 17, 63, 64, 65, 129), (257, 1025, LAST_SPLIT_CHANGE)):
        calls = [c for t in sizes for c in launches(name, t)]
        calls += [c for t in sizes if t > 16 for c in launches(name, t, **changes)]
        assert len({binary(c) for c in calls}) == len({c.key for c in calls}) == len(launches(name, sizes[0]))
    few = [c for t in (1, 2, 3, 16) for c in launches(name, t, **changes)]
    assert len({binary(c) for c in few}) == len({c.key for c in few}) == len(launches(name, 1, **changes))


def test_run_time_values_are_not_specialised_on():
    few = [c for name in ("mhc_pre", "mhc_post_pre") for c in launches(name, 3, deterministic=False)]
    for call in few + [c for name in NAMES for c in launches(name, 3)]:
        values = dict(zip(call.kernel.arg_names, call.args, strict=False))
        scalars = {name for name, value in values.items() if not isinstance(value, torch.Tensor)}
        assert scalars <= set(call.kernel.do_not_specialize), f"{call.key} specialises on {scalars}"


@pytest.mark.parametrize("shape", [tiny, nano, flash], ids=lambda s: s.name)
def test_prewarm_lists_what_runs(shape):
    """At most eight binaries per hidden size and dtype, and each under the key that its launch asks for."""
    keys = set()
    for name in NAMES[:4]:
        spec = ops.spec(name)
        cases = spec.prewarm_cases(shape, torch.device("cuda"), 8192)
        args, kwargs = contract.example(spec, shape, 2, torch.bfloat16)
        with _triton.recording() as calls:
            spec.cuda(*args, **kwargs)
            if "deterministic" in kwargs:
                spec.cuda(*args, **{**kwargs, "deterministic": False})
        assert {case.key for case in cases} == {call.key for call in calls}
        keys |= {case.key for case in cases}
    assert len(keys) == (8 if shape.hidden > 64 else 5)


@pytest.mark.parametrize("name", ["mhc_pre", "mhc_post_pre"])
def test_a_case_reaches_its_key(name):
    for case in import_module(f"dsv4.ops.{name}").cuda_cases(nano, torch.device("cpu"), 64):
        args, kwargs = case.arguments()
        with _triton.recording() as calls:
            ops.spec(name).cuda(*args, **kwargs)
        assert case.key in {call.key for call in calls}


def test_prewarm_of_the_embedding():
    spec = ops.spec("embed_streams")
    (case,) = spec.prewarm_cases(tiny, torch.device("cuda"), 8192)
    args, kwargs = contract.example(spec, tiny, 2, torch.bfloat16)
    with _triton.recording() as calls:
        spec.cuda(*args, **kwargs)
    assert [case.key] == [call.key for call in calls]
