"""Runs steps of one model over its caches: the layer between host-side scheduling and the traced forward.

A :class:`Runner` owns the model, the caches and the two step functions (backbone and MTP draft), which may be the eager
methods or compiled ones. A :class:`Sequence` is one request's pages, for callers that place requests themselves.
"""

from collections.abc import Callable, Sequence as Rows
from dataclasses import dataclass, replace
from typing import NoReturn

import torch

from .caches import ModelCaches
from .inputs import Segment, StepInputs, build_inputs, check_embeddings
from .model import DeepseekV4
from .ops.shapes import BLOCK_TOKENS, WINDOW_PAGE_TOKENS

StepFunction = Callable[[StepInputs, ModelCaches], tuple[torch.Tensor, torch.Tensor]]
DraftFunction = Callable[[StepInputs, ModelCaches, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Runner:
    """One model with its caches.

    Attributes:
        model: the eager model.
        caches: paged caches, written by every step.
        max_blocks: block-table width; a sequence has at most ``256 * max_blocks`` tokens.
        step: ``(inputs, caches) -> (logits, streams)``.
        draft: ``(inputs, caches, streams) -> (logits, streams)`` of the first MTP block.
        num_inputs: how often :meth:`inputs` was called, by which an owner of the caches notices other users.
    """

    model: DeepseekV4
    caches: ModelCaches
    max_blocks: int
    step: StepFunction
    draft: DraftFunction
    num_inputs: int = 0

    @classmethod
    def eager(cls, model: DeepseekV4, caches: ModelCaches, max_blocks: int) -> "Runner":
        rows = model.blocks[0].attn.rope_table.shape[0]
        if rows < max_blocks * BLOCK_TOKENS:
            raise ValueError(f"the model's max_positions must be at least {max_blocks * BLOCK_TOKENS}, got {rows}")
        return cls(model, caches, max_blocks, model.forward_streams, model.forward_mtp)

    def close(self) -> None:
        """Drop the caches and both functions; the model stays as it is. No step can run afterwards."""

        def closed(*_: object) -> NoReturn:
            raise RuntimeError("a step must run on a runner that is open, got one that was closed")

        self.step = self.draft = closed
        self.caches = ModelCaches([], [], torch.empty(0), [], [])

    @property
    def max_tokens(self) -> int:
        return self.max_blocks * BLOCK_TOKENS

    def empty_streams(self, rows: int) -> torch.Tensor:
        """Memory for residual streams ``[rows, M, D]``."""
        config, embed = self.model.config, self.model.embed
        shape = (rows, config.hc_mult, config.hidden_size)
        return torch.empty(shape, dtype=self.model.execution.dtype, device=embed.device)

    def inputs(self, segments: Rows[Segment], **pads: int) -> StepInputs:
        self.num_inputs += 1
        return build_inputs(
            segments,
            vocab_size=self.model.config.vocab_size,
            max_blocks=self.max_blocks,
            device=self.model.embed.device,
            **pads,
        )

    @torch.no_grad()
    def run(
        self, segments: Rows[Segment], *, ready: StepInputs | None = None, **pads: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits ``[L, V]`` fp32 and streams ``[T, M, D]`` of one step; ``ready``: inputs built from it before."""
        return self.step(self.inputs(segments, **pads) if ready is None else ready, self.caches)

    @torch.no_grad()
    def run_embedded(
        self, segments: Rows[Segment], embeddings: torch.Tensor, **pads: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One eager step on ``embeddings [rows, D]`` in place of the tokens' own; see :func:`check_embeddings`."""
        model = self.model
        check_embeddings(model.config, segments, embeddings)
        if embeddings.dtype != model.execution.dtype:
            raise ValueError(f"embeddings must have dtype {model.execution.dtype}, got {embeddings.dtype}")
        inputs = self.inputs(segments, embedded=True, **pads)
        pad_rows = inputs.token_ids.shape[0] - embeddings.shape[0]
        padded = torch.nn.functional.pad(embeddings, (0, 0, 0, pad_rows))
        return model.forward_streams(inputs, self.caches, padded)

    @torch.no_grad()
    def run_draft(
        self, segments: Rows[Segment], streams: torch.Tensor, *, token_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """MTP logits and streams; segment tokens are those one position after each row of ``streams``.

        ``token_ids [T]`` int64 on the device takes the place of the segments' tokens, which the host need not know.
        """
        inputs = self.inputs(segments)
        return self.draft(inputs if token_ids is None else replace(inputs, token_ids=token_ids), self.caches, streams)


@dataclass
class Sequence:
    """Pages of one request placed by hand: physical pages ``first_block…`` and ``first_page…``, one state slot."""

    first_block: int = 0
    first_page: int = 0
    state_slot: int = 0
    length: int = 0

    def segment(self, token_ids: Rows[int], logit_offsets: Rows[int] = (), *, start: int | None = None) -> Segment:
        """The next rows of the sequence (or rows from ``start``); :attr:`length` moves past them."""
        start = self.length if start is None else start
        self.length = start + len(token_ids)
        return Segment(
            token_ids=token_ids,
            start=start,
            blocks=range(self.first_block, self.first_block + -(-self.length // BLOCK_TOKENS)),
            window_pages=range(self.first_page, self.first_page + -(-self.length // WINDOW_PAGE_TOKENS)),
            state_slot=self.state_slot,
            logit_offsets=logit_offsets,
        )
