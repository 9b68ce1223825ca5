import pytest

from . import toy_step


@pytest.fixture(scope="module", autouse=True)
def fresh_traces():
    """A test of another module may have reset Dynamo's caches in this process, which invalidates every trace."""
    toy_step._traced.cache_clear()
