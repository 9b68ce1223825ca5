"""A small model for capture tests: its ops run on any device, are not disturbed by pads and never synchronise.

Words: T tokens, R requests, L logit rows. Each layer stores a row per token in its cache (compiled piece) and attends
to the pages of the token's request (boundary). The last row of a cache takes what pads write.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils import _pytree as pytree

from dsv4.compile import CompiledModel, compile_model, mark_unbacked_sizes
from dsv4.graphs.buckets import Ladder
from dsv4.graphs.capture import CapturedStep
from dsv4.graphs.static_inputs import Extent, StaticInputs

HIDDEN, PAGES, SLOTS, VOCAB = 8, 4, 32, 16
BOUNDARY = ("toygraph::attend",)
FUNCTIONAL = (*BOUNDARY, "toygraph::scale")  # scale returns a tensor that a captured piece reads
LADDER = Ladder.build(16, max_requests=4, max_entries=4)  # 1, 4, 8, 16
STEPS = [(16, 4, 4), (1, 1, 1), (5, 2, 3), (3, 3, 2), (16, 1, 1), (7, 4, 1), (2, 1, 2), (8, 2, 4), (4, 4, 4)]
EXTENTS = {
    "ids": Extent("tokens"),
    "requests": Extent("tokens"),
    "slots": Extent("tokens"),
    "starts": Extent("requests", 1),
    "lengths": Extent("requests"),
    "tables": Extent("requests"),
    "logit_rows": Extent("logits"),
}
PADS = {"ids": -1, "requests": -1, "slots": -1, "starts": "num_valid", "lengths": 0, "tables": -1, "logit_rows": 0}
SIZES = {
    **dict.fromkeys(("ids", "requests", "slots"), {0: "T"}),
    **dict.fromkeys(("lengths", "tables"), {0: "R"}),
    "starts": 0,
    "logit_rows": 0,
}

library = torch.library.Library("toygraph", "FRAGMENT")


def define(name: str, schema: str, kernel, fake, *tags: torch.Tag) -> None:
    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"toygraph::{name}", fake, lib=library)


def scale(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (1 + x.abs()) * weight


def store(x: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor) -> None:
    cache[torch.where(slots < 0, cache.shape[0] - 1, slots)] = x


def attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    requests: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    tables: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor,
) -> None:
    """Sum of the first ``lengths`` pages of the request, weighted by ``q``; ``total`` is the number of its rows.

    Elementwise maths without special functions: a row is bitwise the same in any batch.
    """
    request = requests.clamp(min=0).long()
    pages = tables[request].long()
    valid = (torch.arange(PAGES, device=q.device) < lengths[request].unsqueeze(1)) & (requests >= 0).unsqueeze(1)
    rows = torch.where(valid.unsqueeze(-1), cache[pages.clamp(min=0)], 0)
    out.copy_(q / (1 + q.abs()) * rows.sum(1))
    total.copy_((starts[request + 1] - starts[request]) * (requests >= 0))


define("scale", "(Tensor x, Tensor weight) -> Tensor", scale, lambda x, weight: torch.empty_like(x))
define("unsafe", "(Tensor x) -> Tensor", torch.clone, torch.empty_like, torch.Tag.cudagraph_unsafe)
define("store", "(Tensor x, Tensor slots, Tensor(a!) cache) -> ()", store, lambda x, slots, cache: None)
define(
    "attend",
    "(Tensor q, Tensor cache, Tensor requests, Tensor starts, Tensor lengths, Tensor tables, Tensor(a!) out, "
    "Tensor(b!) total) -> ()",
    attend,
    lambda *args: None,
)
trouble: list[Callable[[], None]] = []  # what the op "fragile" calls first


def fragile(x: torch.Tensor) -> torch.Tensor:
    for cause in trouble:
        cause()
    return x + 1


define("fragile", "(Tensor x) -> Tensor", fragile, torch.empty_like)


@dataclass
class Inputs:
    ids: torch.Tensor
    requests: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor
    num_valid: torch.Tensor
    logit_rows: torch.Tensor


pytree.register_dataclass(Inputs)


def make_inputs(tokens: int, requests: int, logits: int, seed: int = 0, device: str = "cpu") -> Inputs:
    g = torch.Generator().manual_seed(seed)
    owners = torch.arange(tokens) % max(requests, 1)
    owners = owners.sort().values
    counts = torch.bincount(owners, minlength=requests)[:requests]
    inputs = Inputs(
        ids=torch.randint(0, VOCAB, (tokens,), generator=g),
        requests=owners.int(),
        slots=torch.randperm(SLOTS, generator=g)[:tokens],
        starts=torch.cat((torch.zeros(1), counts.cumsum(0))).int(),
        lengths=torch.randint(1, PAGES + 1, (requests,), generator=g, dtype=torch.int32),
        tables=torch.randint(0, SLOTS, (requests, PAGES), generator=g, dtype=torch.int32),
        num_valid=torch.tensor([tokens], dtype=torch.int32),
        logit_rows=torch.randint(0, max(tokens, 1), (logits,), generator=g),
    )
    return pytree.tree_map(lambda t: t.to(device), inputs)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A matrix product whose rows do not depend on how many there are, bitwise."""
    return (x.unsqueeze(-1) * weight).sum(1)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN))
        self.o = nn.Parameter(torch.randn(HIDDEN, HIDDEN) / 4)
        self.register_buffer("cache", torch.randn(SLOTS + 1, HIDDEN))

    def forward(self, x: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        h = torch.ops.toygraph.scale(x, self.weight)
        torch.ops.toygraph.store(h, inputs.slots, self.cache)
        q = product(h, self.o)
        out, total = torch.empty_like(q), q.new_empty(q.shape[0])
        torch.ops.toygraph.attend(
            q, self.cache, inputs.requests, inputs.starts, inputs.lengths, inputs.tables, out, total
        )
        return x + product(out, self.o) + total.unsqueeze(1) / 8


class Model(nn.Module):
    """Returns logits ``[L, VOCAB]`` and streams ``[T, HIDDEN]``; ``extra`` names an op to run before the head."""

    def __init__(self, seed: int = 0, layers: int = 3, extra: str | None = None) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.embed = nn.Parameter(torch.randn(VOCAB, HIDDEN))
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Parameter(torch.randn(HIDDEN, VOCAB))
        self.extra = extra

    def forward(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        x = first = self.embed[inputs.ids.clamp(min=0)]
        for layer in self.layers:
            x = layer(x, inputs)
        x = x + first  # lives across all pieces
        if self.extra is not None:
            x = getattr(torch.ops.toygraph, self.extra)(x)
        return product(x[inputs.logit_rows], self.head), x

    def caches(self) -> list[torch.Tensor]:
        return [layer.cache[:SLOTS] for layer in self.layers]


def compiled(model: Model, boundary: tuple[str, ...] = BOUNDARY, backend: str = "eager") -> CompiledModel:
    inputs = make_inputs(5, 2, 3, device=str(model.embed.device))
    mark_unbacked_sizes(inputs, SIZES)
    result = compile_model(model, boundary, backend=backend)
    result.prepare(inputs)
    return result


@functools.cache
def _traced(boundary: tuple[str, ...], options: tuple[tuple[str, object], ...]) -> tuple[Model, CompiledModel, dict]:
    model = Model(**dict(options))
    return model, compiled(model, boundary), {name: t.clone() for name, t in model.state_dict().items()}


def shared(boundary: tuple[str, ...] = BOUNDARY, **options) -> tuple[Model, CompiledModel]:
    """A compiled model as new, traced once per test module. Whoever replaces its tensors must make one of their own."""
    model, result, state = _traced(boundary, tuple(sorted(options.items())))
    model.load_state_dict(state)
    result.wrap_pieces(lambda piece, call: call)
    return model, result


def static_inputs(ladder: Ladder, device: str = "cpu") -> StaticInputs:
    return StaticInputs(make_inputs(2, 1, 1, device=device), ladder, extents=EXTENTS, pads=PADS)


def captured(model, graphs, ladder: Ladder = LADDER, **options) -> CapturedStep:
    return CapturedStep(
        model,
        static_inputs(ladder, str(graphs.device)),
        ladder,
        graphs,
        arguments=lambda inputs: (inputs,),
        trim=("logits", "tokens"),
        **options,
    )


def no_prewarm() -> None:
    """For tests of something else."""


def compare(step: CapturedStep, model: Model, other: Model, steps=STEPS) -> None:
    """Bitwise: every step like an eager, unpadded step of ``other``, caches too."""
    for number, sizes in enumerate(steps):
        inputs = make_inputs(*sizes, seed=number)
        with torch.no_grad():
            expected = other(inputs)
        for actual, wanted in zip(step(inputs), expected, strict=True):
            assert torch.equal(actual, wanted), sizes
        for actual, wanted in zip(model.caches(), other.caches(), strict=True):
            assert torch.equal(actual, wanted), sizes
