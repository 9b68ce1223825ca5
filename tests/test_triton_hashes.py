"""A kernel has one place in Triton's disk cache, whichever kernels a process met before it."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import importlib, json, pkgutil, sys
import triton
from dsv4 import ops
from dsv4.ops import _triton_hashes

order, settled = json.loads(sys.argv[1])
kernels = {}
for module in pkgutil.iter_modules(ops.__path__):
    if module.name.endswith("_kernel") and "tilelang" not in module.name or module.name == "_device":
        for value in vars(importlib.import_module("dsv4.ops." + module.name)).values():
            if isinstance(value, triton.JITFunction):
                kernels[value.fn.__module__ + "." + value.fn.__name__] = value
names = sorted(kernels, reverse=order == "last first")
for name in names:
    if settled:
        _triton_hashes.settle(kernels[name])
    kernels[name].cache_key
constants = {n: [name for (name, _), _ in k.used_global_vals.items()] for n, k in kernels.items()}
print(json.dumps([{name: kernel.cache_key for name, kernel in kernels.items()}, constants]))
"""


def hashes(order: str, *, settled: bool) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Of a new process: the hash of every kernel, and the names of the constants that it reads."""
    command = [sys.executable, "-c", PROGRAM, json.dumps([order, settled])]
    return tuple(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


@pytest.fixture(scope="module")
def settled() -> tuple[dict[str, str], dict[str, list[str]]]:
    return hashes("first first", settled=True)


def test_hashes_do_not_depend_on_the_order(settled):
    found, _ = settled
    assert len(found) > 100 and hashes("last first", settled=True)[0] == found


def test_triton_alone_would_hash_by_the_order():
    """Or :mod:`dsv4.ops._triton_hashes` is not needed with this release any more."""
    first, last = (hashes(order, settled=False)[0] for order in ("first first", "last first"))
    assert {name for name in first if first[name] != last[name]} >= {
        "dsv4.ops._routing_kernel._route_topk", "dsv4.ops._routing_kernel._route_hash",
    }  # fmt: skip


def test_constants_of_a_kernel_have_names_of_their_own(settled):
    """Triton sorts equal names by where their modules lie in memory."""
    assert not {name: read for name, read in settled[1].items() if len(set(read)) != len(read)}
