"""MoE weights of the nano checkpoint in the layouts of the ops, and the recorded official intermediates."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from dsv4.ops._formats import decode_e8m0

ROOT = Path(__file__).resolve().parents[2]
NUM_EXPERTS = 16
LAYERS_OFFICIAL = load_file(ROOT / "tests/golden/layers_official.safetensors")
Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class LayerExperts:
    """``routed`` and ``shared`` are w13, w13_scale, w2, w2_scale; ``bias`` or ``table`` is empty."""

    routed: Four
    shared: Four
    gate: torch.Tensor
    bias: torch.Tensor
    table: torch.Tensor


@cache
def _tensors() -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted((ROOT / "assets/nano").glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys() if ".ffn." in name}
    return found


@cache
def experts(layer: int) -> LayerExperts:
    """FP4 routed experts, the FP8 shared expert and the router of one layer."""
    prefix = f"layers.{layer}.ffn."
    tensors = {name.removeprefix(prefix): t for name, t in _tensors().items() if name.startswith(prefix)}

    def stack(name: str, part: str) -> torch.Tensor:
        return torch.stack([tensors[f"experts.{e}.{name}.{part}"].view(torch.uint8) for e in range(NUM_EXPERTS)])

    def shared(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        scale = decode_e8m0(tensors[f"shared_experts.{name}.scale"].view(torch.uint8))
        return tensors[f"shared_experts.{name}.weight"], scale

    (w1, s1), (w2, s2), (w3, s3) = (shared(name) for name in ("w1", "w2", "w3"))
    w13, s13 = (torch.cat((stack("w1", part), stack("w3", part)), dim=1) for part in ("weight", "scale"))
    return LayerExperts(
        routed=(w13, s13, stack("w2", "weight"), stack("w2", "scale")),
        shared=(torch.cat((w1.view(torch.uint8), w3.view(torch.uint8))).view(w1.dtype), torch.cat((s1, s3)), w2, s2),
        gate=tensors["gate.weight"],
        bias=tensors.get("gate.bias", torch.empty(0)),
        table=tensors.get("gate.tid2eid", torch.empty(0, dtype=torch.int64)),
    )
