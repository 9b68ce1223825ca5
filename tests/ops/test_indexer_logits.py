import sys

import numpy as np
import pytest
import torch

from dsv4 import ops
from dsv4.ops import _paged

HEADS, DIM, RATIO, PAGE = 3, 32, 4, 8  # pages of 8 entries: 32 tokens
module = sys.modules["dsv4.ops.indexer_logits"]  # the package attribute of this name is the op


def scene(num_tokens, seed=0, dim=DIM, dtype=torch.float32, heads=HEADS):
    """Three requests and a pad request; pad rows in between; cache rows that nobody may read hold NaN."""
    rng = np.random.default_rng(seed)
    pages = rng.permutation(40)
    tables = np.full((4, 9), -1)
    tables[0, :9], tables[1, :5], tables[2, :3] = pages[:9], pages[9:14], pages[14:17]
    tables[0, 2] = -1  # an absent block among present ones
    lengths = np.array([288, 150, 90])
    requests = rng.integers(0, 3, size=num_tokens)
    positions = rng.integers(0, lengths[requests])
    pads = rng.random(num_tokens) < 0.2
    requests, positions = np.where(pads, -1, requests), np.where(pads, rng.choice([-1, -4], num_tokens), positions)
    cache = np.full((40, PAGE, dim), np.nan)
    for table, length in zip(tables, lengths, strict=False):
        for entry in range(length // RATIO):
            if table[entry // PAGE] >= 0:
                cache[table[entry // PAGE], entry % PAGE] = rng.normal(size=dim)
    q, weights = rng.normal(size=(num_tokens, heads, dim)), rng.normal(size=(num_tokens, heads))
    return [
        torch.tensor(q).to(dtype),
        torch.tensor(weights).to(dtype).float(),
        torch.tensor(cache).to(dtype),
        torch.tensor(positions),
        torch.tensor(requests, dtype=torch.int32),
        torch.tensor(tables, dtype=torch.int32),
    ]


def call(args, *, dtype=torch.float32, deterministic=False):
    return ops.indexer_logits(*args, ratio=RATIO, dtype=dtype, deterministic=deterministic)


def naive(args, rounded=lambda x: x):
    q, weights, cache, positions, requests, tables = (a.double().numpy() for a in args)
    tables = tables.astype(int)
    scores = np.full((len(q), tables.shape[1] * PAGE), -np.inf)
    for t in range(len(q)):
        for w in range(scores.shape[1]):
            if requests[t] >= 0 and w < (positions[t] + 1) // RATIO and tables[int(requests[t]), w // PAGE] >= 0:
                key = cache[tables[int(requests[t]), w // PAGE], w % PAGE]
                parts = [rounded(max(rounded(h @ key), 0.0) * g) for h, g in zip(q[t], weights[t], strict=True)]
                scores[t, w] = rounded(sum(parts))
    return scores


def to_bf16(x):
    return torch.tensor(x, dtype=torch.float32).bfloat16().double().item()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 32, 33, 64, 128, 250, 256])
def test_matches_numpy(num_tokens, deterministic):
    args = scene(num_tokens, seed=num_tokens)
    got = call(args, deterministic=deterministic)
    assert got.dtype == torch.float32 and got.shape == (num_tokens, 72)
    np.testing.assert_allclose(got.numpy(), naive(args), rtol=1e-5, atol=2e-5)  # sums of 96 products of size one


def test_bf16_rounds_dot_product_and_sum():
    """The three rounding points; a dot product next to a rounding boundary may fall either way in fp32."""
    args = scene(40, seed=3, dtype=torch.bfloat16)
    got, expected = call(args, dtype=torch.bfloat16).double().numpy(), naive(args, to_bf16)
    seen = expected > -np.inf
    assert ((got > -np.inf) == seen).all()
    assert (got[seen] == expected[seen]).mean() > 0.99
    once = torch.tensor(naive(args)).bfloat16().double().numpy()
    assert (got[seen] == once[seen]).mean() < 0.9  # rounding only the result is something else


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deterministic_rows_are_bitwise_the_same_alone(dtype):
    args = scene(33, seed=4, dtype=dtype)
    whole = call(args, dtype=dtype, deterministic=True)
    wide = torch.nn.functional.pad(args[5], (0, 30), value=-1)
    for t in range(33):
        alone = [a[t : t + 1] if i in (0, 1, 3, 4) else a for i, a in enumerate(args)]
        assert torch.equal(call(alone, dtype=dtype, deterministic=True)[0], whole[t])
        alone[5] = wide
        got = call(alone, dtype=dtype, deterministic=True)[0]
        assert torch.equal(got[:72], whole[t]) and (got[72:] == -torch.inf).all()


def test_tiles_and_passes_do_not_matter(monkeypatch):
    args = scene(50, seed=5)
    expected = call(args)
    monkeypatch.setattr(module, "ENTRY_TILE", 20)
    monkeypatch.setattr(module, "TEMPORARY_BYTES", 3 * 20 * HEADS * 12)
    torch.testing.assert_close(call(args), expected, rtol=1e-5, atol=1e-5)


def test_temporaries_stay_under_the_bound(monkeypatch):
    """No product is larger than the stated bound allows."""
    sizes, scores = [], module._scores

    def record(q, weights, keys, dtype):
        sizes.append(q.shape[0] * HEADS * len(keys))
        return scores(q, weights, keys, dtype)

    monkeypatch.setattr(module, "TEMPORARY_BYTES", 100_000)
    monkeypatch.setattr(module, "ENTRY_TILE", 64)
    monkeypatch.setattr(module, "_scores", record)
    call(scene(256, seed=6))
    assert len(sizes) > 3 and max(sizes) * 12 <= 100_000


def test_fp8_cache_and_fp8_queries():
    """e4m3 queries with folded weights against an FP8 cache: the same values as their dense copies."""
    args = scene(30, seed=7, dim=128, dtype=torch.bfloat16)
    dense, tables = args[2], args[5]
    flat = (~dense[:, :, 0].isnan()).flatten().nonzero().squeeze(1)
    cache = torch.full((40, _paged.fp8_page_bytes(PAGE, 128)), 255, dtype=torch.uint8)
    _paged.write(cache, flat, dense.flatten(0, 1)[flat])
    stored = dense.clone()
    stored.view(-1, 128)[flat] = _paged.read(cache, flat, 128)
    table = torch.cat((torch.ones(400, 32), torch.zeros(400, 32)), dim=1)  # the identity rotation
    codes, folded = ops.indexer_query(
        args[0], args[1], table, args[3], scale=1.0, quantize="none", dtype=torch.float8_e4m3fn
    )
    factor = (folded / args[1].where(args[1] != 0, 1.0)).unsqueeze(-1)
    values = (codes.float() * factor).bfloat16()
    for dtype in (torch.float32, torch.bfloat16):
        got = call([codes, folded, cache, args[3], args[4], tables], dtype=dtype)
        expected = call([values, args[1], stored, args[3], args[4], tables], dtype=dtype)
        # scaling by powers of two commutes with every rounding, so only summation order could differ
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        assert (got > -torch.inf).sum() > 200


def test_nothing_cached():
    args = scene(6, seed=8)
    args[2], args[5] = torch.empty(0, PAGE, DIM), torch.full((4, 9), -1, dtype=torch.int32)
    assert (call(args) == -torch.inf).all()
    args[5] = torch.empty(4, 0, dtype=torch.int32)
    assert call(args).shape == (6, 0)


def test_errors():
    q, weights, cache, *rows = scene(4)
    with pytest.raises(ValueError, match="dtype must be float32 or bfloat16, got torch.float16"):
        call([q, weights, cache, *rows], dtype=torch.float16)
    with pytest.raises(ValueError, match="q must be float32, bfloat16 or float8_e4m3fn, got torch.float16"):
        call([q.half(), weights, cache, *rows])
    with pytest.raises(ValueError, match=r"weights must be float32 with 3 heads, got torch.float32 \[2\]"):
        call([q, weights[:, :2], cache, *rows])
    with pytest.raises(ValueError, match="cache must have dimension 32, got 16"):
        call([q, weights, cache[:, :, :16], *rows])
    with pytest.raises(ValueError, match="ratio must be at least 1, got 0"):
        ops.indexer_logits(q, weights, cache, *rows, ratio=0, dtype=torch.float32, deterministic=False)
