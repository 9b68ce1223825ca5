"""On a GPU: a step waits once, and sampling equals the CPU's; see ``gpu_steps``."""

import pytest
import torch

from . import gpu_steps

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("graphs, draft_tokens", [("off", 0), ("full", 0), ("full", 2)])
def test_a_step_waits_once(graphs, draft_tokens):
    found = gpu_steps.waits(graphs, draft_tokens)
    assert not any(found["samples"].values()), found


def test_the_mode_sees_other_waits():
    """What the test above would say of a step that reads a value back."""
    value = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="synchronizing"), gpu_steps.only_downloads_wait([0]):
        value.sum().item()


def test_samples_equal_the_cpus():
    found = gpu_steps.sampled_tokens()
    assert not any(found["samples"].values()), found
