"""A six-layer toy model over ops of its own namespace: norms in compiled pieces, attention as a boundary.

Words: T tokens, R requests, L logit rows. Layers alternate between kind A (attention alone) and kind B (an indexer
before it). Every layer owns a cache and a table.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils import _pytree as pytree

HIDDEN, HEADS, PAGES, VOCAB, LAYERS = 16, 2, 8, 32, 6
BOUNDARY = ("toy::pick", "toy::attention")
SHAPES = [(0, 0, 0), (1, 1, 1), (2, 1, 1), (7, 7, 7), (64, 2, 2), (5, 1, 0)]
SIZES = {
    "ids": {0: "T"},
    "requests": {0: "T"},
    "slots": {0: "T"},
    "starts": {0: "R + 1"},
    "lengths": {0: "R"},
    "tables": {0: "R"},
    "logit_rows": {0: "L"},
}

library = torch.library.Library("toy", "FRAGMENT")
seen_pointers: dict[str, list[int]] = {}


def define(name: str, schema: str, kernel, fake) -> None:
    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, kernel, "CPU")
    torch.library.register_fake(f"toy::{name}", fake, lib=library)


def norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def store(x: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor) -> None:
    """Write row t of ``x`` to row ``slots[t]`` of ``cache``; −1 writes nothing."""
    seen_pointers.setdefault("store", []).append(cache.data_ptr())
    cache[slots[slots >= 0]] = x[slots >= 0]


def pick(q: torch.Tensor, cache: torch.Tensor, tables: torch.Tensor, requests: torch.Tensor) -> torch.Tensor:
    """One cache row per token: the best of its request's pages."""
    rows = tables[requests]
    scores = (cache[rows] * q.flatten(1).unsqueeze(1)).sum(-1)
    return rows.gather(1, scores.argmax(1, keepdim=True)).squeeze(1)


def attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    picks: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    requests: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float,
) -> None:
    """Attend to the picked row and the token's own row; write the row back, scaled, and fill ``out`` and ``lse``."""
    seen_pointers.setdefault("attention", []).append(out.data_ptr())
    assert starts.shape[0] == lengths.shape[0] + 1
    keys = torch.stack((cache[picks], cache[slots]), 1).unflatten(-1, q.shape[1:])  # [T, 2, heads, dim]
    scores = (q.unsqueeze(1) * keys).sum(-1) * scale
    valid = (lengths[requests] > 0)[:, None, None]
    out.copy_(torch.where(valid, (scores.softmax(1).unsqueeze(-1) * keys).sum(1), 0))
    lse.copy_(scores.logsumexp(1))
    cache[slots] = cache[slots] * scale


define("norm", "(Tensor x, Tensor weight, *, float eps) -> Tensor", norm, lambda x, weight, *, eps: torch.empty_like(x))
define("store", "(Tensor x, Tensor slots, Tensor(a!) cache) -> ()", store, lambda x, slots, cache: None)
define(
    "pick",
    "(Tensor q, Tensor cache, Tensor tables, Tensor requests) -> Tensor",
    pick,
    lambda q, cache, tables, requests: tables.new_empty(q.shape[0]),
)
define(
    "attention",
    "(Tensor q, Tensor(a!) cache, Tensor picks, Tensor slots, Tensor starts, Tensor lengths, Tensor requests, "
    "Tensor(b!) out, Tensor(c!) lse, *, float scale) -> ()",
    attention,
    lambda *args, scale: None,
)


def mark(x: torch.Tensor, out: torch.Tensor) -> None:
    """Copy ``x`` into ``out``: the smallest boundary op."""
    out.copy_(x)


define("mark", "(Tensor x, Tensor(a!) out) -> ()", mark, lambda x, out: None)


@dataclass
class Inputs:
    ids: torch.Tensor
    requests: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor
    logit_rows: torch.Tensor


pytree.register_dataclass(Inputs)


def make_inputs(num_tokens: int, num_requests: int, num_logits: int, seed: int = 0, device: str = "cpu") -> Inputs:
    g = torch.Generator().manual_seed(seed)
    per_request = num_tokens // max(num_requests, 1)
    inputs = Inputs(
        ids=torch.randint(0, VOCAB, (num_tokens,), generator=g),
        requests=(torch.arange(num_tokens) // max(per_request, 1)).clamp(max=max(num_requests - 1, 0)),
        slots=torch.randperm(64, generator=g)[:num_tokens],
        starts=torch.arange(num_requests + 1) * per_request,
        lengths=torch.full((num_requests,), per_request),
        tables=torch.randint(0, 64, (num_requests, PAGES), generator=g),
        logit_rows=torch.arange(num_logits) % max(num_tokens, 1),
    )
    return pytree.tree_map(lambda t: t.to(device), inputs)


class Layer(nn.Module):
    def __init__(self, indexed: bool, eps: float) -> None:
        super().__init__()
        self.indexed, self.eps = indexed, eps
        self.norm = nn.Parameter(torch.rand(HIDDEN) + 0.5)
        self.q, self.o = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.register_buffer("table", torch.randn(VOCAB, HIDDEN))
        self.register_buffer("cache", torch.randn(64, HIDDEN))

    def forward(self, x: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        h = torch.ops.toy.norm(x, self.norm, eps=self.eps) + self.table[inputs.ids]
        torch.ops.toy.store(h, inputs.slots, self.cache)
        q = self.q(h).unflatten(-1, (HEADS, HIDDEN // HEADS))
        out, lse = torch.empty_like(q), q.new_empty(q.shape[0], HEADS)
        picks = inputs.slots
        if self.indexed:
            picks = torch.ops.toy.pick(q, self.cache, inputs.tables, inputs.requests)
        rows = (inputs.slots, inputs.starts, inputs.lengths, inputs.requests)
        torch.ops.toy.attention(q, self.cache, picks, *rows, out, lse, scale=0.5)
        return x + self.o(out.flatten(1)) * torch.sigmoid(lse.mean(-1, keepdim=True))


class Model(nn.Module):
    def __init__(self, epsilons: tuple[float, ...] = (1e-6,) * LAYERS, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer(i % 2 == 1, eps) for i, eps in enumerate(epsilons))
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, inputs: Inputs) -> torch.Tensor:
        x = self.embed(inputs.ids)
        for layer in self.layers:
            x = layer(x, inputs)
        return self.head(x[inputs.logit_rows])


def caches(model: nn.Module) -> list[torch.Tensor]:
    return [b for name, b in model.named_buffers() if name.endswith("cache")]
