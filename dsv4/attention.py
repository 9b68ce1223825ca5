"""Attention of one layer: window rows plus compressed entries (all, or the indexer's picks), one latent key-value head.

Legend: T tokens, D hidden, H heads, I indexer heads. Maths: DeepSeek-V4 technical report, section on compressed sparse
attention, and the official inference code; every product and kernel is a ``dsv4::`` op.
"""

import torch

from . import ops
from .caches import LayerCache
from .config import ModelConfig
from .execution import Execution
from .inputs import StepInputs
from .layers import Activation, Buffers, Projection, WeightView


class Compressor(Buffers):
    """Pools key-value rows into one entry per ``ratio`` tokens and writes them to a paged cache."""

    def __init__(self, config: ModelConfig, execution: Execution, view: WeightView, ratio: int, quantize: str) -> None:
        super().__init__()
        self.hold(wkv_gate=view["wkv_gate"], ape=view["ape"], norm=view["norm.weight"])
        self.deterministic = execution.deterministic
        self.numbers = {"ratio": ratio, "overlap": ratio == 4, "eps": config.rms_norm_eps, "quantize": quantize}

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, D]`` -> key-value and score rows ``[T, 2 * width]`` fp32."""
        return ops.linear(x, self.wkv_gate, dtype=torch.float32, deterministic=self.deterministic)

    def update(
        self,
        kv_score: torch.Tensor,
        rope_table: torch.Tensor,
        inputs: StepInputs,
        state: torch.Tensor,
        entries: torch.Tensor,
    ) -> None:
        ops.compressor_update(
            kv_score,
            self.ape,
            self.norm,
            rope_table,
            inputs.positions,
            inputs.row_requests,
            inputs.query_starts,
            inputs.seq_lens,
            inputs.block_tables,
            inputs.state_slots,
            state,
            entries,
            **self.numbers,
        )


class Indexer(Buffers):
    """Scores the entries of a ratio-4 layer for every query and picks the best ``index_topk``."""

    def __init__(self, config: ModelConfig, execution: Execution, view: WeightView, ratio: int) -> None:
        super().__init__()
        self.execution, self.ratio = execution, ratio
        self.heads, self.dim, self.topk = config.index_n_heads, config.index_head_dim, config.index_topk
        self.wq_b = Projection(execution, view.sub("wq_b"), decides=True)
        self.compressor = Compressor(config, execution, view.sub("compressor"), ratio, execution.index_quantize)
        self.hold(weights_proj=view["weights_proj.weight"])

    def queries(
        self, x: torch.Tensor, q_latent: tuple[torch.Tensor, torch.Tensor], rope_table: torch.Tensor, inputs: StepInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated (and quantised) queries ``[T, I, dim]`` and their fp32 head weights ``[T, I]``."""
        e = self.execution
        weights = ops.linear(x, self.weights_proj, dtype=e.dtype, deterministic=e.deterministic)
        return ops.indexer_query(
            self.wq_b(*q_latent).view(-1, self.heads, self.dim),
            weights,
            rope_table,
            inputs.positions,
            scale=self.dim**-0.5 * self.heads**-0.5,
            quantize=e.index_quantize,
            dtype=e.dtype,
        )

    def scores(
        self, q: torch.Tensor, weights: torch.Tensor, inputs: StepInputs, index_entries: torch.Tensor
    ) -> torch.Tensor:
        """``[T, entries]`` in the mode's score dtype; −inf where an entry is not visible."""
        return ops.indexer_logits(q, weights, index_entries, *self._places(inputs), **self._numbers)

    def picks(
        self, q: torch.Tensor, weights: torch.Tensor, inputs: StepInputs, index_entries: torch.Tensor
    ) -> torch.Tensor:
        """``[T, index_topk]`` int32 numbers of the entries with the highest scores, ascending, −1 last."""
        places = self._places(inputs)
        return ops.indexer_picks(q, weights, index_entries, *places, topk=self.topk, **self._numbers)

    @property
    def _numbers(self) -> dict[str, object]:
        e = self.execution
        return {"ratio": self.ratio, "dtype": e.score_dtype, "deterministic": e.deterministic}

    @staticmethod
    def _places(inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return inputs.positions, inputs.row_requests, inputs.block_tables


class Attention(Buffers):
    """One attention sublayer of ratio 0 (window only), 4 (window + picked entries) or 128 (window + all entries)."""

    def __init__(
        self, config: ModelConfig, execution: Execution, view: WeightView, ratio: int, rope_table: torch.Tensor
    ) -> None:
        super().__init__()
        self.config, self.execution, self.ratio = config, execution, ratio
        self.entries = {0: "none", 4: "picked", 128: "all"}[ratio]
        self.activation = Activation(execution, rope_table.device)
        for name in ("wq_a", "wq_b", "wkv", "wo_b"):
            setattr(self, name, Projection(execution, view.sub(name)))
        self.hold(
            q_norm=view["q_norm.weight"],
            kv_norm=view["kv_norm.weight"],
            sink=view["attn_sink"],
            wo_a=view["wo_a.weight"],
            rope_table=rope_table,
            no_picks=torch.empty(0, 0, dtype=torch.int32, device=rope_table.device),
        )
        self.compressor = (
            Compressor(config, execution, view.sub("compressor"), ratio, execution.entry_quantize) if ratio else None
        )
        self.indexer = Indexer(config, execution, view.sub("indexer"), ratio) if ratio == 4 else None

    def query_latent(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query latent as an :class:`Activation` pair, and the key-value row ``[T, head_dim]`` before its norm."""
        activation = self.activation(x)
        latent = ops.rms_norm(self.wq_a(*activation), self.q_norm, eps=self.config.rms_norm_eps)
        return *self.activation(latent), self.wkv(*activation)

    def index_scores(self, x: torch.Tensor, inputs: StepInputs, cache: LayerCache) -> torch.Tensor:
        """Scores ``[T, entries]`` of a ratio-4 layer against the entries already in ``cache``."""
        indexer, *queries = self._index_queries(x, inputs)
        return indexer.scores(*queries, inputs, cache.index_entries)

    def index_picks(self, x: torch.Tensor, inputs: StepInputs, cache: LayerCache) -> torch.Tensor:
        """``[T, index_topk]`` entries of a ratio-4 layer that ``x`` picks among those already in ``cache``."""
        indexer, *queries = self._index_queries(x, inputs)
        return indexer.picks(*queries, inputs, cache.index_entries)

    def _index_queries(self, x: torch.Tensor, inputs: StepInputs) -> tuple[Indexer, torch.Tensor, torch.Tensor]:
        if self.indexer is None:
            raise ValueError(f"index scores need a layer of ratio 4, got ratio {self.ratio}")
        *latent, _ = self.query_latent(x)
        return self.indexer, *self.indexer.queries(x, tuple(latent), self.rope_table, inputs)

    def forward(self, x: torch.Tensor, inputs: StepInputs, cache: LayerCache) -> torch.Tensor:
        """``x [T, D]`` (normalised) -> ``[T, D]``; writes this step's rows and entries into ``cache``."""
        c, e, table = self.config, self.execution, self.rope_table
        *latent, kv = self.query_latent(x)
        q = ops.qkv_rope_cache(
            self.wq_b(*latent).view(-1, c.num_attention_heads, c.head_dim),
            kv,
            self.kv_norm,
            table,
            inputs.positions,
            inputs.window_slots,
            cache.window,
            eps=c.rms_norm_eps,
            quantize=e.quantized,
        )
        if self.compressor is not None:
            kv_score = self.compressor.project(x)
        if self.indexer is not None:
            index_kv_score = self.indexer.compressor.project(x)
            index_queries = self.indexer.queries(x, tuple(latent), table, inputs)
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)

        # From here to the attention only boundary ops, so that they form one eager region between compiled pieces.
        picks = self.no_picks
        if self.compressor is not None:
            self.compressor.update(kv_score, table, inputs, cache.state, cache.entries)
        if self.indexer is not None:
            self.indexer.compressor.update(index_kv_score, table, inputs, cache.index_state, cache.index_entries)
            picks = self.indexer.picks(*index_queries, inputs, cache.index_entries)
        ops.sparse_attention(
            q,
            cache.window,
            cache.entries,
            picks,
            self.sink,
            inputs.positions,
            inputs.row_requests,
            inputs.window_tables,
            inputs.block_tables,
            out,
            lse,
            window=c.sliding_window,
            ratio=self.ratio,
            entries=self.entries,
            scale=c.head_dim**-0.5,
            deterministic=e.deterministic,
        )

        grouped = ops.grouped_o_proj(out, table, inputs.positions, self.wo_a, deterministic=e.deterministic)
        return self.wo_b(*self.activation(grouped))
