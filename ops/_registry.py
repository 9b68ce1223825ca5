"""One place where every op of this library is registered.

An op file calls :func:`register` once. That defines the schema in the ``dsv4::`` namespace, installs the reference
as the CPU kernel and the fake for every backend, and records the op's :class:`OpSpec`, from which the contract
tests, the prewarm and ``dsv4 inspect`` read what exists. ``Library.define / impl`` is used in place of
``torch.library.custom_op`` because its eager overhead is four to ten times smaller.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from . import _runtime
from .shapes import Shape

NAMESPACE = "dsv4"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")  # unregisters on collection: must live as long as the module

Role = Literal["model", "part", "parallel", "tool"]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Example(Protocol):
    """Builds one valid random call of an op: positional and keyword arguments."""

    def __call__(
        self, shape: Shape, *, num_tokens: int, device: torch.device, dtype: torch.dtype, seed: int
    ) -> Arguments: ...


@dataclass(frozen=True)
class PrewarmCase:
    """One kernel specialisation a later step can need.

    ``key`` is what the dispatcher selects and what the warm-key set stores. ``arguments`` builds a call that selects
    it; running that call compiles whatever the specialisation needs.
    """

    op: str
    key: tuple[str | int, ...]
    arguments: Callable[[], Arguments]


@dataclass(frozen=True)
class OpSpec:
    """Everything the library knows about one registered op.

    Attributes:
        name: op name without the namespace.
        schema: the schema string, which is public ABI.
        role: ``model`` ops appear in the single-rank model trace, ``parallel`` ops only with several ranks; ``part``
            ops are what a ``model`` op runs in parts, by themselves they serve inspection; ``tool`` ops serve
            checkpoint writing.
        boundary: whether piecewise compilation cuts the graph here by default.
        reference: the specification in plain torch and the CPU kernel.
        fake: shape and dtype propagation.
        example: builds random valid arguments.
        prewarm_cases: ``(shape, device, max_tokens) -> Sequence[PrewarmCase]``.
        cuda: dispatch to CUDA kernels, or ``None`` while the op has none.
        cuda_cases: everything ``cuda`` can pick; ``None`` exactly when ``cuda`` is.
    """

    name: str
    schema: str
    role: Role
    boundary: bool
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    example: Example
    prewarm_cases: "Cases"
    cuda: Callable[..., Any] | None
    cuda_cases: "Cases | None"

    @property
    def qualname(self) -> str:
        return f"{NAMESPACE}::{self.name}"

    @property
    def overload(self) -> torch._ops.OpOverload:
        return getattr(getattr(torch.ops, NAMESPACE), self.name).default


Cases = Callable[[Shape, torch.device, int], Sequence[PrewarmCase]]
_specs: dict[str, OpSpec] = {}


def register(
    name: str,
    schema: str,
    *,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    example: Example,
    cuda: Callable[..., Any] | None = None,
    cuda_cases: Cases | None = None,
    role: Role = "model",
    boundary: bool = False,
) -> torch._ops.OpOverload:
    """Define ``dsv4::<name><schema>`` and return its overload.

    Args:
        name: op name without the namespace.
        schema: arguments and returns, e.g. ``(Tensor x, *, float eps) -> Tensor``.
        reference: CPU kernel. Its outputs never alias its inputs.
        fake: meta kernel; allocates through the same function as the reference.
        example: random valid arguments, shared by the contract tests, the prewarm and the benchmark.
        cuda: CUDA dispatch: picks the specialisation and launches it. It imports its kernel module when first called,
            so that importing this package needs no kernel library.
        cuda_cases: enumerates everything ``cuda`` can pick for a shape, dtype by dtype; required with ``cuda``.
        role: see :class:`OpSpec`.
        boundary: whether piecewise compilation cuts here by default.
    """
    if name in _specs:
        raise RuntimeError(f"op {NAMESPACE}::{name} must be registered once, got a second registration")
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    if (cuda is None) != (cuda_cases is None):
        raise RuntimeError(f"op {NAMESPACE}::{name} must give cuda and cuda_cases together")
    _library.impl(name, reference, "CPU")
    _library.impl(name, _cuda_entry(name, reference, cuda), "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    spec = OpSpec(
        name=name,
        schema=schema,
        role=role,
        boundary=boundary,
        reference=reference,
        fake=fake,
        example=example,
        prewarm_cases=_cases(name, example, cuda_cases),
        cuda=cuda,
        cuda_cases=cuda_cases,
    )
    _specs[name] = spec
    return spec.overload


def _cuda_entry(name: str, reference: Callable[..., Any], cuda: Callable[..., Any] | None) -> Callable[..., Any]:
    def entry(*args: Any, **kwargs: Any) -> Any:
        if _runtime.references_in_use():
            return reference(*args, **kwargs)
        if _runtime.first_uses:  # a model was built and not prewarmed
            _runtime.run_first_uses(name)
        if cuda is None:
            raise _no_kernel(name, "cuda")
        device = args[0].get_device()
        if device == _runtime.current_device():
            return cuda(*args, **kwargs)
        with torch.cuda.device(device):  # libraries launch on the current device, whatever their tensors are on
            return cuda(*args, **kwargs)

    return entry


def _no_kernel(name: str, device: object) -> NotImplementedError:
    return NotImplementedError(f"{NAMESPACE}::{name} has no kernel for device {device}: run on the CPU")


def _cases(name: str, example: Example, cuda_cases: Cases | None) -> Cases:
    def cases(shape: Shape, device: torch.device, max_tokens: int) -> Sequence[PrewarmCase]:
        device = torch.device(device)
        if device.type == "cuda" and cuda_cases is not None:
            return cuda_cases(shape, device, max_tokens)
        if device.type != "cpu":
            raise _no_kernel(name, device)

        def arguments() -> Arguments:
            return example(shape, num_tokens=min(2, max_tokens), device=device, dtype=torch.float32, seed=0)

        return (PrewarmCase(op=name, key=(name, "reference"), arguments=arguments),)

    return cases


def specs() -> dict[str, OpSpec]:
    """Every registered op by name, in registration order."""
    return dict(_specs)


def spec(name: str) -> OpSpec:
    """The op ``name``; raises ``KeyError`` naming the known ops."""
    if name not in _specs:
        raise KeyError(f"op must be one of {sorted(_specs)}, got {name!r}")
    return _specs[name]


def boundary_ops() -> tuple[str, ...]:
    """Qualified names of the ops at which piecewise compilation cuts by default."""
    return tuple(s.qualname for s in _specs.values() if s.boundary)
