import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from dsv4 import ops
from dsv4.ops import _paged

HEADS, DIM, WINDOW, WINDOW_PAGE, ENTRY_PAGE = 3, 32, 20, 16, 8
LENGTHS = (230, 97, 41)  # tokens of the three requests


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Three requests and a pad request. Rows of the caches that nobody may read hold NaN."""

    q: torch.Tensor
    window_cache: torch.Tensor
    entry_cache: torch.Tensor
    picks: torch.Tensor
    sink: torch.Tensor
    positions: torch.Tensor
    row_requests: torch.Tensor
    window_tables: torch.Tensor
    block_tables: torch.Tensor
    window: int = WINDOW
    ratio: int = 4
    entries: str = "picked"
    scale: float = DIM**-0.5
    deterministic: bool = False

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp, from poisoned buffers."""
        out, lse = torch.full_like(self.q, torch.nan), torch.full(self.q.shape[:2], torch.nan)
        values = [getattr(self, name) for name in self.__dataclass_fields__]
        names = ("window", "ratio", "entries", "scale", "deterministic")
        options = dict(zip(names, values[-5:], strict=True))
        assert ops.sparse_attention(*values[:-5], out, lse, **options) is None
        return out, lse

    def rows(self, chosen) -> "Scene":
        """The same caches, only the ``chosen`` rows."""
        of_rows = ("q", "picks", "positions", "row_requests")
        return replace(self, **{name: getattr(self, name)[chosen] for name in of_rows})

    def key_lists(self) -> list[list[np.ndarray | None]]:
        """Per row the listed vectors in order, None for an empty place; one dictionary look-up per key."""
        window, entry = self.window_cache.double().numpy(), self.entry_cache.double().numpy()
        lists = []
        for t, (p, r) in enumerate(zip(self.positions.tolist(), self.row_requests.tolist(), strict=True)):
            first = max(0, p - self.window + 1)
            tokens = [i if i <= p else None for i in range(first, first + self.window)]
            seen = max(0, (p + 1) // self.ratio) if self.entries != "none" else 0
            picked = [w if 0 <= w < seen else None for w in self.picks[t].tolist()]
            wanted = picked if self.entries == "picked" else list(range(seen))
            keys = [vector(window, self.window_tables, r, i) for i in tokens]
            lists.append(keys + [vector(entry, self.block_tables, r, w) for w in wanted])
        return lists


def vector(cache, tables, request, index):
    page_rows = cache.shape[1]
    if request < 0 or index is None or index // page_rows >= tables.shape[1]:
        return None
    page = int(tables[request, index // page_rows])
    return cache[page, index % page_rows] if page >= 0 else None


def paged_cache(rng, lengths, page_rows, dim):
    """A poisoned cache and its tables (with a pad request) that hold ``lengths`` random rows."""
    width = max(-(-n // page_rows) for n in lengths) + 1
    pages = iter(rng.permutation(4 * width))
    tables, cache = np.full((len(lengths) + 1, width), -1), np.full((4 * width, page_rows, dim), np.nan)
    for r, length in enumerate(lengths):
        for i in range(length):
            if i % page_rows == 0:
                tables[r, i // page_rows] = next(pages)
            cache[tables[r, i // page_rows], i % page_rows] = rng.normal(size=dim)
    return torch.tensor(cache, dtype=torch.float32), torch.tensor(tables, dtype=torch.int32)


def scene(num_tokens, *, seed=0, dtype=torch.float32, ratio=4, num_picks=12, dim=DIM, **options) -> Scene:
    rng = np.random.default_rng(seed)
    requests = rng.integers(0, 3, size=num_tokens)
    positions = rng.integers(0, np.array(LENGTHS)[requests])
    pads = rng.random(num_tokens) < 0.15
    requests, positions = np.where(pads, -1, requests), np.where(pads, rng.choice([-1, -4], num_tokens), positions)
    window_cache, window_tables = paged_cache(rng, LENGTHS, WINDOW_PAGE, dim)
    entry_cache, block_tables = paged_cache(rng, [n // ratio for n in LENGTHS], ENTRY_PAGE, dim)
    picks = np.full((num_tokens, num_picks), -1)
    for row, p in zip(picks, positions, strict=True):
        chosen = np.sort(rng.permutation(max(0, (p + 1) // ratio))[:num_picks])
        row[: len(chosen)] = chosen
    sink = rng.normal(size=HEADS)
    sink[0] = -np.inf
    return Scene(
        q=torch.tensor(rng.normal(size=(num_tokens, HEADS, dim))).to(dtype),
        window_cache=window_cache.to(dtype),
        entry_cache=entry_cache.to(dtype),
        picks=torch.tensor(picks, dtype=torch.int32),
        sink=torch.tensor(sink, dtype=torch.float32),
        positions=torch.tensor(positions),
        row_requests=torch.tensor(requests, dtype=torch.int32),
        window_tables=window_tables,
        block_tables=block_tables,
        ratio=ratio,
        **options,
    )


def naive(s: Scene):
    """Plain softmax in fp64, one row and one head at a time."""
    q, sink = s.q.double().numpy(), s.sink.double().numpy()
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for t, listed in enumerate(s.key_lists()):
        keys = np.array([k for k in listed if k is not None])
        for h in range(q.shape[1] if len(keys) else 0):
            scores = keys @ q[t, h] * s.scale
            mass = np.exp(scores - scores.max())
            out[t, h] = mass @ keys / (mass.sum() + np.exp(sink[h] - scores.max()))
            lse[t, h] = scores.max() + np.log(mass.sum())
    return out, lse


def bf16(x):
    return torch.tensor(x, dtype=torch.float32).bfloat16().double().numpy()


def naive_blocks(s: Scene, block: int):
    """The official order of operations: blocks of list places, bf16 probabilities relative to the running maximum."""
    q, sink = s.q.double().numpy(), s.sink.double().numpy()
    out = np.zeros(q.shape)
    for t, listed in enumerate(s.key_lists()):
        for h in range(q.shape[1]):
            top, total, acc = -np.inf, 0.0, np.zeros(q.shape[2])
            for first in range(0, len(listed), block):
                keys = np.array([k for k in listed[first : first + block] if k is not None])
                if len(keys):
                    scores = keys @ q[t, h] * s.scale
                    raised = max(top, scores.max())
                    mass, decay = np.exp(scores - raised), np.exp(top - raised)
                    total, acc, top = total * decay + mass.sum(), acc * decay + bf16(mass) @ keys, raised
            out[t, h] = acc / (total + np.exp(sink[h] - top)) if total else 0.0
    return bf16(out)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("entries", ["none", "all", "picked"])
@pytest.mark.parametrize("num_tokens", [0, 1, 32, 33, 64, 128, 250, 256])
def test_matches_numpy(num_tokens, entries, deterministic):
    s = scene(num_tokens, seed=num_tokens, entries=entries, deterministic=deterministic)
    out, lse = s.run()
    expected_out, expected_lse = naive(s)
    # a convex combination of values of size three, from scores with an error of about 1e-6
    np.testing.assert_allclose(out.numpy(), expected_out, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse.numpy(), expected_lse, rtol=1e-6, atol=5e-6)
    pads = s.positions < 0
    assert (out[pads] == 0).all() and (lse[pads] == -torch.inf).all()


@pytest.mark.parametrize("entries", ["none", "all", "picked"])
def test_bf16_error_is_that_of_the_probabilities_and_the_result(entries):
    """Each probability and each result rounds by at most 2^-9 of itself."""
    s = scene(64, seed=1, dtype=torch.bfloat16, entries=entries)
    out, lse = s.run()
    expected_out, expected_lse = naive(s)
    size = np.abs(np.nan_to_num(s.window_cache.double().numpy())).max()
    size = max(size, np.abs(np.nan_to_num(s.entry_cache.double().numpy())).max())
    assert np.abs(out.double().numpy() - expected_out).max() < 2**-8 * size
    np.testing.assert_allclose(lse.numpy(), expected_lse, rtol=1e-6, atol=5e-6)


def test_bf16_probabilities_are_rounded_in_blocks_of_64():
    s = scene(80, seed=2, dtype=torch.bfloat16, window=100, entries="all", scale=3 * DIM**-0.5)
    out = s.run()[0].double().numpy()
    agree = {block: (out == naive_blocks(s, block)).mean() for block in (16, 64, 4096)}
    assert agree[64] > 0.995  # the rest: fp32 against fp64 next to a rounding boundary
    assert max(agree[16], agree[4096]) < 0.98


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("entries", ["none", "all", "picked"])
def test_deterministic_rows_are_bitwise_the_same_alone(entries, dtype):
    s = scene(33, seed=3, dtype=dtype, window=70, entries=entries, deterministic=True)
    out, lse = s.run()
    wider = torch.nn.functional.pad(s.picks, (0, 200), value=-1)
    for t in range(33):
        for one in (s.rows([t]), replace(s, picks=wider).rows([t])):
            alone, alone_lse = one.run()
            assert torch.equal(alone[0].view(torch.uint8), out[t].view(torch.uint8)), f"row {t}"
            assert torch.equal(alone_lse[0], lse[t])
    fast, fast_lse = replace(s, deterministic=False).run()
    torch.testing.assert_close(fast_lse, lse, rtol=1e-6, atol=5e-6)
    if dtype == torch.float32:
        torch.testing.assert_close(fast, out, rtol=1e-5, atol=1e-5)


def test_picks_that_are_not_visible_are_ignored():
    s = scene(40, seed=4, num_picks=9)
    visible = ((s.positions + 1) // 4).clamp_min(0).int()
    bad = torch.stack((visible, visible + 3, torch.full_like(visible, 2**31 - 1), torch.full_like(visible, -7)), dim=1)
    mixed = torch.cat((bad[:, :2], s.picks, bad[:, 2:]), dim=1)
    empty = torch.full_like(bad, -1)
    clean = torch.cat((empty[:, :2], s.picks, empty[:, 2:]), dim=1)
    for got, expected in zip(replace(s, picks=mixed).run(), replace(s, picks=clean).run(), strict=True):
        assert torch.equal(got, expected)


def test_absent_pages_are_skipped():
    s = scene(60, seed=5, entries="all")
    s.window_tables[0, 3], s.block_tables[1, 0] = -1, -1
    out, lse = s.run()
    expected_out, expected_lse = naive(s)
    np.testing.assert_allclose(out.numpy(), expected_out, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse.numpy(), expected_lse, rtol=1e-6, atol=5e-6)


def test_rows_without_any_key():
    s = scene(12, seed=6, entries="all")
    s = replace(s, window_tables=torch.full_like(s.window_tables, -1), block_tables=torch.full_like(s.block_tables, -1))
    out, lse = s.run()
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_a_layer_without_entries_passes_empty_tensors():
    s = scene(25, seed=7, entries="none", num_picks=0)
    expected = s.run()
    s = replace(s, ratio=0, entry_cache=torch.empty(0, 1, DIM), block_tables=torch.empty(4, 0, dtype=torch.int32))
    for got, want in zip(s.run(), expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_scores_and_sinks_stay_finite(dtype):
    s = scene(30, seed=8, dtype=dtype, scale=50.0)
    out, lse = replace(s, sink=torch.tensor([200.0, -torch.inf, 3000.0])).run()
    assert out.isfinite().all() and (lse[s.positions >= 0]).isfinite().all()
    assert (out[:, 2] == 0).all()  # the sink takes everything


def test_sink_scales_the_output_and_leaves_the_lse():
    s = scene(30, seed=9)
    free, free_lse = replace(s, sink=torch.full((HEADS,), -torch.inf)).run()
    out, lse = s.run()
    assert torch.equal(lse, free_lse)
    used = s.positions >= 0
    share = torch.sigmoid(lse[used] - s.sink).unsqueeze(-1)
    torch.testing.assert_close(out[used], free[used] * share, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("deterministic", [False, True])
def test_fp8_caches_equal_their_dense_values(deterministic):
    s = scene(20, seed=10, dtype=torch.bfloat16, dim=512, scale=512**-0.5, deterministic=deterministic)
    packed, stored = {}, {}
    for name in ("window_cache", "entry_cache"):
        dense = getattr(s, name)
        flat = (~dense[:, :, 0].isnan()).flatten().nonzero().squeeze(1)
        cache = torch.full((dense.shape[0], _paged.fp8_page_bytes(dense.shape[1], 512)), 255, dtype=torch.uint8)
        _paged.write(cache, flat, dense.flatten(0, 1)[flat])
        packed[name], stored[name] = cache, dense.clone()
        stored[name].view(-1, 512)[flat] = _paged.read(cache, flat, 512)
    for got, expected in zip(replace(s, **packed).run(), replace(s, **stored).run(), strict=True):
        assert torch.equal(got, expected)


def test_parts_merge_to_the_whole():
    """Window, even picks and odd picks as three parts without sink, merged by ``lse_merge`` with the sink."""
    s = scene(50, seed=11)
    free = replace(s, sink=torch.full((HEADS,), -torch.inf))
    no_window = replace(free, window_tables=torch.full_like(s.window_tables, -1))
    parts = [
        replace(free, entries="none").run(),
        replace(no_window, picks=s.picks[:, 0::2]).run(),
        replace(no_window, picks=s.picks[:, 1::2]).run(),
    ]
    merged, merged_lse = ops.lse_merge(*(torch.stack(x) for x in zip(*parts, strict=True)), s.sink)
    out, lse = s.run()
    torch.testing.assert_close(merged, out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged_lse, lse, rtol=1e-6, atol=5e-6)


def test_row_passes_do_not_matter(monkeypatch):
    s = scene(40, seed=13, entries="all")
    expected, expected_lse = s.run()
    monkeypatch.setattr(sys.modules["dsv4.ops.sparse_attention"], "TEMPORARY_BYTES", 300_000)  # a few rows at a time
    out, lse = s.run()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=5e-6)


def test_out_may_be_a_slice_of_a_larger_buffer():
    s = scene(9, seed=12)
    expected, expected_lse = s.run()
    wide, wide_lse = torch.full((9, HEADS, 2, DIM), torch.nan), torch.full((9, 2, HEADS), torch.nan)
    values = [getattr(s, name) for name in s.__dataclass_fields__][:-5]
    options = {"window": WINDOW, "ratio": 4, "entries": "picked", "scale": s.scale, "deterministic": False}
    ops.sparse_attention(*values, wide[:, :, 1], wide_lse[:, 0], **options)
    assert torch.equal(wide[:, :, 1], expected) and torch.equal(wide_lse[:, 0], expected_lse)
    assert wide[:, :, 0].isnan().all() and wide_lse[:, 1].isnan().all()


def test_errors():
    s = scene(3)
    with pytest.raises(ValueError, match="entries must be one of .*, got 'some'"):
        replace(s, entries="some").run()
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        replace(s, window=0).run()
    with pytest.raises(ValueError, match="ratio must be at least 1, got 0"):
        replace(s, ratio=0).run()
    with pytest.raises(ValueError, match="q and out must both be float32 or bfloat16, got torch.float16"):
        replace(s, q=s.q.half()).run()
    with pytest.raises(ValueError, match="entry_cache must have dimension 32, got 16"):
        replace(s, entry_cache=s.entry_cache[:, :, :16]).run()
    with pytest.raises(ValueError, match="and int32, got torch.float32, torch.float32 and torch.int64"):
        replace(s, picks=s.picks.long()).run()
    with pytest.raises(ValueError, match=r"must have 3 heads of 32, got \[3, 32\], \[3\] and \[2\]"):
        replace(s, sink=s.sink[:2]).run()
