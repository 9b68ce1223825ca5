from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory) -> Path:
    """One artifact cache for the whole run: the C++ tool chain is probed and its headers compiled once."""
    return tmp_path_factory.mktemp("compile") / "cache"
