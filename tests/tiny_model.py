"""Small random models for tests of whole steps: every kind of layer, widths that leave tails in vectorised loops."""

from collections.abc import Iterable, Sequence as Rows
from dataclasses import dataclass
from pathlib import Path

import torch

from dsv4.caches import allocate_caches
from dsv4.checkpoint import Checkpoint
from dsv4.config import ModelConfig
from dsv4.execution import CacheStorage, Execution
from dsv4.model import DeepseekV4
from dsv4.runner import Runner, Sequence
from dsv4.synth import write_synthetic
from dsv4.weights import load_weights

from .tiny_checkpoint import NANO

BASE = ModelConfig.from_json(NANO)


def tiny_config(ratios: tuple[int, ...] = (0, 4, 128), **changes: object) -> ModelConfig:
    """Backbone layers of the given ratios, the first two hash-routed, then the MTP block."""
    return BASE.resized(**{
        "num_hidden_layers": len(ratios), "compress_ratios": (*ratios, 0), "num_hash_layers": min(2, len(ratios)),
        "hidden_size": 96, "num_attention_heads": 2, "head_dim": 101, "q_lora_rank": 37, "o_groups": 2,
        "o_lora_rank": 13, "moe_intermediate_size": 32, "vocab_size": 61, "index_n_heads": 3, "index_topk": 8,
        "n_routed_experts": 7, "num_experts_per_tok": 2,
    } | changes)  # fmt: skip


@dataclass(frozen=True)
class TinyCheckpoint:
    """A random checkpoint on disk, loaded on demand."""

    config: ModelConfig
    directory: Path

    @classmethod
    def write(cls, config: ModelConfig, directory: Path) -> "TinyCheckpoint":
        write_synthetic(config, directory, seed=11, progress=False)
        return cls(config, directory)

    def model(self, numerics: str, *, deterministic: bool = True) -> DeepseekV4:
        execution = Execution.of(numerics, deterministic=deterministic)
        weights = load_weights(
            Checkpoint.open(self.directory), self.config, numerics, execution.dtype, "cpu", progress=False
        )
        return DeepseekV4(self.config, execution, weights, max_positions=1024)


def runner_of(
    model: DeepseekV4,
    *,
    num_requests: int = 1,
    max_blocks: int = 2,
    storage: CacheStorage | None = None,
    max_draft: int = 0,
) -> Runner:
    """An eager runner with caches of its own."""
    caches = allocate_caches(
        model.config,
        model.execution,
        num_blocks=max_blocks * num_requests,
        num_window_pages=2 * max_blocks * num_requests,
        num_slots=num_requests,
        storage=storage or ("fp32" if model.execution.dtype == torch.float32 else "bf16"),
        max_draft=max_draft,
    )
    return Runner.eager(model, caches, max_blocks)


def place(index: int, max_blocks: int = 2) -> Sequence:
    """Pages of request ``index``, apart from those of every other request."""
    return Sequence(first_block=index * max_blocks, first_page=2 * index * max_blocks, state_slot=index)


def random_tokens(count: int, vocab_size: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (count,), generator=generator).tolist()


Outputs = dict[str, torch.Tensor]  # logits and streams of one request's rows, and those of the MTP block


def run_parts(runner: Runner, parts: Rows[tuple[Sequence, Rows[int]]], *, mtp: bool = True) -> list[Outputs]:
    """One step over all parts, then one of the MTP block; a part of n + 1 tokens has n rows."""
    starts = [sequence.length for sequence, _ in parts]
    sizes = [len(tokens) - 1 for _, tokens in parts]
    segments = [s.segment(tokens[:-1], range(n)) for (s, tokens), n in zip(parts, sizes, strict=True)]
    logits, streams = runner.run(segments)
    values = {"logits": logits, "streams": streams}
    if mtp:
        segments = [
            s.segment(tokens[1:], range(n), start=start)
            for (s, tokens), n, start in zip(parts, sizes, starts, strict=True)
        ]
        values["mtp_logits"], values["mtp_streams"] = runner.run_draft(segments, streams)
    split = zip(*(value.split(sizes) for value in values.values()), strict=True)
    return [dict(zip(values, each, strict=True)) for each in split]


def run_chunks(runner: Runner, sequence: Sequence, tokens: Rows[int], chunk: int, *, mtp: bool = True) -> Outputs:
    """Rows of ``tokens[:-1]`` in steps of ``chunk`` rows."""
    last = len(tokens) - 1
    return joined(
        run_parts(runner, [(sequence, tokens[start : min(start + chunk, last) + 1])], mtp=mtp)[0]
        for start in range(0, last, chunk)
    )


def joined(steps: Iterable[Outputs]) -> Outputs:
    """Rows of consecutive steps, one below the other."""
    steps = list(steps)
    return {name: torch.cat([step[name] for step in steps]) for name in steps[0]}


def different_rows(got: Outputs, want: Outputs) -> dict[str, list[int]]:
    """Rows that are not bitwise equal, by tensor; empty when there are none."""
    assert got.keys() == want.keys()
    found = {}
    for name, value in got.items():
        assert value.shape == want[name].shape and value.dtype == want[name].dtype
        assert value.numel() and value.isfinite().all()
        rows = (as_bits(value) != as_bits(want[name])).flatten(1).any(1).nonzero().flatten().tolist()
        if rows:
            found[name] = rows
    return found


def as_bits(value: torch.Tensor) -> torch.Tensor:
    """Integers that are equal exactly when the floats are bitwise equal."""
    return value.view({4: torch.int32, 2: torch.int16}[value.element_size()])
