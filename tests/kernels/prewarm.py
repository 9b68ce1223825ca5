"""Whether an op's prewarm cases launch what they name."""

import importlib
import itertools

import torch

from dsv4 import ops
from dsv4.ops import _triton
from dsv4.ops.shapes import Shape

from ..ops import contract

COUNTS = (1, 2, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 300)
"""Rows of a step on both sides of every choice of a tile."""


def launched(spec: ops.OpSpec, args: tuple, kwargs: dict) -> set:
    """Keys of the kernels that one call launches; the kernels do not run."""
    with _triton.recording() as calls:
        spec.cuda(*args, **kwargs)
    return {call.key for call in calls}


def enumerated(spec: ops.OpSpec, shape: Shape, max_tokens: int) -> set:
    """Keys of the op's cases, each of which must be among the launches of its own arguments."""
    cases = importlib.import_module(f"dsv4.ops.{spec.name}").cuda_cases(shape, torch.device("cpu"), max_tokens)
    for case in cases:
        assert case.op == spec.name and case.key in launched(spec, *case.arguments())
    assert len({case.key for case in cases}) == len(cases)
    return {case.key for case in cases}


def check_every_step(spec: ops.OpSpec, shape: Shape) -> None:
    """The cases of 300 rows hold whatever an example of up to as many launches, and more than those of 16 rows."""
    keys = enumerated(spec, shape, 300)
    for count, deterministic in itertools.product(COUNTS, (False, True)):
        args, keywords = contract.example(spec, shape, count, torch.bfloat16)
        assert launched(spec, args, keywords | {"deterministic": deterministic}) <= keys
    assert enumerated(spec, shape, 16) < keys
