"""Steps whose pads and unowned cache bytes are poison: valid rows stay finite, and are the same under every poison.

Two requests are served: one whose history passes 128 and then 256 tokens, so that compressed entries of both ratios,
index picks, a second block and a window that has left its first page are all at work, and one of few tokens. Every
memory that they do not own is poison, and so are rows of their own pages that they have not reached.
"""

from collections.abc import Iterator, Sequence as Rows
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from dsv4.caches import ModelCaches
from dsv4.capture_stage import DraftInputs
from dsv4.engine import Engine
from dsv4.inputs import Segment, StepInputs
from dsv4.ops import _paged
from dsv4.runner import Sequence

from ..tiny_model import random_tokens
from .gpu_measure import Outputs, clones, num_different, placed

SHORT, LONG, LONGER = 5, 150, 272  # tokens: of the short request, and of the long one at first and in the end
CHUNK = 70
EAGER_PADS = 43  # rows


@dataclass(frozen=True)
class Poison:
    """What fills memory that a step must not see.

    Attributes:
        value: every float, those of FP8 pages included.
        code: every e4m3 code.
        scale: every E8M0 scale.
        length: of pad requests.
    """

    value: float
    code: int
    scale: int
    length: int


POISONS = (
    Poison(0.0, 0, 0, 0),
    Poison(float("nan"), 0x7F, 0xFF, -1),  # all of them NaN
    Poison(float("inf"), 0xFF, 0x7F, -4),
)


def poison_differences(engine: Engine, *, eager: bool = False) -> dict[str, dict[str, int]]:
    """By kind of step: elements that are not finite, and elements that differ between poisons.

    Under ``unowned``: bytes of pages and slots of neither request that a step wrote.

    Args:
        engine: with at least 3 requests, 512 tokens a sequence, a draft token, and pages for 3 such sequences.
        eager: call the model on padded inputs instead of replaying graphs.
    """
    results, written = zip(*(_results(engine, poison, eager) for poison in POISONS), strict=True)
    found = {"unowned": {"written": sum(written)}}
    for kind, first in results[0].items():
        found[kind] = {
            "not_finite": sum(int((~t.isfinite()).sum()) for result in results for t in result[kind]),
            "differing": sum(
                num_different(a, b) for result in results[1:] for a, b in zip(first, result[kind], strict=True)
            ),
        }
    return found


def all_clean(found: dict[str, dict[str, int]]) -> bool:
    return not any(count for counts in found.values() for count in counts.values())


@torch.no_grad()
def _results(engine: Engine, poison: Poison, eager: bool) -> tuple[dict[str, list[torch.Tensor]], int]:
    """Outputs by kind, and how many bytes of unowned pages changed."""
    runner, results = engine.runner, {}
    fill(runner.caches, poison)
    before = [_bytes(t).clone() for t in _unowned(engine)]
    with _pads(engine, poison):
        for kind, segments in _steps(engine, poison):
            inputs = runner.inputs(segments)
            made = _call(engine, "step", inputs, poison, eager)
            results.setdefault(kind, []).extend(made)
            drafted = replace(inputs, logit_rows=inputs.query_starts[1:].long() - 1)  # a draft per request
            made = _call(engine, "draft", DraftInputs(drafted, made[1]), poison, eager)
            results.setdefault(f"draft of {kind}", []).extend(made)
    after = map(_bytes, _unowned(engine))
    return results, sum(int((a != b).sum()) for a, b in zip(before, after, strict=True))


def _call(engine: Engine, function: str, inputs: StepInputs | DraftInputs, poison: Poison, eager: bool) -> Outputs:
    if eager:
        return _eager(engine, inputs, poison)
    step = engine.started.captured[function]
    step.inputs._last = None  # forget which rows hold pads: they are all written anew
    outputs = clones(step(inputs))
    if step.last_path is None or step.last_path.bucket is None:
        raise RuntimeError(f"a {function} among poison must be replayed, got {step.last_path}")
    return outputs


def _eager(engine: Engine, inputs: StepInputs | DraftInputs, poison: Poison) -> Outputs:
    runner = engine.runner
    step = inputs.step if isinstance(inputs, DraftInputs) else inputs
    rows, requests = len(step.token_ids), len(step.seq_lens)
    padded = runner.inputs([], num_rows=rows + EAGER_PADS, num_requests=requests + 2)
    padded.seq_lens.fill_(poison.length)
    padded.query_starts.fill_(rows)
    for name in ("token_ids", "positions", "row_requests", "window_slots", "query_starts", "seq_lens", "block_tables",
                 "window_tables", "state_slots"):  # fmt: skip
        own = getattr(step, name)
        getattr(padded, name)[: len(own)] = own
    padded = replace(padded, num_valid=step.num_valid, logit_rows=step.logit_rows)
    if not isinstance(inputs, DraftInputs):
        logits, streams = runner.model.forward_streams(padded, runner.caches)
    else:
        streams = inputs.streams.new_full((rows + EAGER_PADS, *inputs.streams.shape[1:]), poison.value)
        streams[:rows] = inputs.streams
        logits, streams = runner.model.forward_mtp(padded, runner.caches, streams)
    return logits, streams[:rows].clone()


@contextmanager
def _pads(engine: Engine, poison: Poison) -> Iterator[None]:
    """Static inputs have pads of ``poison`` inside the block. Ids of pads are −1 in any case."""
    values = {"seq_lens": poison.length, "step.seq_lens": poison.length, "streams": poison.value}
    inputs = [step.inputs for step in engine.started.captured.values()]
    before = [dict(each._pads) for each in inputs]
    for each in inputs:
        each._pads |= {name: value for name, value in values.items() if name in each._pads}
    try:
        yield
    finally:
        for each, pads in zip(inputs, before, strict=True):
            each._pads, each._last = pads, None


# ---- steps -----------------------------------------------------------------------------------------------------------


def owners(engine: Engine) -> tuple[Sequence, Sequence]:
    """The long and the short request. Page 0 and slot 0, where a clamped index lands, belong to neither."""
    return placed(engine, 1), placed(engine, 2)


def _steps(engine: Engine, poison: Poison) -> Iterator[tuple[str, list[Segment]]]:
    """Kind and segments of every step; what happens between steps happens when the next one is asked for."""
    (long, short), seed = owners(engine), 0
    most, verified = engine.settings.token_budget, 1 + engine.settings.draft_tokens

    def rows(sequence: Sequence, count: int, logits: Rows[int] | None = None) -> Segment:
        nonlocal seed
        seed += 1
        tokens = random_tokens(count, engine.config.vocab_size, seed)
        return sequence.segment(tokens, (count - 1,) if logits is None else tuple(logits))

    while long.length < LONG:
        parts = [rows(long, min(LONG - long.length, most - SHORT))]
        yield "prefill", parts if short.length else [*parts, rows(short, SHORT)]
    yield "mixed", [rows(long, 1), rows(short, min(CHUNK, most - 1))]
    yield "decode", [rows(long, 1), rows(short, 1)]
    yield "verify", [rows(long, verified, range(verified)), rows(short, verified, range(verified))]
    while long.length < LONGER:
        yield "mixed", [rows(short, 1), rows(long, min(LONGER - long.length, most - 1))]
    for layer in (*engine.runner.caches.layers, *engine.runner.caches.mtp):
        _fill_cache(layer.window[long.first_page : long.first_page + 1], _paged.HEAD_DIM, poison)
    decoding = rows(long, 1)
    yield "decode", [replace(decoding, window_pages=(-1, *decoding.window_pages[1:])), rows(short, 1)]


# ---- memory ----------------------------------------------------------------------------------------------------------


def fill(caches: ModelCaches, poison: Poison) -> None:
    """Every cache of every layer."""
    for layer in (*caches.layers, *caches.mtp):
        _fill_cache(layer.window, _paged.HEAD_DIM, poison)
        _fill_cache(layer.entries, _paged.HEAD_DIM, poison)
        _fill_cache(layer.index_entries, _paged.INDEX_DIM, poison)
        layer.state.fill_(poison.value)
        layer.index_state.fill_(poison.value)


def _fill_cache(cache: torch.Tensor, fp8_dim: int, poison: Poison) -> None:
    if cache.dtype != torch.uint8:
        cache.fill_(poison.value)
        return
    cache.fill_(poison.code)  # bytes between pages too
    rows = _paged.page_rows(cache, fp8_dim)
    if fp8_dim == _paged.INDEX_DIM:
        _paged._index_views(cache, rows)[1].fill_(poison.value)
        return
    data, scale = _paged._head_views(cache, rows)
    data[..., _paged.NOPE_DIM :].view(torch.bfloat16).fill_(poison.value)
    scale.fill_(poison.scale)


def _unowned(engine: Engine) -> Iterator[torch.Tensor]:
    """Copies of the pages and slots that neither request has."""
    owned, blocks = [1, 2], engine.settings.max_blocks
    for layer in (*engine.runner.caches.layers, *engine.runner.caches.mtp):
        for tensor, each in zip(layer.tensors(), (2 * blocks, blocks, blocks, 1, 1), strict=True):
            kept = [row for row in range(len(tensor)) if row // each not in owned]
            yield tensor[torch.tensor(kept, dtype=torch.int64, device=tensor.device)]


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().view(-1).view(torch.uint8)
