"""Sampling parameters and the choice of the next token.

Shapes: logits ``[L, V]`` fp32, one row per wanted token; ids ``[L]`` int64 on the device of the logits.
Numerics: softmax in fp64, row by row; sums of probabilities in integer units of 2^-52, so that nucleus and inverse CDF
depend on no order of summation. The only random number of a token is a function of the request's seed and of the
token's index in its output, so that the text of a request depends neither on the batch it shares, nor on being
preempted and recomputed, nor on how many tokens a step verifies. Nothing here waits for a GPU.
Ties: greedy takes the smallest id; the nucleus keeps smaller ids first.
Errors: ``ValueError`` naming the field, its rule and its value.
"""

import hashlib
import math
import secrets
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .options import MAX_SEED, is_seed, require_left_out
from .transfer import upload

_FEW_ROWS, _PART = 32, 256  # rows, and tokens of a part
_UNIFORM_BITS = 52  # u <= 1 - 2^-52: u * total stays below total after rounding to fp64


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it ends."""

    temperature: float = 0.0  # 0: greedy, without top_p and seed
    top_p: float = 1.0  # smallest set of most probable tokens that reaches this mass; 1: all tokens
    seed: int | None = None  # None: drawn when the request is admitted (with_seed)
    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()  # end the output, and are its last token
    ignore_eos: bool = False  # the end-of-sentence token does not end the output

    def __post_init__(self) -> None:
        stops = self.stop_token_ids
        finite = _is_number(self.temperature) and 0 <= self.temperature < math.inf
        ids = isinstance(stops, tuple) and all(_is_int(token) and token >= 0 for token in stops)
        _require(finite, "temperature", "a finite number >= 0", self.temperature)
        _require(_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", "in (0, 1]", self.top_p)
        _require(self.seed is None or is_seed(self.seed), "seed", "None or in [0, 2**63)", self.seed)
        positive = _is_int(self.max_new_tokens) and self.max_new_tokens > 0
        _require(positive, "max_new_tokens", "an int >= 1", self.max_new_tokens)
        _require(ids, "stop_token_ids", "a tuple of ints >= 0", stops)
        _require(isinstance(self.ignore_eos, bool), "ignore_eos", "a bool", self.ignore_eos)
        if self.greedy:
            require_left_out(self, ("top_p", "seed"), "with temperature 0")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def with_seed(self) -> "SamplingParams":
        """The same parameters, with a fresh random seed if they need one and have none."""
        return self if self.greedy or self.seed is not None else replace(self, seed=secrets.randbelow(MAX_SEED))


def uniform(seed: int, step: int) -> float:
    """A number in [0, 1) that is a pure function of a request's seed and the index of the token in its output."""
    digest = hashlib.sha256(struct.pack("<QQ", seed, step)).digest()
    return (int.from_bytes(digest[:8], "little") >> (64 - _UNIFORM_BITS)) / 2**_UNIFORM_BITS


def sample(logits: torch.Tensor, params: Sequence[SamplingParams], steps: Sequence[int]) -> torch.Tensor:
    """Choose one token per row.

    Args:
        logits: ``[L, V]`` fp32.
        params: of each row's request.
        steps: index in its request's output of the token that each row chooses.

    Returns:
        ``[L]`` int64 ids on the device of the logits.
    """
    _check_rows(logits, params)
    if len(steps) != len(params):
        raise ValueError(f"steps must have one entry for each of {len(params)} rows, got {len(steps)}")
    ids = _argmax(logits)
    drawn = [row for row, request in enumerate(params) if not request.greedy]
    if not drawn:
        return ids
    numbers = [_uniform_of(params[row], steps[row]) for row in drawn]
    rows = upload(drawn, torch.int64, logits.device)
    mass = _units(_nucleus(logits.index_select(0, rows), [params[row] for row in drawn])).cumsum(dim=-1)
    total = mass[:, -1:]
    target = upload(numbers, torch.float64, logits.device).unsqueeze(-1) * total  # below total: see _UNIFORM_BITS
    chosen = torch.searchsorted(mass, target.long(), right=True)  # first id beyond the mass
    return ids.index_copy(0, rows, chosen.squeeze(-1))


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """The first of several maxima of each row ``[L]``. A GPU reduces one row with one program: few rows go in parts."""
    rows, vocabulary = logits.shape
    if not 0 < rows <= _FEW_ROWS or vocabulary % _PART:
        return torch.argmax(logits, dim=-1)
    best, place = logits.reshape(rows, -1, _PART).max(dim=-1)
    part = best.argmax(dim=-1, keepdim=True)
    return torch.add(place.gather(1, part), part, alpha=_PART).squeeze(1)


def probabilities(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The distribution ``[L, V]`` fp64 from which ``sample`` chooses; a greedy row is one-hot."""
    _check_rows(logits, params)
    result = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    result.scatter_(1, _argmax(logits).unsqueeze(-1), 1.0)
    drawn = [row for row, request in enumerate(params) if not request.greedy]
    if drawn:
        rows = upload(drawn, torch.int64, logits.device)
        result.index_copy_(0, rows, _distribution(logits.index_select(0, rows), [params[row] for row in drawn]))
    return result


def _units(weights: torch.Tensor) -> torch.Tensor:
    """Probabilities as int64 multiples of 2^-52: integer sums are the same in every order, on every device."""
    return (weights * 2.0**_UNIFORM_BITS).round().long()


def _distribution(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    weights = _nucleus(logits, params)
    full = upload([request.top_p == 1 for request in params], torch.bool, logits.device).unsqueeze(-1)
    return torch.where(full, weights, weights / weights.sum(dim=-1, keepdim=True))  # full rows stay bitwise alone


def _nucleus(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Probabilities of all tokens, with zeros outside the nucleus; each row is the same in every batch, bitwise."""

    def column(values: Sequence[float]) -> torch.Tensor:
        return upload(values, torch.float64, logits.device).unsqueeze(-1)

    temperature = column([request.temperature for request in params])
    shifted = logits.double() - logits.amax(dim=-1, keepdim=True).double()  # before the division: no overflow when cold
    weights = torch.softmax(shifted / temperature, dim=-1)
    if all(request.top_p == 1 for request in params):
        return weights
    top_p = column([request.top_p for request in params])
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    units = _units(ordered)
    mass_before = (units.cumsum(dim=-1) - units).double() * 2.0**-_UNIFORM_BITS  # exact: below 2^53
    kept = torch.zeros_like(weights, dtype=torch.bool).scatter_(1, order, (mass_before < top_p) | (top_p == 1))
    return torch.where(kept, weights, 0.0)


def _uniform_of(params: SamplingParams, step: int) -> float:
    if params.seed is None:
        raise ValueError("seed must be set before sampling (SamplingParams.with_seed), got None")
    if step < 0:
        raise ValueError(f"steps must be >= 0, got {step}")
    return uniform(params.seed, step)


def _check_rows(logits: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    if logits.dim() != 2 or logits.dtype != torch.float32:
        raise ValueError(f"logits must be [rows, vocabulary] float32, got {list(logits.shape)} {logits.dtype}")
    if len(params) != logits.shape[0]:
        raise ValueError(f"params must have one entry for each of {logits.shape[0]} rows, got {len(params)}")


def _require(holds: bool, name: str, rule: str, value: object) -> None:
    if not holds:
        raise ValueError(f"{name} must be {rule}, got {value!r}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
