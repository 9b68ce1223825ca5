"""Sparse attention of neighbouring rows over shared keys: the batched form of ``sparse_attention``'s row-by-row maths.

Rows of one request at close positions see almost the same keys, so a tile of rows reads the union of their keys once
and masks. Probabilities are still rounded relative to the running maximum of each row's own blocks of 64 list places,
as the row-by-row form does; only the order of fp32 sums differs.
"""

from typing import NamedTuple

import torch

from . import _paged

KEY_BLOCK = 64


class TileKeys(NamedTuple):
    """Keys that a tile of rows shares.

    Attributes:
        values: ``[keys, dim]`` fp32.
        place: ``[rows, keys]`` place of each key in the row's own key list; −1 where the row does not see it.
    """

    values: torch.Tensor
    place: torch.Tensor


class TilePlaces(NamedTuple):
    """The union of the keys of a tile: window positions and entries, and each row's place for every one of them."""

    window_index: torch.Tensor  # [window keys] positions
    entry_index: torch.Tensor  # [entry keys] entry numbers
    place: torch.Tensor  # [rows, window keys + entry keys]

    def read(
        self,
        window_slots: torch.Tensor,
        entry_slots: torch.Tensor,
        window_cache: torch.Tensor,
        entry_cache: torch.Tensor,
        dim: int,
    ) -> TileKeys:
        """Read the keys at ``window_slots [1, window keys]`` and ``entry_slots [1, entry keys]``; −1 is unseen."""
        values = torch.cat(
            (
                _paged.read(window_cache, window_slots[0], dim).float(),
                _paged.read(entry_cache, entry_slots[0], dim).float(),
            )
        )
        absent = torch.cat((window_slots, entry_slots), dim=1) < 0
        return TileKeys(values, self.place.masked_fill(absent, -1))


def tile_places(positions: torch.Tensor, picks: torch.Tensor | None, visible: torch.Tensor, window: int) -> TilePlaces:
    """Keys of rows of one request.

    Args:
        positions: ``[rows]`` their positions.
        picks: ``[rows, K]`` entries they chose; ``None`` = all they may see.
        visible: ``[rows]`` number of entries each row may see.
        window: positions each row sees, itself included.
    """
    device = positions.device
    first = (positions - window + 1).clamp_min(0).unsqueeze(1)
    window_index = torch.arange(int(first.min()), int(positions.max()) + 1, device=device)
    inside = (window_index >= first) & (window_index <= positions.unsqueeze(1))
    window_place = torch.where(inside, window_index - first, -1)
    entry_index = torch.arange(int(visible.max()), device=device)
    if picks is not None:
        rank = _entry_ranks(picks, visible, entry_index.numel())
    else:
        rank = torch.where(entry_index < visible.unsqueeze(1), entry_index, -1)
    entry_place = torch.where(rank >= 0, rank + window, -1)
    return TilePlaces(window_index, entry_index, torch.cat((window_place, entry_place), dim=1))


def _entry_ranks(picks: torch.Tensor, visible: torch.Tensor, num_entries: int) -> torch.Tensor:
    """Rank of entries ``0 … num_entries - 1`` in each row's picks, −1 where not picked or not visible."""
    picks = picks.long()
    usable = (picks >= 0) & (picks < visible.unsqueeze(1))
    ranks = torch.full((picks.shape[0], num_entries + 1), -1, device=picks.device)  # the last column takes the rest
    rank = torch.arange(picks.shape[1], device=picks.device).expand_as(picks)
    ranks.scatter_(1, torch.where(usable, picks, num_entries), torch.where(usable, rank, -1))
    return ranks[:, :num_entries]


def attend_tile(q: torch.Tensor, keys: TileKeys, sink: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention output ``[rows, H, dim]`` in q's dtype and fp32 log-sum-exp ``[rows, H]`` without the sink."""
    rows, heads, dim = q.shape
    seen = (keys.place >= 0).unsqueeze(1)
    scores = (q.float().reshape(rows * heads, dim) @ keys.values.t()).view(rows, heads, -1).mul_(scale)
    scores.masked_fill_(~seen, -torch.inf)
    maximum = scores.amax(-1) if scores.shape[2] else scores.new_full((rows, heads), -torch.inf)
    base = maximum.masked_fill(maximum == -torch.inf, 0.0).unsqueeze(-1)
    total = torch.exp(scores - base).sum(-1)
    if q.dtype == torch.float32:
        weights = torch.exp(scores - base)
    else:
        running = _running_maximum(scores, keys.place)
        weights = torch.exp(scores - running).to(q.dtype).float() * torch.exp(running - base)
    acc = (weights.view(rows * heads, -1) @ keys.values).view(rows, heads, dim)
    empty = maximum == -torch.inf
    denominator = total + torch.exp(sink - base.squeeze(-1))
    out = (acc / denominator.unsqueeze(-1)).masked_fill_(empty.unsqueeze(-1), 0.0)
    return out.to(q.dtype), maximum + total.log()


def _running_maximum(scores: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Maximum of each row's scores up to the end of each key's block, ``[rows, H, keys]``; 0 before any key."""
    block = torch.div(place, KEY_BLOCK, rounding_mode="floor")
    maxima = []
    for number in range(int(block.max()) + 1 if block.numel() else 0):
        inside = (block == number).unsqueeze(1)
        best = scores.masked_fill(~inside, -torch.inf).amax(-1)
        maxima.append(torch.maximum(maxima[-1], best) if maxima else best)
    if not maxima:
        return torch.zeros_like(scores)
    stacked = torch.stack(maxima, dim=-1)
    stacked = stacked.masked_fill(stacked == -torch.inf, 0.0)
    return stacked.gather(2, block.clamp_min(0).unsqueeze(1).expand(-1, scores.shape[1], -1))
