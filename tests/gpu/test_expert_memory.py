"""FP4 experts are all that a GPU holds of them: no call makes an 8- or 16-bit copy, nor does loading."""

from dataclasses import replace

import pytest
import torch

from dsv4 import ops
from dsv4.ops.shapes import flash

from ..tiny_checkpoint import NANO
from . import expert_memory as memory

pytestmark = pytest.mark.gpu
SHAPE = replace(flash, num_experts=64)


@pytest.fixture(scope="module")
def experts():
    return memory.random_fp4(SHAPE, memory.CUDA)


@pytest.mark.parametrize("num_tokens", [1, 64, 4096])
def test_a_call_copies_no_weights(experts, num_tokens):
    """The rise is the workspace, counted to the allocator's rounding, and far below any copy of what the call reads."""
    rows = memory.random_rows(SHAPE, num_tokens, memory.CUDA)
    rise = memory.peak_of(lambda: ops.expert_ffn(*rows, *experts, limit=10.0, deterministic=False))
    assert 0 < rise <= memory.workspace_bytes(SHAPE, num_tokens)
    assert rise < memory.bytes_of_an_8_bit_copy(SHAPE) / 3
    if num_tokens == 1:  # not even of the experts of one row
        assert rise < memory.bytes_of_an_8_bit_copy(replace(SHAPE, num_experts=1)) / 20


@pytest.mark.parametrize("expert_weights", ["fp4", "fp8"])
def test_loading_holds_one_matrix_beside_the_model(expert_weights):
    """The largest matrix that is decoded while loading is ``wo_a``; re-encoding an expert takes less than that."""
    stays, extra, experts = memory.load_peak(NANO, expert_weights)
    values = 8 * 16 * 3 * 256 * 128  # layers with the MTP block, experts, matrices
    assert experts == values // (2 if expert_weights == "fp4" else 1)
    assert stays > experts and extra <= 6 * 4 * 256 * 1024  # a few fp32 copies of wo_a: half of an 8-bit copy


def test_a_copy_would_be_noticed(experts):
    """The measure itself: a call that decodes the weights of all experts to 8 bits breaks the bound."""
    rows = memory.random_rows(SHAPE, 64, memory.CUDA)

    def call():
        copies = [weight.repeat_interleave(2, dim=-1) for weight in (experts[0], experts[2])]
        ops.expert_ffn(*rows, *experts, limit=10.0, deterministic=False)
        return copies

    assert memory.peak_of(call) > memory.bytes_of_an_8_bit_copy(SHAPE)
    torch.cuda.empty_cache()
