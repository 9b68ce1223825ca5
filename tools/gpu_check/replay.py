"""Replays of the trained nano checkpoint against eager calls, rows in other company, and poisoned memory.

Steps through graphs are measured by the functions that the test suite runs too; the eager ones are here.
"""

from dataclasses import replace
from typing import Any

import torch

from dsv4.engine import Engine
from dsv4.inputs import StepInputs
from dsv4.runner import Sequence

from .common import Record, differs, random_tokens
from .models import nano_engine
from .place import Place
from .runs import POISON_RUNS

BUDGET, MAX_REQUESTS, BLOCKS_EACH = 512, 64, 3
COMPANY = (65, 129, 4225)  # rows of the step in which 64 rows must come out as they do alone


def replay(place: Place, record: Record, run: str) -> None:
    """``run``: ``numerics.mode[.libraries][.deterministic]``; fills the point on padded or on unpadded equality."""
    from tests.graphs.gpu_measure import replay_differences

    numerics, mode, *more = run.split(".")
    deterministic = "deterministic" in more
    name = run.removesuffix(".deterministic")
    point = "replay_equals_unpadded" if deterministic else "replay_equals_padded"
    with record.block(point, *([] if deterministic else ["replay_buckets"])) as found:
        requests = 4 if place.dry else MAX_REQUESTS
        engine = nano_engine(
            place, mode, "libraries" if "libraries" in more else "triton", numerics=numerics,
            deterministic=deterministic, token_budget=32 if place.dry else BUDGET, max_requests=requests,
            max_seq_len=BLOCKS_EACH * 256, num_blocks=BLOCKS_EACH * requests, draft_tokens=1,
            cache_storage="fp8" if numerics == "official" else "bf16",
        )  # fmt: skip
        differences = replay_differences(engine, padded=not deterministic)
        with record.profiling():
            engine.runner.run([Sequence().segment(random_tokens(21, 0), (20,))])
        found[0][name] = differences
        if not deterministic:
            found[1][name] = {
                function: {
                    str(bucket.tokens): sum(str(bucket.tokens) in sizes for sizes in differences[function].values())
                    for bucket in step.ladder.buckets
                }
                for function, step in engine.started.captured.items()
            }


def batch_independence(place: Place, record: Record, backend: str, mode: str) -> None:
    """C10: 64 rows alone and among others, after a 200-token history: logits and streams bitwise.

    ``mode``: of the graphs; with ``full`` ones the model is also called eagerly.
    """
    from tests.graphs.gpu_measure import rows_alone_and_among

    budget = 160 if place.dry else 4352
    for numerics in ("exact", "official"):
        with record.block("batch_independence") as (samples,):
            engine = nano_engine(
                place, mode, backend, numerics=numerics, deterministic=True, token_budget=budget, max_requests=80,
                max_seq_len=budget + 256, num_blocks=2 * (budget // 256 + 2), chunk_tokens=budget,
                cache_storage="fp8" if numerics == "official" else "bf16",
            )  # fmt: skip
            found = samples.setdefault(numerics, {}).setdefault(backend, {})
            for total in COMPANY[: 2 if place.dry else None]:
                found.setdefault(mode, {})[str(total)] = rows_alone_and_among(engine, total)
                if mode == "full":
                    alone, among = (_eager_rows(engine, total, together) for together in (False, True))
                    found.setdefault("eager", {})[str(total)] = sum(map(differs, alone, among))


@torch.no_grad()
def _eager_rows(engine: Engine, total: int, together: bool) -> tuple[torch.Tensor, torch.Tensor]:
    runner, blocks = engine.runner, engine.settings.max_blocks
    mine, other = random_tokens(264, 1), random_tokens(total - 64, 2)
    sequence, second = Sequence(), Sequence(first_block=blocks, first_page=2 * blocks, state_slot=1)
    runner.model.forward_streams(runner.inputs([sequence.segment(mine[:200])]), runner.caches)
    made = [sequence.segment(mine[200:], range(64))] + ([second.segment(other, (0,))] if together else [])
    logits, streams = runner.model.forward_streams(runner.inputs(made), runner.caches)
    return logits[:64], streams[:64]


def poison(place: Place, record: Record, run: str) -> None:
    """Unowned cache bytes and pads cannot reach valid rows; ``run``: ``mode[.libraries]`` of :data:`POISON_RUNS`.

    Engines of ``full`` graphs also call the model eagerly, on inputs with pads.
    """
    from tests.graphs.gpu_poison import poison_differences

    mode, _, backend = run.partition(".")
    for kind in POISON_RUNS[run]:
        numerics, storage = kind.split(".")
        with record.block("poison") as (samples,):
            engine = nano_engine(
                place, mode, backend or "triton", numerics=numerics, cache_storage=storage,
                token_budget=32 if place.dry else 256, max_requests=8, max_seq_len=1024, draft_tokens=1, num_blocks=32,
                expert_weights="fp8" if backend and numerics == "official" else "fp4",  # DeepGEMM's grouped products
            )  # fmt: skip
            found = samples.setdefault(kind, {})
            found[run] = poison_differences(engine)
            if mode == "full":
                found[run.replace("full", "eager")] = poison_differences(engine, eager=True)


def padded_inputs(inputs: StepInputs, rows: int, requests: int, logits: int) -> StepInputs:
    """Pad rows and pad requests as docs/ops.md defines them; pad logit rows read row 0."""

    def longer(tensor: torch.Tensor, size: int, value: Any) -> torch.Tensor:
        return torch.cat((tensor, tensor.new_full((size - tensor.shape[0], *tensor.shape[1:]), value)))

    return replace(
        inputs,
        **{n: longer(getattr(inputs, n), rows, -1) for n in ("token_ids", "positions", "row_requests", "window_slots")},
        **{n: longer(getattr(inputs, n), requests, -1) for n in ("block_tables", "window_tables", "state_slots")},
        seq_lens=longer(inputs.seq_lens, requests, 0),
        query_starts=longer(inputs.query_starts, requests + 1, int(inputs.num_valid)),
        logit_rows=longer(inputs.logit_rows, logits, 0),
    )
