"""Who may import whom, where private torch APIs and the environment may be used, and how long a file may be.

The rules are checked on the syntax tree, so that an import inside a function counts like one at the top; each rule is
also run on a source that breaks it.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"ops": "dsv4.ops", "compile": "dsv4.compile", "graphs": "dsv4.graphs", "dsv4": "dsv4"}
THIRD_PARTY = {
    "ops": {"torch", "triton", "tilelang", "deep_gemm", "deep_ep"},
    "compile": {"torch", "filelock"},
    "graphs": {"torch", "filelock"},
    "dsv4": {"torch", "numpy", "safetensors", "tokenizers", "rich", "typer"},
}
OURS = {"ops": {"ops"}, "compile": {"compile"}, "graphs": {"graphs"}, "dsv4": {"dsv4", "ops"}}
# The stages of start-up, the device that they run on, what describes a trace, and uploads, which lay tensors out as a
# graph's static inputs lie, also import compile and graphs.
_STAGES = ("start_up", "prewarming", "compile_stage", "capture_stage", "hardware", "inspection")
MAY_COMPILE = {f"dsv4/{name}.py" for name in (*_STAGES, "transfer")}
PRIVATE_HOME = "compile/inductor.py"
# Private names that have been stable since 2.0 and have no public spelling: the class of an op for type annotations
# and isinstance, and the registration of dataclasses that a trace takes apart.
PRIVATE_ELSEWHERE = {
    "torch._ops": {"ops/_registry.py", "compile/split.py", "compile/dedupe.py"},
    "torch.utils._pytree": {"dsv4/inputs.py", "dsv4/caches.py"},
}
PRIVATE_PUBLIC_NAMES = ("torch.fx.experimental",)  # no underscore, but without any promise of stability
ENVIRONMENT_HOMES = {"dsv4/config.py", PRIVATE_HOME}
MAX_LINES = 400

MODULES = sorted(path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
PYTHON_FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in (*FOLDERS, "tests", "tools", "bench")
    for path in (ROOT / folder).rglob("*.py")
)


def imported(tree: ast.AST, name: str) -> Iterator[str]:
    """Full names that the module ``name`` (a path from the root) imports: ``from a.b import c`` gives ``a.b.c``."""
    folder, *inner = Path(name).parent.parts
    package = [*FOLDERS[folder].split("."), *inner]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module or "").split(".")] if node.module else base
            yield from (".".join([*base, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module", "__import__", "find_spec",
        ):  # fmt: skip
            yield from (a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str))


def folder_of(module: str) -> str:
    """The folder of a ``dsv4`` module, ``dsv4`` for what lies directly in it."""
    part = f"{module}.".split(".")[1]
    return part if part in FOLDERS else "dsv4"


def forbidden_imports(tree: ast.AST, name: str) -> list[str]:
    folder = name.split("/")[0]
    ours = OURS[folder] | ({"compile", "graphs"} if name in MAY_COMPILE else set())
    found = []
    for module in imported(tree, name):
        root = module.split(".")[0]
        own = root == "dsv4" and folder_of(module) in ours
        if not own and root not in sys.stdlib_module_names and root not in THIRD_PARTY[folder]:
            found.append(module)
    return found


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of an attribute chain; empty for anything else."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def is_under(name: str, prefix: str) -> bool:
    return f"{name}.".startswith(f"{prefix}.")


def private_torch(tree: ast.AST, name: str) -> list[str]:
    names = {*imported(tree, name), *map(dotted, ast.walk(tree))}
    names |= {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    found = []
    for used in sorted(n for n in names if is_under(n, "torch") and " " not in n):
        if is_under(used, "torch.ops"):  # operators, whose names may begin with an underscore
            continue
        public = not any(part.startswith("_") and not part.startswith("__") for part in used.split("."))
        public = public and not any(is_under(used, prefix) for prefix in PRIVATE_PUBLIC_NAMES)
        allowed = any(is_under(used, prefix) and name in homes for prefix, homes in PRIVATE_ELSEWHERE.items())
        if not public and not allowed and name != PRIVATE_HOME:
            found.append(used)
    return found


def environment(tree: ast.AST, name: str) -> list[str]:
    words = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {module.rpartition(".")[2] for module in imported(tree, name) if is_under(module, "os")}
    return [] if name in ENVIRONMENT_HOMES else sorted(used & words)


RULES = (forbidden_imports, private_torch, environment)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("name", MODULES)
def test_modules_keep(name, rule):
    assert rule(ast.parse((ROOT / name).read_text()), name) == []


BROKEN = [
    (forbidden_imports, "ops/linear.py", "import numpy", ["numpy"]),
    (forbidden_imports, "ops/linear.py", "from ..config import ModelConfig", ["dsv4.config.ModelConfig"]),
    (forbidden_imports, "ops/linear.py", "from .. import compile", ["dsv4.compile"]),
    (forbidden_imports, "ops/linear.py", "import ops.shapes", ["ops.shapes"]),
    (forbidden_imports, "ops/linear.py", "def f():\n    from dsv4.model import M", ["dsv4.model.M"]),
    (forbidden_imports, "ops/linear.py", "importlib.import_module('transformers')", ["transformers"]),
    (forbidden_imports, "compile/split.py", "from ..ops import spec", ["dsv4.ops.spec"]),
    (forbidden_imports, "compile/split.py", "import rich", ["rich"]),
    (forbidden_imports, "graphs/capture.py", "from dsv4.compile import Piece", ["dsv4.compile.Piece"]),
    (forbidden_imports, "dsv4/model.py", "from .compile import compile_model", ["dsv4.compile.compile_model"]),
    (forbidden_imports, "dsv4/model.py", "from . import graphs", ["dsv4.graphs"]),
    (forbidden_imports, "dsv4/model.py", "import transformers", ["transformers"]),
    (forbidden_imports, "dsv4/start_up.py", "from .compile import P; from . import ops, config; import tests",
     ["tests"]),
    (private_torch, "dsv4/model.py", "import torch._dynamo", ["torch._dynamo"]),
    (private_torch, "dsv4/model.py", "from torch import _inductor", ["torch._inductor"]),
    (private_torch, "dsv4/model.py", "from torch._guards import detect_fake_mode", ["torch._guards.detect_fake_mode"]),
    (private_torch, "compile/trace.py", "from torch.fx.experimental import x", ["torch.fx.experimental.x"]),
    (private_torch, "compile/trace.py", "importlib.import_module('torch._functorch')", ["torch._functorch"]),
    (private_torch, "dsv4/model.py", "x: torch._ops.OpOverload", ["torch._ops", "torch._ops.OpOverload"]),
    (private_torch, "ops/linear.py", "torch.utils._pytree.tree_map(f, x)",
     ["torch.utils._pytree", "torch.utils._pytree.tree_map"]),
    (environment, "ops/linear.py", "os.environ['A']", ["environ"]),
    (environment, "dsv4/engine.py", "from os import environ as e, path", ["environ"]),
    (environment, "compile/cache.py", "os.getenv('A', '')", ["getenv"]),
]  # fmt: skip


@pytest.mark.parametrize("rule, name, source, found", BROKEN, ids=[source for _, _, source, _ in BROKEN])
def test_rules_find(rule, name, source, found):
    assert rule(ast.parse(source), name) == found


ALLOWED = [
    ("ops/linear.py", "import torch.nn.functional as F, triton; from ._rows import rows; from dsv4.ops import spec"),
    ("compile/inductor.py", "import os, torch._inductor; from torch.fx.experimental import x; os.environ['A'] = '1'"),
    ("dsv4/inspection.py", "from .compile import trace; from . import ops; from .config import ModelConfig"),
    ("dsv4/caches.py", "torch.utils._pytree.register_dataclass(C); from torch import nn; torch.__version__"),
]


@pytest.mark.parametrize("name, source", ALLOWED, ids=[name for name, _ in ALLOWED])
def test_rules_allow(name, source):
    assert [rule(ast.parse(source), name) for rule in RULES] == [[], [], []]


def test_every_exception_is_used():
    """An exception that no file needs any more must leave the tables above."""
    used = {(prefix, name) for prefix, names in PRIVATE_ELSEWHERE.items() for name in names}
    for prefix, name in used:
        tree = ast.parse((ROOT / name).read_text())
        assert any(is_under(n, prefix) for n in (*imported(tree, name), *map(dotted, ast.walk(tree)))), (prefix, name)


@pytest.mark.parametrize("name", PYTHON_FILES)
def test_length(name):
    assert len((ROOT / name).read_text().splitlines()) <= MAX_LINES


def test_the_walk_sees_the_tree():
    assert {"ops/_registry.py", "compile/inductor.py", "graphs/__init__.py", "dsv4/cli.py"} <= set(MODULES)
    assert "tests/test_imports.py" in PYTHON_FILES
