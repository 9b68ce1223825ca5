"""Engines over the session's nano model, recorded texts to continue, and a record of the steps an engine runs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dsv4.engine import Engine
from dsv4.engine_config import EngineConfig
from dsv4.inputs import Segment
from dsv4.sampling import SamplingParams
from dsv4.tokenizer import Tokenizer

from .conftest import NANO

LOGITS_ATOL = 5e-4  # as in test_exact: fp32 sums in another order


def make_engine(nano_model, numerics="exact", **settings) -> Engine:
    """An eager engine with fresh caches; ``settings`` as in EngineConfig."""
    config = EngineConfig(**{"numerics": numerics, "compile": "off", "max_seq_len": 1024, "max_requests": 4} | settings)
    model = nano_model(numerics, deterministic=config.deterministic)
    return Engine.from_model(model, config, Tokenizer.from_dir(NANO))


def greedy(max_new_tokens: int, **others) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, **others)


@dataclass(frozen=True)
class Text:
    """A recorded prompt and the tokens that greedy decoding appends to it."""

    prompt: list[int]
    continuation: list[int]

    def split(self, known: int) -> "Text":
        """The same text with the first ``known`` tokens of the continuation moved to the prompt."""
        return Text(self.prompt + self.continuation[:known], self.continuation[known:])


def recorded_texts(golden) -> list[Text]:
    """Texts whose every step has a top-2 gap far above the differences between two orders of summation."""
    records = golden("exact_greedy.json")
    assert all(r["min_top2_gap"] >= 1e-3 and len(r["continuation"]) == 48 for r in records)
    return [Text(r["prompt_ids"], r["continuation"]) for r in records]


@dataclass(frozen=True)
class Step:
    """One call of ``runner.run``."""

    segments: list[Segment]
    logits: torch.Tensor

    @property
    def num_rows(self) -> int:
        return sum(len(s.token_ids) for s in self.segments)


def record_steps(engine: Engine) -> list[Step]:
    """The steps that the engine runs from now on, in a list that grows. Page tables are copied: they change later."""
    steps: list[Step] = []
    run = engine.runner.run

    def recorded(segments: Sequence[Segment], **pads: int):
        kept = [
            Segment(
                token_ids=s.token_ids, start=s.start, blocks=list(s.blocks), window_pages=list(s.window_pages),
                state_slot=s.state_slot, logit_offsets=s.logit_offsets,
            )
            for s in segments
        ]  # fmt: skip
        logits, streams = run(segments, **pads)
        steps.append(Step(kept, logits.clone()))
        return logits, streams

    engine.runner.run = recorded
    return steps


def logits_by_position(steps: Sequence[Step]) -> dict[int, torch.Tensor]:
    """Last logits computed at each position of the only request of ``steps``."""
    found = {}
    for step in steps:
        (segment,) = step.segments
        for row, offset in enumerate(segment.logit_offsets):
            found[segment.start + offset] = step.logits[row]
    return found


def record_preemptions(engine: Engine) -> list[str]:
    """Ids of the requests preempted from now on, in a list that grows."""
    preempted: list[str] = []
    schedule = engine.loop.scheduler.schedule

    def recorded():
        plan = schedule()
        preempted.extend(request.id for request in plan.preempted)
        return plan

    engine.loop.scheduler.schedule = recorded
    return preempted
