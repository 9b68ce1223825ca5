"""Routing in plain Python, and one MoE layer of nano with its recorded routing."""

import math
from typing import NamedTuple

import torch

from . import plain_mhc as plain


def score(logit: float) -> float:
    """``sqrt(log(1 + exp(logit)))``."""
    return math.sqrt(logit + math.log1p(math.exp(-logit)) if logit > 0 else math.log1p(math.exp(logit)))


def weights(logits: list[float], chosen: list[int], scale: float) -> list[float]:
    values = [score(logits[e]) for e in chosen]
    return [scale * v / math.fsum(values) for v in values]


def all_rows(logits: torch.Tensor) -> torch.Tensor:
    """``num_valid`` of a step without pads."""
    return torch.tensor([logits.shape[0]], dtype=torch.int32)


class NanoLayer(NamedTuple):
    """Recorded official intermediates of one layer and its router parameters."""

    name: str
    golden: dict[str, torch.Tensor]
    gate: torch.Tensor
    bias: torch.Tensor
    table: torch.Tensor

    @property
    def token_ids(self) -> torch.Tensor:
        return self.golden["p140.ids"]

    def logits(self, source: str) -> torch.Tensor:
        return self.golden[f"{self.name}.{source}"].float() @ self.gate.float().T

    def assert_recorded(self, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Equal experts as sets (the recording leaves their order open) and their weights to fp32 rounding."""
        want_ids, want = (self.golden[f"{self.name}.ffn.expert_{part}"] for part in ("ids", "weights"))
        order, want_order = ids.argsort(1), want_ids.argsort(1)
        assert torch.equal(ids.gather(1, order), want_ids.gather(1, want_order))
        torch.testing.assert_close(weights.gather(1, order), want.gather(1, want_order), rtol=2e-6, atol=0)


def nano_layer(layer: int) -> NanoLayer:
    gate = f"layers.{layer}.ffn.gate"
    hashed = layer < 3
    return NanoLayer(
        name=f"p140.layer{layer}",
        golden=plain.golden("layers_official"),
        gate=plain.nano(f"{gate}.weight"),
        bias=torch.empty(0) if hashed else plain.nano(f"{gate}.bias"),
        table=plain.nano(f"{gate}.tid2eid") if hashed else torch.empty(0, 6, dtype=torch.int64),
    )
