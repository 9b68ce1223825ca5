"""The examples of the documents run as they stand."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def examples(name: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", ["docs/embedding.md", pytest.param("README.md", marks=pytest.mark.slow)])
def test_examples_run(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    found = examples(name)
    assert found
    for source in found:
        exec(compile(source, name, "exec"), {"__name__": "example"})
