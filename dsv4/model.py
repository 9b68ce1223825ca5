"""The model: hyper-connected blocks over flattened rows, the language-model head, and the MTP block.

Legend: T tokens, M residual streams, D hidden, L logit rows, V vocabulary. There is no residual besides the streams:
every site collapses them into its sublayer's input and mixes the output back.
"""

from collections.abc import Mapping

import torch
from torch import nn

from . import ops
from .attention import Attention
from .caches import LayerCache, ModelCaches
from .config import ModelConfig
from .execution import Execution
from .inputs import StepInputs
from .layers import Activation, Buffers, HyperHead, HyperSite, Projection, WeightView
from .moe import MoE
from .rope import rope_table


class Block(nn.Module):
    """One decoder layer: attention and MoE, each behind its hyper-connection site."""

    def __init__(
        self,
        config: ModelConfig,
        execution: Execution,
        view: WeightView,
        *,
        ratio: int,
        hashed: bool,
        table: torch.Tensor,
    ) -> None:
        super().__init__()
        self.attn_site = HyperSite(config, execution, view, "attn")
        self.ffn_site = HyperSite(config, execution, view, "ffn")
        self.attn = Attention(config, execution, view.sub("attn"), ratio, table)
        self.ffn = MoE(config, execution, view.sub("ffn"), hashed=hashed)


def run_blocks(
    blocks: nn.ModuleList,
    streams: torch.Tensor,
    inputs: StepInputs,
    caches: list[LayerCache],
    load_enabled: torch.Tensor,
    load_counts: list[torch.Tensor],
) -> torch.Tensor:
    """``[T, M, D]`` through all blocks; every post-mix is fused with the next site's collapse."""
    x, post, comb = blocks[0].attn_site.pre(streams)
    for index, block in enumerate(blocks):
        y = block.attn(x, inputs, caches[index])
        streams, x, post, comb = block.ffn_site.post_pre(y, streams, post, comb)
        y = block.ffn(x, inputs, load_enabled, load_counts[index])
        if index + 1 < len(blocks):
            streams, x, post, comb = blocks[index + 1].attn_site.post_pre(y, streams, post, comb)
    return ops.mhc_post(y, streams, post, comb)


class DeepseekV4(Buffers):
    """DeepSeek-V4 backbone with its language-model head and MTP blocks.

    Args:
        config: validated model config.
        execution: numerics, activation dtype, determinism.
        weights: kernel-layout tensors from ``dsv4.weights`` (any device, the meta device included).
        max_positions: rows of the RoPE tables, i.e. the longest sequence in tokens.
    """

    def __init__(
        self, config: ModelConfig, execution: Execution, weights: Mapping[str, torch.Tensor], *, max_positions: int
    ) -> None:
        super().__init__()
        view = WeightView(weights)
        self.config, self.execution = config, execution
        device = view["embed.weight"].device
        tables = {kind: rope_table(config, kind, max_positions).to(device) for kind in (0, 4)}
        self.hold(embed=view["embed.weight"], head=view["head.weight"])
        self.blocks = nn.ModuleList(
            Block(
                config,
                execution,
                view.sub(f"layers.{index}"),
                ratio=ratio,
                hashed=config.is_hash_layer(index),
                table=tables[4 if ratio else 0],
            )
            for index, ratio in enumerate(config.layer_ratios)
        )
        self.hyper_head = HyperHead(config, execution, view)
        self.mtp = nn.ModuleList(
            MTPBlock(config, execution, view.sub(f"mtp.{index}"), tables[0])
            for index in range(config.num_nextn_predict_layers)
        )
        if device.type == "cuda":  # whoever never calls dsv4.prewarm still gets warm kernels, at the first op
            from .prewarming import arm

            arm(self)

    def embed_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``[T]`` -> equal streams ``[T, M, D]``; zeros for pads."""
        return ops.embed_streams(token_ids, self.embed, num_streams=self.config.hc_mult, dtype=self.execution.dtype)

    def logits(
        self, streams: torch.Tensor, logit_rows: torch.Tensor, hyper_head: HyperHead | None = None
    ) -> torch.Tensor:
        """Final streams ``[T, M, D]`` -> fp32 logits ``[L, V]`` of the rows ``logit_rows [L]``."""
        hyper_head = hyper_head or self.hyper_head
        hidden = hyper_head(streams.index_select(0, logit_rows))
        return ops.linear(hidden, self.head, dtype=torch.float32, deterministic=self.execution.deterministic)

    def forward_streams(
        self, inputs: StepInputs, caches: ModelCaches, embeddings: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One step: logits ``[L, V]`` fp32, and the final residual streams ``[T, M, D]`` for the MTP block.

        Args:
            inputs: the step's rows.
            caches: written in place for this step's rows.
            embeddings: ``[T, D]`` in the activation dtype, in place of the embedding lookup. Token ids stay needed
                wherever the model has hash-routed layers.
        """
        if embeddings is None:
            streams = self.embed_tokens(inputs.token_ids)
        else:
            streams = embeddings.unsqueeze(1).repeat(1, self.config.hc_mult, 1)
        streams = run_blocks(self.blocks, streams, inputs, caches.layers, caches.load_enabled, caches.load_counts)
        return self.logits(streams, inputs.logit_rows), streams

    def forward(self, inputs: StepInputs, caches: ModelCaches, embeddings: torch.Tensor | None = None) -> torch.Tensor:
        """Logits ``[L, V]`` of one step; see :meth:`forward_streams`."""
        return self.forward_streams(inputs, caches, embeddings)[0]

    def forward_mtp(
        self, inputs: StepInputs, caches: ModelCaches, streams: torch.Tensor, depth: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft step of MTP block ``depth``.

        Args:
            inputs: rows at the positions of ``streams``, with ``token_ids`` one position later (the token that
                follows each row).
            caches: the block's own window cache is written.
            streams: ``[T, M, D]`` residual streams of those rows, before the head's collapse.

        Returns:
            Logits ``[L, V]`` for the token two positions after each row, and the block's own streams ``[T, M, D]``.
        """
        block = self.mtp[depth]
        mixed = block.mix(self.embed_tokens(inputs.token_ids), streams)
        streams = run_blocks(
            block.blocks, mixed, inputs, caches.mtp[depth : depth + 1], caches.load_enabled,
            caches.mtp_load_counts[depth : depth + 1],
        )  # fmt: skip
        return self.logits(streams, inputs.logit_rows, block.hyper_head), streams


class MTPBlock(Buffers):
    """Multi-token-prediction block: next-token embedding plus backbone streams, projected, then one window layer."""

    def __init__(self, config: ModelConfig, execution: Execution, view: WeightView, table: torch.Tensor) -> None:
        super().__init__()
        self.config = config
        self.hold(enorm=view["enorm.weight"], hnorm=view["hnorm.weight"])
        self.e_proj = Projection(execution, view.sub("e_proj"))
        self.h_proj = Projection(execution, view.sub("h_proj"))
        self.activation = Activation(execution, table.device)
        self.blocks = nn.ModuleList([Block(config, execution, view, ratio=config.mtp_ratio, hashed=False, table=table)])
        self.hyper_head = HyperHead(config, execution, view)

    def mix(self, embedded: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
        """Equal embedding streams and backbone streams ``[T, M, D]`` -> the block's input streams ``[T, M, D]``."""
        eps = self.config.rms_norm_eps
        token = self.e_proj(*self.activation(ops.rms_norm(embedded[:, 0].contiguous(), self.enorm, eps=eps)))
        flat = ops.rms_norm(streams, self.hnorm, eps=eps).view(-1, self.config.hidden_size)
        return token.unsqueeze(1) + self.h_proj(*self.activation(flat)).view(streams.shape)
