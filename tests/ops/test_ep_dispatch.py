import numpy as np
import pytest
import torch

from dsv4 import ops

from . import moe_numpy as moe

NUM_EXPERTS, TOPK, HIDDEN = 6, 3, 40
POISON = 12345


def make_sent(num_tokens: int, seed: int, *, scale_columns: int = 2):
    """x, x_scale, ids (some rows without an expert, some ids beyond the last one), weights."""
    rng = np.random.default_rng(seed)
    ids, weights = moe.make_routing(rng, num_tokens, TOPK, NUM_EXPERTS)
    ids = torch.where((ids == -1) & torch.tensor(rng.random(ids.shape) < 0.5), ids, ids.roll(1, 0))
    ids[ids == 0] = NUM_EXPERTS  # nobody's expert
    x = torch.tensor(rng.normal(size=(num_tokens, HIDDEN)), dtype=torch.float32)
    x_scale = torch.tensor(rng.random((num_tokens, scale_columns)), dtype=torch.float32)
    return x, x_scale if scale_columns else torch.empty(0), ids, weights


def make_buffers(sent, capacity: int):
    """Poisoned receive buffers for ``sent``."""
    x, x_scale, ids, weights = sent
    columns = (t.shape[-1] for t in (x, x_scale, ids, weights))
    dtypes = (x.dtype, torch.float32, torch.int32, torch.float32)
    buffers = [torch.empty(capacity, c, dtype=d) for c, d in zip(columns, dtypes, strict=True)]
    for buffer in buffers:
        buffer.view(torch.uint8).fill_(0x5B)
    return (*buffers, torch.full((capacity,), POISON), torch.full((1,), POISON, dtype=torch.int32))


@pytest.mark.parametrize("scale_columns", [0, 2])
@pytest.mark.parametrize("num_tokens", [0, 1, 13])
def test_rows_with_an_expert_arrive_in_order(num_tokens, scale_columns):
    sent = make_sent(num_tokens, seed=num_tokens, scale_columns=scale_columns)
    buffers = make_buffers(sent, num_tokens + 2)
    before = [b.clone() for b in buffers]
    ops.ep_dispatch(*sent, *buffers, num_experts=NUM_EXPERTS, group="")
    x, x_scale, ids, weights = sent
    slot = 0
    for t in range(num_tokens):
        local = [e if 0 <= e < NUM_EXPERTS else -1 for e in ids[t].tolist()]
        if max(local) < 0:
            continue
        assert torch.equal(buffers[0][slot], x[t])
        assert not scale_columns or torch.equal(buffers[1][slot], x_scale[t])
        assert buffers[2][slot].tolist() == local
        assert torch.equal(buffers[3][slot], weights[t])
        assert buffers[4][slot].item() == t
        slot += 1
    assert buffers[5].tolist() == [slot] and (num_tokens < 13 or 0 < slot < num_tokens)
    for buffer, old in zip(buffers[:5], before[:5], strict=True):
        assert torch.equal(buffer[slot:].view(torch.uint8), old[slot:].view(torch.uint8))


def test_fp8_rows_are_copied():
    rng = np.random.default_rng(1)
    x, x_scale, _ = moe.make_rows(rng, "fp8", 7, 160)
    sent = (x, x_scale, *moe.make_routing(rng, 7, TOPK, NUM_EXPERTS))
    buffers = make_buffers(sent, 7)
    ops.ep_dispatch(*sent, *buffers, num_experts=NUM_EXPERTS, group="")
    rows = buffers[4][: buffers[5].item()]
    assert rows.numel() and torch.equal(buffers[0][: len(rows)].view(torch.uint8), x.view(torch.uint8)[rows])
    assert torch.equal(buffers[1][: len(rows)], x_scale[rows])


def test_overflow_raises_and_exact_fit_does_not():
    sent = make_sent(13, seed=2)
    need = int(((sent[2] >= 0) & (sent[2] < NUM_EXPERTS)).any(1).sum())
    ops.ep_dispatch(*sent, *make_buffers(sent, need), num_experts=NUM_EXPERTS, group="")
    with pytest.raises(ValueError, match=f"capacity must hold the {need} rows to receive, got {need - 1}"):
        ops.ep_dispatch(*sent, *make_buffers(sent, need - 1), num_experts=NUM_EXPERTS, group="")


@pytest.mark.parametrize("kind", moe.FORMATS)
def test_dispatch_experts_combine_equals_experts(kind):
    rng = np.random.default_rng(3)
    hidden, inner = (160, 96)
    weights = moe.make_experts(rng, kind, NUM_EXPERTS, hidden, inner)
    x, x_scale, _ = moe.make_rows(rng, kind, 33, hidden)
    sent = (x, x_scale, *moe.make_routing(rng, 33, TOPK, NUM_EXPERTS))
    keywords = {"limit": 8.0, "deterministic": True}
    want = ops.expert_ffn(*sent, *weights.tensors, **keywords)

    buffers = make_buffers(sent, 40)
    buffers[2].fill_(-1)  # slots that are not filled must name no expert: expert_ffn runs over the whole capacity
    ops.ep_dispatch(*sent, *buffers, num_experts=NUM_EXPERTS, group="")
    recv_x, recv_scale, recv_ids, recv_weights, recv_source, recv_count = buffers
    recv_scale = recv_scale if x_scale.numel() else x_scale
    y = ops.expert_ffn(recv_x, recv_scale, recv_ids, recv_weights, *weights.tensors, **keywords)
    out = torch.full((33, hidden), float("nan"))
    ops.ep_combine(y, recv_source, recv_count, out, group="")
    assert torch.equal(out, want) and want.any()


WRONG = [
    (4, lambda t: t.double(), "recv_x must have dtype torch.float32 and 40 columns, got torch.float64 and 40"),
    (5, lambda t: t[:, 1:], "recv_scale must have dtype torch.float32 and 2 columns, got torch.float32 and 1"),
    (6, lambda t: t.long(), "recv_ids must have dtype torch.int32 and 3 columns, got torch.int64 and 3"),
    (7, lambda t: t[1:], r"recv_weights must have the 9 rows of recv_x, got 8"),
    (8, lambda t: t.int(), "recv_source must have dtype torch.int64, got torch.int32"),
    (9, lambda t: t.repeat(2), r"recv_count must have shape \[1\], got \[2\]"),
]


@pytest.mark.parametrize(("index", "change", "message"), WRONG, ids=[w[2][:11] for w in WRONG])
def test_wrong_arguments(index, change, message):
    sent = make_sent(5, seed=4)
    args = (*sent, *make_buffers(sent, 9))
    args = [change(a) if i == index else a for i, a in enumerate(args)]
    with pytest.raises(ValueError, match="ep_dispatch " + message):
        ops.ep_dispatch(*args, num_experts=NUM_EXPERTS, group="")
