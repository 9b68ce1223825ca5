"""Mixture of experts of one layer: hash or top-k routing, routed experts, one shared expert.

Legend: T tokens, D hidden, E experts, K experts per token.
"""

import torch

from . import ops
from .config import ModelConfig
from .execution import Execution
from .inputs import StepInputs
from .layers import Activation, Buffers, WeightView


class Router(Buffers):
    """Expert ids and weights of every row; ``hashed`` layers look the ids up by token id."""

    def __init__(self, config: ModelConfig, execution: Execution, view: WeightView, *, hashed: bool) -> None:
        super().__init__()
        self.hashed, self.deterministic = hashed, execution.deterministic
        self.topk, self.route_scale = config.num_experts_per_tok, config.routed_scaling_factor
        self.hold(weight=view["weight"], selector=view["tid2eid"] if hashed else view["bias"])

    def forward(self, x: torch.Tensor, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T, D]`` -> ids ``[T, K]`` int32 (−1 for pads) and weights ``[T, K]`` fp32."""
        logits = ops.linear(x, self.weight, dtype=torch.float32, deterministic=self.deterministic)
        if self.hashed:
            return ops.route_hash(logits, self.selector, inputs.token_ids, inputs.num_valid, scale=self.route_scale)
        return ops.route_topk(logits, self.selector, inputs.num_valid, topk=self.topk, scale=self.route_scale)


class MoE(Buffers):
    """Routed experts plus the shared expert; the routed sum is fp32 until the shared expert is added."""

    def __init__(self, config: ModelConfig, execution: Execution, view: WeightView, *, hashed: bool) -> None:
        super().__init__()
        self.execution, self.limit = execution, config.swiglu_limit
        self.router = Router(config, execution, view.sub("gate"), hashed=hashed)
        experts, shared = view.sub("experts"), view.sub("shared_experts")
        self.hold(
            w13=experts["w13.weight"],
            w13_scale=experts["w13.scale"],
            w2=experts["w2.weight"],
            w2_scale=experts["w2.scale"],
            shared_w13=shared["w13.weight"],
            shared_w13_scale=shared["w13.scale"],
            shared_w2=shared["w2.weight"],
            shared_w2_scale=shared["w2.scale"],
        )
        self.activation = Activation(execution, self.w13.device)

    def forward(
        self, x: torch.Tensor, inputs: StepInputs, load_enabled: torch.Tensor, load_counts: torch.Tensor
    ) -> torch.Tensor:
        """``x [T, D]`` (normalised) -> ``[T, D]``; adds to ``load_counts [E]`` when ``load_enabled`` is set."""
        e = self.execution
        ids, weights = self.router(x, inputs)
        ops.record_expert_load(ids, load_enabled, load_counts)
        activation = self.activation(x)
        routed = ops.expert_ffn(
            *activation, ids, weights, self.w13, self.w13_scale, self.w2, self.w2_scale,
            limit=self.limit, deterministic=e.deterministic,
        )  # fmt: skip
        shared = ops.shared_expert(
            *activation, self.shared_w13, self.shared_w13_scale, self.shared_w2, self.shared_w2_scale,
            limit=self.limit, dtype=e.dtype, deterministic=e.deterministic,
        )  # fmt: skip
        return ops.expert_sum(routed, shared, dtype=e.dtype)
