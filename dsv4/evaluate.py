"""Evaluation on recorded data: negative log-likelihood per window, last-token logits, sublayer comparison.

Legend: T tokens, V vocabulary. All functions place one request at a time at the start of the caches.
"""

import re
from collections.abc import Iterator, Mapping, Sequence as Rows
from dataclasses import dataclass

import torch

from .config import ModelConfig
from .inputs import check_token_ids
from .prompts import TokenIds, plain_ids
from .runner import Runner, Sequence


def check_prompt(runner: Runner, token_ids: Rows[int], subject: str) -> None:
    """Raise ``ValueError`` for an empty prompt, one longer than the cache, or a token id out of range."""
    if not token_ids:
        raise ValueError(f"{subject} must have at least 1 token, got 0")
    if len(token_ids) > runner.max_tokens:
        raise ValueError(f"{subject} must have at most {runner.max_tokens} tokens, got {len(token_ids)}")
    check_token_ids(token_ids, runner.model.config.vocab_size, subject)


def prefill(
    runner: Runner, token_ids: Rows[int], *, chunk: int | None = None, all_logits: bool = False
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Feed a fresh sequence in chunks; yields each chunk's logits (its last row, or all rows) and streams."""
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, got {chunk}")
    sequence = Sequence()
    for start in range(0, len(token_ids), chunk or len(token_ids)):
        part = token_ids[start : start + (chunk or len(token_ids))]
        rows = range(len(part)) if all_logits else (len(part) - 1,)
        yield runner.run([sequence.segment(part, rows)])


def last_logits(runner: Runner, token_ids: TokenIds, *, chunk: int | None = None) -> torch.Tensor:
    """fp32 logits ``[V]`` after ``token_ids``, prefilled ``chunk`` tokens at a time."""
    token_ids = plain_ids(token_ids, "prompt must be")
    check_prompt(runner, token_ids, "prompt")
    for logits, _ in prefill(runner, token_ids, chunk=chunk):
        pass
    return logits[-1]


@dataclass(frozen=True)
class Score:
    """Mean negative log-likelihood in nats per token; ``mtp_nll`` is ``None`` when it was not asked for."""

    nll: float
    nll_per_window: list[float]
    mtp_nll: float | None
    mtp_nll_per_window: list[float] | None


def window_starts(num_tokens: int, window: int) -> range:
    """Starts ``k`` of the scored windows: multiples of ``window`` with ``k + window + 2 < num_tokens``."""
    return range(0, max(num_tokens - window - 2, 0), window)


def check_mtp(config: ModelConfig) -> None:
    if not config.num_nextn_predict_layers:
        raise ValueError("mtp scoring needs a model with an MTP block, got num_nextn_predict_layers 0")


def score(runner: Runner, token_ids: TokenIds, *, window: int, mtp: bool = False) -> Score:
    """NLL of ``ids[k+1 … k+window]`` given ``ids[k … k+window-1]``, for every window start ``k``.

    With ``mtp`` the MTP block, fed the streams at position j and token j+1, is scored on token j+2.

    Raises:
        ValueError: a non-positive window, too few tokens for one window, a token id out of range, or a window longer
            than the cache.
    """
    if window < 1:
        raise ValueError(f"window must be at least 1 token, got {window}")
    if window > runner.max_tokens:
        raise ValueError(f"window must be at most {runner.max_tokens} tokens, got {window}")
    token_ids = plain_ids(token_ids, "tokens must be")
    starts = window_starts(len(token_ids), window)
    if not starts:
        raise ValueError(f"tokens must be at least {window + 3} for one window of {window}, got {len(token_ids)}")
    if mtp:
        check_mtp(runner.model.config)
    check_token_ids(token_ids, runner.model.config.vocab_size, "tokens")
    losses, draft_losses = [], []
    for k in starts:
        rows = range(window)
        sequence = Sequence()
        logits, streams = runner.run([sequence.segment(token_ids[k : k + window], rows)])
        losses.append(_nll(logits, token_ids[k + 1 : k + window + 1]))
        if mtp:
            segment = sequence.segment(token_ids[k + 1 : k + window + 1], rows, start=0)
            logits, _ = runner.run_draft([segment], streams)
            draft_losses.append(_nll(logits, token_ids[k + 2 : k + window + 2]))

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    return Score(mean(losses), losses, mean(draft_losses) if mtp else None, draft_losses if mtp else None)


def _nll(logits: torch.Tensor, targets: Rows[int]) -> float:
    target = torch.tensor(targets, device=logits.device)
    return torch.nn.functional.cross_entropy(logits.double(), target).item()


@dataclass(frozen=True)
class Comparison:
    """Distance of sublayers run alone on recorded inputs to their recorded outputs.

    Attributes:
        layers: per recorded name, the relative RMS distance (or the share of changed picks).
        worst: largest value per kind: ``attn_out``, ``ffn_out``, ``index_score``, ``picks_changed``.
    """

    layers: dict[str, float]
    worst: dict[str, float]


_RECORD = re.compile(r"^(p\d+)\.layer(\d+)\.(attn|ffn)_in$")
_OUTPUTS = {"attn": ("attn_out", "attn.indexer.score", "attn.indexer.topk"), "ffn": ("ffn_out",)}
KINDS = ("attn_out", "ffn_out", "index_score", "picks_changed")


def relative_rms(got: torch.Tensor, want: torch.Tensor) -> float:
    """``rms(got - want) / rms(want)`` over the elements finite in ``want``."""
    if got.shape != want.shape:
        raise ValueError(f"recorded values must have shape {list(got.shape)}, got {list(want.shape)}")
    got = got.to(want.device)
    finite = want.isfinite()
    got, want = got[finite].double(), want[finite].double()
    return ((got - want).square().mean().sqrt() / want.square().mean().sqrt()).item()


def compare(runner: Runner, recorded: Mapping[str, torch.Tensor]) -> Comparison:
    """Run every sublayer named in ``recorded`` alone (positions 0…T−1, fresh caches) and measure its distance.

    Args:
        recorded: tensors by name: ``pN.ids``, ``pN.layerI.attn_in`` / ``attn_out`` / ``ffn_in`` / ``ffn_out`` and, for
            ratio-4 layers, ``attn.indexer.score`` and ``attn.indexer.topk``.

    Raises:
        ValueError: no recorded sublayer, one that the model does not have or that does not fit the caches, or an input
            without an output to compare.
    """
    found = [m for m in map(_RECORD.match, recorded) if m]
    if not found:
        raise ValueError(f"layers file must hold names like 'p40.layer2.attn_in', got {sorted(recorded)[:5]}")
    layers: dict[str, float] = {}
    for match in found:
        prompt, layer, kind = match[1], int(match[2]), match[3]
        if layer >= len(runner.model.blocks):
            raise ValueError(f"{match[0]}: layer must be in [0, {len(runner.model.blocks)}), got {layer}")
        if f"{prompt}.ids" not in recorded:
            raise ValueError(f"{match[0]}: the file must also hold {prompt}.ids")
        if recorded[f"{prompt}.ids"].dim() != 1:
            raise ValueError(f"{prompt}.ids must have shape [tokens], got {list(recorded[f'{prompt}.ids'].shape)}")
        token_ids = recorded[f"{prompt}.ids"].tolist()
        check_prompt(runner, token_ids, f"{prompt}.ids")
        base = f"{prompt}.layer{layer}"
        x = recorded[match[0]]
        if x.shape != (len(token_ids), runner.model.config.hidden_size):
            raise ValueError(
                f"{match[0]} must have shape {[len(token_ids), runner.model.config.hidden_size]}, got {list(x.shape)}"
            )
        _check_outputs(match[0], [f"{base}.{name}" for name in _OUTPUTS[kind]], x.shape, recorded)
        inputs = runner.inputs([Sequence().segment(token_ids)])
        x = x.to(runner.model.embed.device, runner.model.execution.dtype)
        measure = _compare_attention if kind == "attn" else _compare_ffn
        layers.update(measure(runner, layer, base, x, inputs, recorded))
    worst: dict[str, float] = {}
    for name, value in layers.items():
        kind = next(k for k in KINDS if name.endswith(k))
        worst[kind] = max(worst.get(kind, 0.0), value)
    return Comparison(layers, worst)


def _check_outputs(source: str, names: list[str], shape: torch.Size, recorded: Mapping[str, torch.Tensor]) -> None:
    """At least one of ``names`` is there; the first (the sublayer's output) has the shape of the input."""
    found = [name for name in names if name in recorded]
    if not found:
        raise ValueError(f"{source}: the file must also hold {' or '.join(names)}")
    for name in found:
        got = recorded[name].shape
        if name == names[0] and got != shape:
            raise ValueError(f"{name} must have shape {list(shape)}, got {list(got)}")
        if len(got) != 2 or got[0] != shape[0]:
            raise ValueError(f"{name} must be a matrix of {shape[0]} rows, got shape {list(got)}")


@torch.no_grad()
def _compare_ffn(runner, layer, base, x, inputs, recorded) -> dict[str, float]:
    caches = runner.caches
    out = runner.model.blocks[layer].ffn(x, inputs, caches.load_enabled, caches.load_counts[layer])
    name = f"{base}.ffn_out"
    return {name: relative_rms(out, recorded[name])} if name in recorded else {}


@torch.no_grad()
def _compare_attention(runner, layer, base, x, inputs, recorded) -> dict[str, float]:
    attention, cache = runner.model.blocks[layer].attn, runner.caches.layers[layer]
    out = attention(x, inputs, cache)
    found = {}
    if f"{base}.attn_out" in recorded:
        found[f"{base}.attn_out"] = relative_rms(out, recorded[f"{base}.attn_out"])
    want = recorded.get(f"{base}.attn.indexer.score")
    if want is not None:
        scores = attention.index_scores(x, inputs, cache)[:, : want.shape[1]]
        found[f"{base}.attn.index_score"] = relative_rms(scores.float(), want.float())
    want = recorded.get(f"{base}.attn.indexer.topk")
    if want is not None:
        picks = attention.index_picks(x, inputs, cache)
        changed = picks_changed(picks, want, attention.ratio)
        if changed is not None:
            found[f"{base}.attn.picks_changed"] = changed
    return found


def picks_changed(got: torch.Tensor, want: torch.Tensor, ratio: int) -> float | None:
    """Mean of ``1 - |intersection| / |union|`` of the picked entries over the rows that had a choice.

    Row t (position t) has a choice when more entries are visible, ``(t + 1) // ratio``, than are picked; without such
    a row there is nothing to compare and the result is ``None``.
    """
    shares = []
    for position, (got_row, want_row) in enumerate(zip(got.tolist(), want.tolist(), strict=True)):
        if (position + 1) // ratio > len(want_row):
            a, b = {p for p in got_row if p >= 0}, {p for p in want_row if p >= 0}
            shares.append(1 - len(a & b) / len(a | b))
    return sum(shares) / len(shares) if shares else None
