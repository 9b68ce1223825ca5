import pytest
import torch

from dsv4 import ops
from dsv4.ops.shapes import nano, tiny

from ..ops import contract
from ..ops.test_ep_dispatch import NUM_EXPERTS, make_buffers, make_sent
from . import interpreter, prewarm
from .against_reference import compare, outputs

interpreter.repair()
SPEC = ops.spec("ep_dispatch")
KEYWORDS = {"num_experts": NUM_EXPERTS, "group": ""}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 33])
@pytest.mark.parametrize("shape", [tiny, nano], ids=lambda s: s.name)
def test_matches_reference(shape, num_tokens, dtype):
    compare(SPEC, *contract.example(SPEC, shape, num_tokens, dtype, seed=num_tokens), rtol=0, atol=0)


@pytest.mark.parametrize("scale_columns", [0, 2])
@pytest.mark.parametrize("num_tokens", [0, 1, 13, 300])
def test_absent_experts_and_spare_slots(num_tokens, scale_columns):
    sent = make_sent(num_tokens, seed=num_tokens, scale_columns=scale_columns)
    compare(SPEC, (*sent, *make_buffers(sent, num_tokens + 2)), KEYWORDS, rtol=0, atol=0)


def test_fp8_rows():
    x, *rest = make_sent(13, seed=3)
    sent = (x.to(torch.float8_e4m3fn), *rest)
    compare(SPEC, (*sent, *make_buffers(sent, 13)), KEYWORDS, rtol=0, atol=0)


def test_more_rows_than_one_scan_block(monkeypatch):
    from dsv4.ops import ep_dispatch_kernel

    monkeypatch.setattr(ep_dispatch_kernel, "_CHUNK", 8)
    sent = make_sent(29, seed=5)
    compare(SPEC, (*sent, *make_buffers(sent, 29)), KEYWORDS, rtol=0, atol=0)


def test_overflow_keeps_the_first_rows_and_shows_in_the_count():
    sent = make_sent(13, seed=2)
    full = outputs(SPEC, SPEC.reference, (*sent, *make_buffers(sent, 13)), KEYWORDS)
    need = full[5].item()
    *buffers, count = outputs(SPEC, SPEC.cuda, (*sent, *make_buffers(sent, need - 2)), KEYWORDS)
    assert count.item() == need > 2
    for got, want in zip(buffers, full[:5], strict=True):
        assert torch.equal(got, want[: need - 2])


def test_wrong_buffers():
    sent = make_sent(5, seed=4)
    buffers = list(make_buffers(sent, 9))
    with pytest.raises(ValueError, match="must have the 9 rows of recv_x, got 8"):
        SPEC.cuda(*sent, *buffers[:3], buffers[3][1:], *buffers[4:], **KEYWORDS)
    buffers[0] = torch.empty(buffers[0].shape[1], 9).t()
    with pytest.raises(ValueError, match="must be contiguous, got strides"):
        SPEC.cuda(*sent, *buffers, **KEYWORDS)


def test_cases_cover_every_launch():
    keys = set()
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        _, _, ids, weights = make_sent(5, seed=6)
        ids, weights = ids[:, : tiny.experts_per_token], weights[:, : tiny.experts_per_token]
        scale = torch.ones(5, 1) if dtype != torch.bfloat16 else torch.empty(5, 0)
        sent = (torch.zeros(5, tiny.hidden).to(dtype), scale, ids, weights)
        buffers = [torch.empty(8, *t.shape[1:], dtype=t.dtype) for t in sent]
        count = (torch.empty(8, dtype=torch.int64), torch.empty(1, dtype=torch.int32))
        keys |= prewarm.launched(SPEC, (*sent, *buffers, *count), KEYWORDS)
    assert keys == prewarm.enumerated(SPEC, tiny, 64)
