"""Calls of ops at large row counts, with random arguments made on the device, in the order of the schemas."""

from collections.abc import Callable
from typing import Any

import torch

from dsv4.ops.shapes import BLOCK_TOKENS, WINDOW_PAGE_TOKENS, Shape

Call = tuple[tuple[Any, ...], dict[str, Any]]
_RATIO = 4


class _Random:
    """Values from one generator on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.generator = device, torch.Generator(device=device).manual_seed(1)

    def normal(self, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*size, device=self.device, generator=self.generator, dtype=dtype)

    def act(self, *size: int) -> torch.Tensor:
        return self.normal(*size, dtype=torch.bfloat16)

    def order(self, count: int) -> torch.Tensor:
        return torch.randperm(count, device=self.device, generator=self.generator)

    def whole(self, low: int, high: int, *size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(low, high, size, device=self.device, generator=self.generator, dtype=dtype)

    def codes(self, rows: int, width: int) -> torch.Tensor:
        return self.act(rows, width).to(torch.float8_e4m3fn)

    def scales(self, low: int, high: int, *size: int) -> torch.Tensor:
        return torch.exp2(self.whole(low, high, *size).float())


def _mhc(name: str) -> Callable[[Shape, int, torch.device], Call]:
    def call(shape: Shape, rows: int, device: torch.device) -> Call:
        r, width = _Random(device), 4 * shape.hidden
        outputs = 4 if name == "mhc_head" else 24
        streams, y = r.act(rows, 4, shape.hidden), r.act(rows, shape.hidden)
        mixed = (y, streams, 2 * r.normal(rows, 4).sigmoid(), r.normal(rows, 4, 4).sigmoid() / 2)
        scale = 0.5 + r.normal(1 if name == "mhc_head" else 3).abs()
        parameters = (r.normal(outputs, width) * width**-0.5, scale, r.normal(outputs), r.normal(shape.hidden))
        numbers: dict[str, Any] = {"eps": 1e-6, "hc_eps": 1e-6, "deterministic": False}
        if name == "mhc_post":
            return mixed, {}
        if name == "mhc_head":
            return (streams, *parameters), numbers
        numbers["sinkhorn_iters"] = shape.sinkhorn_iters
        return ((streams, *parameters) if name == "mhc_pre" else (*mixed, *parameters)), numbers

    return call


def _table(r: _Random, rows: int, dim: int) -> torch.Tensor:
    angles = r.normal(rows, dim // 2)
    return torch.cat((angles.cos(), angles.sin()), -1)


def _pages(r: _Random, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Window table ``[1, W]`` and block table ``[1, B]`` of one request of ``rows`` tokens, shuffled."""
    return tuple(r.order(-(-rows // size)).int().view(1, -1) for size in (WINDOW_PAGE_TOKENS, BLOCK_TOKENS))


def qkv_rope_cache(shape: Shape, rows: int, device: torch.device) -> Call:
    r = _Random(device)
    windows, _ = _pages(r, rows)
    positions = torch.arange(rows, device=device)
    slots = windows[0, positions // WINDOW_PAGE_TOKENS].long() * WINDOW_PAGE_TOKENS + positions % WINDOW_PAGE_TOKENS
    cache = r.act(windows.shape[1], WINDOW_PAGE_TOKENS, shape.head_dim)
    q, kv = r.act(rows, shape.num_heads, shape.head_dim), r.act(rows, shape.head_dim)
    weight, table = r.normal(shape.head_dim), _table(r, rows + 1, shape.rope_dim)
    return (q, kv, weight, table, positions, slots, cache), {"eps": 1e-6, "quantize": True}


def grouped_o_proj(shape: Shape, rows: int, device: torch.device) -> Call:
    r = _Random(device)
    inner = shape.num_heads // shape.o_groups * shape.head_dim
    weight = (r.normal(shape.o_groups, shape.o_lora_rank, inner) * inner**-0.5).to(torch.bfloat16)
    o, table = r.act(rows, shape.num_heads, shape.head_dim), _table(r, rows + 1, shape.rope_dim)
    return (o, table, torch.arange(rows, device=device), weight), {"deterministic": False}


def sparse_attention(shape: Shape, rows: int, device: torch.device) -> Call:
    r = _Random(device)
    windows, blocks = _pages(r, rows)
    positions = torch.arange(rows, device=device)
    window = r.act(windows.shape[1], WINDOW_PAGE_TOKENS, shape.head_dim)
    entries = r.act(blocks.shape[1], BLOCK_TOKENS // _RATIO, shape.head_dim)
    share = torch.rand(rows, shape.index_topk, device=device, generator=r.generator)
    visible = ((positions + 1) // _RATIO).unsqueeze(1)
    picks = torch.where(visible > 0, (share * visible).int(), -1).int()
    picks = torch.where(torch.arange(shape.index_topk, device=device) < visible, picks.sort(-1).values, -1).int()
    first = torch.cat((torch.ones_like(picks[:, :1], dtype=torch.bool), picks[:, 1:] != picks[:, :-1]), 1)
    picks = torch.where(first, picks, -1).int()  # a pick counts once
    q = r.act(rows, shape.num_heads, shape.head_dim)
    out, lse = torch.full_like(q, torch.nan), r.normal(rows, shape.num_heads)
    requests = torch.zeros(rows, dtype=torch.int32, device=device)
    args = (q, window, entries, picks, r.normal(shape.num_heads), positions, requests, windows, blocks, out, lse)
    numbers = {"window": shape.window, "ratio": _RATIO, "entries": "picked", "scale": shape.head_dim**-0.5}
    return args, numbers | {"deterministic": False}


def fp8_linear(shape: Shape, rows: int, device: torch.device) -> Call:
    """The projection to the queries, whose result is the largest of all."""
    r, outs, width = _Random(device), shape.num_heads * shape.head_dim, shape.q_lora_rank
    blocks = (-(-outs // 128), -(-width // 128))
    args = (r.codes(rows, width), r.scales(-3, 4, rows, blocks[1]), r.codes(outs, width), r.scales(-8, -3, *blocks))
    return args, {"dtype": torch.bfloat16, "deterministic": False}


def linear(shape: Shape, rows: int, device: torch.device) -> Call:
    """The same in exact numerics."""
    r, outs, width = _Random(device), shape.num_heads * shape.head_dim, shape.q_lora_rank
    args = (r.act(rows, width), (r.normal(outs, width) * width**-0.5).to(torch.bfloat16))
    return args, {"dtype": torch.bfloat16, "deterministic": False}


def expert_ffn(shape: Shape, rows: int, device: torch.device) -> Call:
    """FP4 experts of random bytes; every row has as many distinct ones as the model gives it."""
    r, experts, hidden, inner = _Random(device), shape.num_experts, shape.hidden, shape.expert_hidden
    ids = torch.rand(rows, experts, device=device, generator=r.generator).topk(shape.experts_per_token).indices.int()
    weights = []
    for outs, width in ((2 * inner, hidden), (hidden, inner)):
        weights.append(r.whole(0, 256, experts, outs, width // 2, dtype=torch.uint8))
        weights.append(r.whole(118, 122, experts, outs, width // 32, dtype=torch.uint8))
    x = r.codes(rows, hidden), r.scales(-2, 2, rows, -(-hidden // 128))
    shares = torch.rand(ids.shape, device=device, generator=r.generator)
    return (*x, ids, shares, *weights), {"limit": shape.swiglu_limit, "deterministic": False}


def indexer_logits(shape: Shape, rows: int, device: torch.device) -> Call:
    """The last rows of one request with the full context."""
    r, blocks = _Random(device), -(-shape.max_context // BLOCK_TOKENS)
    context = blocks * BLOCK_TOKENS
    q, weights = r.act(rows, shape.index_heads, shape.index_dim), r.normal(rows, shape.index_heads)
    cache, table = r.act(blocks, BLOCK_TOKENS // _RATIO, shape.index_dim), r.order(blocks).int().view(1, -1)
    positions = torch.arange(context - rows, context, device=device)
    requests = torch.zeros(rows, dtype=torch.int32, device=device)
    options = {"ratio": _RATIO, "dtype": torch.bfloat16, "deterministic": False}
    return (q, weights, cache, positions, requests, table), options


def indexer_topk(shape: Shape, rows: int, device: torch.device) -> Call:
    """Picks of scores as :func:`indexer_logits` returns them."""
    positions = torch.arange(shape.max_context - rows, shape.max_context, device=device)
    scores = _Random(device).act(rows, -(-shape.max_context // BLOCK_TOKENS) * BLOCK_TOKENS // _RATIO)
    return (scores, positions), {"ratio": _RATIO, "topk": shape.index_topk}


def lse_merge(shape: Shape, rows: int, device: torch.device) -> Call:
    """Two parts of attention."""
    r = _Random(device)
    outs, lses = r.act(2, rows, shape.num_heads, shape.head_dim), 3 * r.normal(2, rows, shape.num_heads)
    return (outs, lses, r.normal(shape.num_heads)), {}


CALLS: dict[str, Callable[[Shape, int, torch.device], Call]] = {
    **{name: _mhc(name) for name in ("mhc_pre", "mhc_post", "mhc_post_pre", "mhc_head")},
    "qkv_rope_cache": qkv_rope_cache,
    "sparse_attention": sparse_attention,
    "grouped_o_proj": grouped_o_proj,
    "fp8_linear": fp8_linear,
    "linear": linear,
    "expert_ffn": expert_ffn,
}
"""What is called with 32,768 rows."""
BEYOND: dict[str, tuple[Callable[[Shape, int, torch.device], Call], int]] = {
    **{name: (CALLS[name], 33024) for name in ("qkv_rope_cache", "sparse_attention", "grouped_o_proj", "fp8_linear",
                                               "linear")},
    "indexer_logits": (indexer_logits, 8256),
    "indexer_topk": (indexer_topk, 8256),
    "lse_merge": (lse_merge, 16512),
}  # fmt: skip
"""Calls, and numbers of rows, whose largest tensor has more than 2^31 elements at Pro: with 32,768 rows queries have
2^31, so that the last of them still has a number of 31 bits. Index scores are those of 2^20 tokens. The tensors of one
call take up to 9 GB (fp32 index scores: 10 GB)."""
