"""Every private torch API that this package uses, and the differences between torch 2.11 and 2.14.

Versions, as read in their sources and run:

* 2.11, 2.12: ``standalone_compile`` takes ``gm, example_inputs, dynamic_shapes, options, aot``; 2.13 and later add
  ``donate_graph_module`` and ``fake_mode``. Only the common arguments are used here.
* All: a custom backend receives real tensors and SymInts; node metadata belongs to Dynamo's own fake mode, which must
  not be mixed with the one of the tracing context. Fakes are therefore made again, in the latter.
* All: the CPU code of an artifact is C++ source; the shared object lies in ``TORCHINDUCTOR_CACHE_DIR``. That folder is
  put inside the cache directory, so that loading compiles nothing.
"""

import functools
import hashlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._inductor
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx

INDUCTOR_OPTIONS: dict[str, Any] = {"deterministic": True, "triton.autotune_pointwise": False, "size_asserts": True}
"""Inductor settings of every piece: no run-time benchmarking; outputs of custom ops are checked against their fakes."""


class RecompileError(RuntimeError):
    """A call needed a new trace; the message names the guard that failed."""


class GraphBreakError(RuntimeError):
    """The function cannot be one graph: it leaves the graph, or reads a value back from a tensor."""


class CompilerMissingError(RuntimeError):
    """Inductor cannot compile because a program that it needs is absent."""


# --- marking and guarding -------------------------------------------------------------------------------------------


def mark_unbacked(tensor: torch.Tensor, dim: int, name: str | None) -> None:
    """Make ``dim`` an unbacked symbol; dims of one ``name`` share it (``shape_id``, checked by torch at run time)."""
    torch._dynamo.decorators.mark_unbacked(tensor, dim, shape_id=name)


@contextmanager
def tracing_allowed() -> Iterator[None]:
    """The first call: one graph or an error."""
    with torch._dynamo.config.patch(suppress_errors=False, error_on_recompile=False):
        try:
            yield
        except torch._dynamo.exc.Unsupported as error:
            raise GraphBreakError(str(error)) from error
        except torch._dynamo.exc.BackendCompilerFailed as error:  # Dynamo's wrapper hides the type of our own errors
            raise error.inner_exception from error


class recompile_forbidden:
    """Later calls: a failing guard raises :class:`RecompileError` before anything is traced."""

    def __enter__(self) -> None:
        self._before = torch._dynamo.config.error_on_recompile
        torch._dynamo.config.error_on_recompile = True

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        torch._dynamo.config.error_on_recompile = self._before
        if isinstance(error, torch._dynamo.exc.BackendCompilerFailed):
            raise error.inner_exception from error
        if isinstance(error, torch._dynamo.exc.RecompileError):
            raise RecompileError(str(error)) from error


def num_graph_breaks() -> int:
    """Graph breaks that Dynamo has counted in this process."""
    return sum(torch._dynamo.utils.counters["graph_break"].values())


# --- values ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recording:
    """Fake value of every node of a graph, and the nodes whose storage each node writes."""

    values: Mapping[fx.Node, Any]
    writes: Mapping[fx.Node, tuple[fx.Node, ...]]


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.writes: dict[fx.Node, tuple[fx.Node, ...]] = {}

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return _fake(torch._guards.TracingContext.get(), value)

    def run_node(self, n: fx.Node) -> Any:
        inputs = [i for i in n.all_input_nodes if isinstance(self.env.get(i), torch.Tensor)]
        before = [self.env[i]._version for i in inputs]
        value = super().run_node(n)
        written = set(schema_writes(n))
        written |= {i for i, v in zip(inputs, before, strict=True) if self.env[i]._version != v}
        self.writes[n] = tuple(i for i in inputs if i in written)
        return value


def schema_writes(node: fx.Node) -> Iterator[fx.Node]:
    """Arguments that an op's schema declares written: ``Library.impl`` ops do not bump version counters."""
    overload = getattr(node.target, "default", node.target)
    if not isinstance(overload, torch._ops.OpOverload):
        return
    for position, argument in enumerate(overload._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(item, fx.Node):
                yield item


def record(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Recording:
    """Run ``module`` over fakes of ``example_inputs`` in the fake mode of the tracing context."""
    context = torch._guards.TracingContext.get()
    mode = context.fake_mode
    recorder = _Recorder(module)
    fakes = [_fake(context, value) for value in example_inputs]
    with _scalars_allowed(mode), mode, enable_python_dispatcher():
        recorder.run(*fakes, enable_io_processing=False)
    _check_no_readback(module, recorder.env)
    return Recording(recorder.env, recorder.writes)


def _check_no_readback(module: fx.GraphModule, values: Mapping[fx.Node, Any]) -> None:
    """``fullgraph=True`` lets ``.item()`` and data-dependent sizes through as new symbols; here they are errors."""
    known = {s for n in module.graph.nodes if n.op == "placeholder" for s in symbols_of(values[n])}
    for node in module.graph.nodes:
        if node.op not in {"placeholder", "output"} and not known.issuperset(symbols_of(values[node])):
            where = (node.meta.get("stack_trace") or "").strip()
            raise GraphBreakError(f"a model must not read values back from tensors, got {node.target}\n{where}")


def _fake(context: Any, value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, torch._subclasses.FakeTensor):
        return value
    symbolic = context.tensor_to_context.get(value)
    source = None if symbolic is None else symbolic.tensor_source
    return context.fake_mode.from_tensor(value, symbolic_context=symbolic, source=source, trace=False)


def aten_nodes(module: fx.GraphModule, fakes: Sequence[Any]) -> fx.GraphModule:
    """``module`` traced down to overloads."""
    mode = torch._guards.detect_fake_mode(fakes)
    if mode is None:
        return make_fx(module, tracing_mode="real")(*fakes)
    with mode, _scalars_allowed(mode):  # the mode itself makes factories such as empty(rows) fake
        return make_fx(module, tracing_mode="real")(*fakes)


@contextmanager
def _scalars_allowed(mode: Any) -> Iterator[None]:
    """``x[i] = 7`` makes a real scalar tensor below Python, which a fake mode refuses by default."""
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        yield
    finally:
        mode.allow_non_fake_inputs = before


def storage_id(tensor: torch.Tensor) -> int:
    """Identity of the storage of a (fake) tensor, valid while the tensor lives."""
    return tensor.untyped_storage()._cdata


def symbols_of(value: Any) -> tuple[str, ...]:
    """Names of the size symbols in tensors' sizes, strides and offsets, or in SymInts, in order of appearance."""
    names: dict[str, None] = {}
    if isinstance(value, torch.Tensor):
        value = (*value.shape, *value.stride(), value.storage_offset())
    for part in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(part, torch.Tensor):
            names.update(dict.fromkeys(symbols_of(part)))
        if isinstance(part, (torch.SymInt, torch.SymBool, torch.SymFloat)):
            names.update(dict.fromkeys(sorted(str(s) for s in part.node.expr.free_symbols)))
    return tuple(names)


def is_symbol(value: Any) -> bool:
    """Whether ``value`` is a SymInt that consists of one symbol."""
    return isinstance(value, torch.SymInt) and value.node.expr.is_Symbol


class SymbolNames:
    """Renames size symbols by first appearance: ``u7`` and ``u3`` in equal roles get equal names."""

    def __init__(self) -> None:
        self._names: dict[Any, Any] = {}
        self._env: Any = None

    def text(self, value: Any) -> str:
        """``value`` (int, SymInt or another scalar) with its symbols renamed."""
        if not isinstance(value, (torch.SymInt, torch.SymBool, torch.SymFloat)):
            return repr(value)
        self._env = value.node.shape_env
        return str(self._renamed(value.node.expr))

    def _renamed(self, expr: Any) -> Any:
        for symbol in sorted(expr.free_symbols, key=str):
            if symbol not in self._names:
                self._names[symbol] = type(symbol)(f"s{len(self._names)}", **symbol.assumptions0)
        return expr.xreplace(self._names)

    def facts(self) -> tuple[str, ...]:
        """What the compiler may assume of the symbols seen: kind, range, and checks that involve no other symbol."""
        facts = []
        for symbol, name in self._names.items():
            bounds = self._env.var_to_range.get(symbol)
            kind = "unbacked" if self._env.is_unbacked_symint(symbol) else "backed"
            facts.append(f"{name} {kind} {bounds.lower if bounds else None} {bounds.upper if bounds else None}")
        pending = self._env.deferred_runtime_asserts.values() if self._names else ()
        exprs = {c.expr for checks in pending for c in checks if c.expr.free_symbols <= set(self._names)}
        return (*facts, *sorted(str(e.xreplace(self._names)) for e in exprs))


# --- compiling ------------------------------------------------------------------------------------------------------


def check_compiler() -> None:
    """Raise :class:`CompilerMissingError` unless the C++ compiler that Inductor would call answers."""
    search = torch._inductor.config.cpp.cxx
    candidates = [c for c in (search if isinstance(search, (list, tuple)) else (search,)) if c is not None]
    for candidate in candidates:
        try:
            subprocess.run([candidate, "--version"], check=True, capture_output=True)
            return
        except (OSError, subprocess.SubprocessError):
            continue
    raise CompilerMissingError(
        f"backend 'inductor' on the CPU must find a C++ compiler, got none among {candidates}: install one or set CXX"
    )


def compile_piece(module: fx.GraphModule, fakes: Sequence[Any]) -> Any:
    """Compile one piece for the symbolic shapes of the tracing context; the result is callable and has ``save``."""
    return torch._inductor.standalone_compile(
        module, list(fakes), dynamic_shapes="from_tracing_context", options={"config_patches": dict(INDUCTOR_OPTIONS)}
    )


def load_piece(path: Path) -> Callable[..., Any]:
    """Load what ``save`` wrote; raises whatever a damaged or foreign file provokes."""
    return torch._inductor.CompiledArtifact.load(path=str(path), format="binary")


def save_piece(artifact: Any, path: Path) -> None:
    artifact.save(path=str(path), format="binary")


_jit_events: dict[str, tuple[int, int, float]] = {}
_jit_lock = threading.Lock()


def jit_events() -> dict[str, tuple[int, int, float]]:
    """Compilations, loads from disk and seconds of Inductor in this process, by hash of the generated code.

    Counting begins with the first call, which wraps two methods: the one that generates and compiles a graph's code,
    and the one that makes a cached graph callable. Both know the hash under which the code is kept, so a graph that is
    compiled once and loaded later has one key. Every use of Inductor passes them, ``torch.compile`` included.
    """
    import torch._inductor.graph  # takes seconds, which a program that never compiles must not pay
    import torch._inductor.output_code

    _count_calls(torch._inductor.graph.GraphLowering, "compile_to_module", (1, 0))
    _count_calls(torch._inductor.output_code.CompiledFxGraph, "after_deserialization", (0, 1))
    with _jit_lock:
        return dict(_jit_events)


def _count_calls(owner: type, name: str, counts: tuple[int, int]) -> None:
    """Let calls of the method be counted; nothing happens the second time."""
    with _jit_lock:
        method = vars(owner).get(name)
        if method is None:
            raise RuntimeError(
                f"Inductor must have {owner.__name__}.{name} to be counted, got torch {torch.__version__}"
            )
        if hasattr(method, "counted"):
            return

        @functools.wraps(method)
        def counted(graph: Any, *args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = method(graph, *args, **kwargs)
            seconds = time.perf_counter() - started
            with _jit_lock:
                compilations, loads, before = _jit_events.get(graph.cache_key, (0, 0, 0.0))
                _jit_events[graph.cache_key] = (compilations + counts[0], loads + counts[1], before + seconds)
            return result

        counted.counted = True
        setattr(owner, name, counted)


@contextmanager
def inductor_cache(directory: Path | None) -> Iterator[None]:
    """Let Inductor keep its generated code in ``directory``."""
    if directory is None:
        yield
        return
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory)
    try:
        yield
    finally:
        if before is None:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        else:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


def environment_key() -> tuple[str, ...]:
    """What an artifact depends on beside its graph: torch, its Inductor settings, and the machine's instructions."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no gpu"
    settings = {**torch._inductor.config.save_config_portable(), **INDUCTOR_OPTIONS}  # the user's, then ours
    plain = {k: v for k, v in settings.items() if isinstance(v, (bool, int, float, str, tuple, list, type(None)))}
    digest = hashlib.sha256(repr(sorted(plain.items())).encode()).hexdigest()[:16]
    return (torch.__version__, torch.backends.cpu.get_cpu_capability(), gpu, digest)
