"""Building blocks shared by the sublayers: weight lookup, projections, hyper-connection sites.

Legend: T tokens, M streams, D hidden.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from . import ops
from .config import ModelConfig
from .execution import Execution


@dataclass(frozen=True)
class WeightView:
    """The kernel-layout weights below one prefix, e.g. ``layers.3.attn``."""

    weights: Mapping[str, torch.Tensor]
    prefix: str = ""

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.weights[self._full(name)]

    def sub(self, name: str) -> "WeightView":
        return WeightView(self.weights, self._full(name))

    def _full(self, name: str) -> str:
        return f"{self.prefix}.{name}" if self.prefix else name


class Buffers(nn.Module):
    """A module whose weights are buffers outside the state dict: loading goes through ``dsv4.weights`` alone."""

    def hold(self, **tensors: torch.Tensor) -> None:
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)


class Activation(Buffers):
    """Quantises the input of FP8 products once for all its consumers; in ``exact`` numerics it passes unchanged."""

    def __init__(self, execution: Execution, device: torch.device) -> None:
        super().__init__()
        self.quantized = execution.quantized
        self.hold(no_scale=torch.empty(0, dtype=torch.float32, device=device))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``x [T, K]`` act -> (e4m3 codes, fp32 scales ``[T, K/128]``), or (``x``, empty)."""
        if self.quantized:
            return ops.quant_fp8(x)
        return x, self.no_scale


class Projection(Buffers):
    """One FP8 matrix of the checkpoint (``official``), or its dequantised values (``exact``).

    ``decides``: the product leads to a discrete choice alone, which no backend may change: ``fp8_linear_decoded``.
    """

    def __init__(self, execution: Execution, view: WeightView, *, decides: bool = False) -> None:
        super().__init__()
        self.execution, self.decides = execution, decides
        self.hold(weight=view["weight"], scale=view["scale"])

    def forward(self, x: torch.Tensor, x_scale: torch.Tensor) -> torch.Tensor:
        """``[T, in]`` as :class:`Activation` returned it -> ``[T, out]`` act."""
        dtype, deterministic = self.execution.dtype, self.execution.deterministic
        if self.execution.quantized:
            product = ops.fp8_linear_decoded if self.decides else ops.fp8_linear
            return product(x, x_scale, self.weight, self.scale, dtype=dtype, deterministic=deterministic)
        return ops.linear(x, self.weight, dtype=dtype, deterministic=deterministic)


class HyperSite(Buffers):
    """One manifold-constrained hyper-connection site: mixing weights, and the norm of the sublayer it feeds."""

    def __init__(self, config: ModelConfig, execution: Execution, view: WeightView, site: str) -> None:
        super().__init__()
        self.hold(
            fn=view[f"hc_{site}_fn"],
            scale=view[f"hc_{site}_scale"],
            base=view[f"hc_{site}_base"],
            norm=view[f"{site}_norm.weight"],
        )
        self.numbers = {
            "eps": config.rms_norm_eps,
            "hc_eps": config.hc_eps,
            "sinkhorn_iters": config.hc_sinkhorn_iters,
            "deterministic": execution.deterministic,
        }

    def pre(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``[T, M, D]`` -> sublayer input ``[T, D]``, ``post [T, M]``, ``comb [T, M, M]``."""
        return ops.mhc_pre(streams, self.fn, self.scale, self.base, self.norm, **self.numbers)

    def post_pre(
        self, y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mix the previous sublayer's output into the streams, then collapse them for this site's sublayer."""
        return ops.mhc_post_pre(y, streams, post, comb, self.fn, self.scale, self.base, self.norm, **self.numbers)


class HyperHead(Buffers):
    """Collapse of the final streams, with the final norm fused."""

    def __init__(self, config: ModelConfig, execution: Execution, view: WeightView) -> None:
        super().__init__()
        self.hold(
            fn=view["hc_head_fn"], scale=view["hc_head_scale"], base=view["hc_head_base"], norm=view["norm.weight"]
        )
        self.numbers = {
            "eps": config.rms_norm_eps,
            "hc_eps": config.hc_eps,
            "deterministic": execution.deterministic,
        }

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """``[L, M, D]`` -> ``[L, D]`` normalised."""
        return ops.mhc_head(streams, self.fn, self.scale, self.base, self.norm, **self.numbers)
