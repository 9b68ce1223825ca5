"""The model runs on its ops: each one is called by a step, and a step fails when any of its kernels does."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4 import ops
from dsv4.compile import compile_model
from dsv4.execution import Execution
from dsv4.inspection import meta_runner
from dsv4.runner import Runner

from .tiny_model import (
    Outputs,
    TinyCheckpoint,
    different_rows,
    place,
    random_tokens,
    run_parts,
    runner_of,
    tiny_config,
)

NUMERICS = ("exact", "official")
MODEL_OPS = tuple(name for name, spec in ops.specs().items() if spec.role == "model")
QUANTISED_ONLY = {"quant_fp8", "fp8_linear", "fp8_linear_decoded"}
GLUE = {
    "aten::add", "aten::clone", "aten::empty", "aten::empty_like", "aten::index_select", "aten::select",
    "aten::unsqueeze", "aten::view", "aten::_to_copy",
}  # fmt: skip


class RemovedError(Exception):
    """A kernel that was taken away was called."""


class OpLog(TorchDispatchMode):
    """Names of the ops that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name().split(".")[0])
        return func(*args, **(kwargs or {}))


@contextmanager
def removed(name: str) -> Iterator[None]:
    """Replace the CPU kernel of ``dsv4::name`` by one that raises; the former kernel comes back at the end."""
    library = torch.library.Library("dsv4", "IMPL")

    def raises(*args, **kwargs):
        raise RemovedError(name)

    library.impl(name, raises, "CPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


@pytest.fixture(scope="module")
def runners(tmp_path_factory) -> dict[str, Runner]:
    """One tiny runner per numerics: ratios 0, 4, 128, hash-routed and scored layers, MTP block."""
    checkpoint = TinyCheckpoint.write(tiny_config(), tmp_path_factory.mktemp("tiny") / "checkpoint")
    return {n: runner_of(checkpoint.model(n, deterministic=False)) for n in NUMERICS}


def step(runner: Runner) -> Outputs:
    return run_parts(runner, [(place(0), random_tokens(10, 61, seed=1))])[0]


def traced_ops(numerics: str) -> set[str]:
    """Ops in the traces of the backbone's and of the MTP block's step."""
    runner = meta_runner(tiny_config(), Execution.of(numerics))
    inputs = runner.inputs([place(0).segment([1] * 7, (6,))])
    streams = torch.empty(7, 4, 96, dtype=runner.model.execution.dtype, device="meta")
    found: set[str] = set()
    for function, args in ((runner.model.forward_streams, ()), (runner.model.forward_mtp, (streams,))):
        compiled = compile_model(function, ops.boundary_ops(), backend="eager")
        compiled(inputs, runner.caches, *args)
        found |= set(compiled.report.op_calls)
    return found


@pytest.mark.parametrize("numerics", NUMERICS)
def test_every_model_op_is_traced_and_called(runners, numerics):
    """Both numerics call every op of the model except the two that only quantised numerics need."""
    want = {f"dsv4::{name}" for name in MODEL_OPS}
    if numerics == "exact":
        want -= {f"dsv4::{name}" for name in QUANTISED_ONLY}
    with OpLog() as log:
        step(runners[numerics])
    called = {name for name in log.names if name.startswith("dsv4::")}
    assert called == want
    assert traced_ops(numerics) == want


@pytest.mark.parametrize("numerics", NUMERICS)
def test_between_ops_there_is_only_glue(runners, numerics):
    """No product, norm, activation or reduction of the model happens outside an op (ops' insides are not logged)."""
    runner = runners[numerics]
    inputs = runner.inputs([place(0).segment(random_tokens(9, 61, seed=2), (8,))])
    with torch.no_grad(), OpLog() as log:
        _, streams = runner.model.forward_streams(inputs, runner.caches)
        runner.model.forward_mtp(inputs, runner.caches, streams)
    rest = {name for name in log.names if not name.startswith("dsv4::")}
    assert rest <= GLUE, sorted(rest - GLUE)


@pytest.mark.filterwarnings("ignore:.*Overriding a previously registered kernel:UserWarning")
@pytest.mark.filterwarnings("ignore:Warning only once for all operators:UserWarning")
@pytest.mark.parametrize("name", MODEL_OPS)
def test_no_step_without_the_op(runners, name):
    for numerics in NUMERICS:
        runner = runners[numerics]
        want = step(runner)
        with removed(name):
            if numerics == "exact" and name in QUANTISED_ONLY:
                assert different_rows(step(runner), want) == {}
            else:
                with pytest.raises(RemovedError, match=f"^{name}$"):
                    step(runner)
        assert different_rows(step(runner), want) == {}  # the kernel is back
