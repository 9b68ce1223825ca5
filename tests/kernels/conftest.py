"""Kernels under Triton's interpreter, in a process of its own: `TRITON_INTERPRET=1 pytest tests/kernels`."""

import os

import pytest


def pytest_collection_modifyitems(items):
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError("tests/kernels must run with TRITON_INTERPRET=1, in a process of its own")
