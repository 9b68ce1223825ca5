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

BUDGET, MAX_REQUESTS, BLOCKS_EACH = 512, 64, 3
COMPANY = (65, 129, 4225)  # rows of the step in which 64 rows must come out as they do alone
POISONS = ((0, 0.0), (0x7F, float("nan")), (0xFF, float("inf")))  # of bytes and of floats


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


def batch_independence(place: Place, record: Record, backend: str) -> None:
    """C10: 64 rows alone and among others, after a 200-token history: logits and streams bitwise."""
    from tests.graphs.gpu_measure import rows_alone_and_among

    budget = 160 if place.dry else 4352
    for numerics in ("exact", "official"):
        with record.block("batch_independence") as (samples,):
            engine = nano_engine(
                place, "full", backend, numerics=numerics, deterministic=True, token_budget=budget, max_requests=80,
                max_seq_len=budget + 256, num_blocks=2 * (budget // 256 + 2), chunk_tokens=budget,
                cache_storage="fp8" if numerics == "official" else "bf16",
            )  # fmt: skip
            found = samples.setdefault(numerics, {}).setdefault(backend, {"eager": {}, "full": {}})
            for total in COMPANY[: 2 if place.dry else None]:
                found["full"][str(total)] = rows_alone_and_among(engine, total)
                alone, among = (_eager_rows(engine, total, together) for together in (False, True))
                found["eager"][str(total)] = sum(differs(a, b) for a, b in zip(alone, among, strict=True))


@torch.no_grad()
def _eager_rows(engine: Engine, total: int, together: bool) -> tuple[torch.Tensor, torch.Tensor]:
    runner, blocks = engine.runner, engine.settings.max_blocks
    mine, other = random_tokens(264, 1), random_tokens(total - 64, 2)
    sequence, second = Sequence(), Sequence(first_block=blocks, first_page=2 * blocks, state_slot=1)
    runner.model.forward_streams(runner.inputs([sequence.segment(mine[:200])]), runner.caches)
    made = [sequence.segment(mine[200:], range(64))] + ([second.segment(other, (0,))] if together else [])
    logits, streams = runner.model.forward_streams(runner.inputs(made), runner.caches)
    return logits[:64], streams[:64]


def poison(place: Place, record: Record) -> None:
    """Unowned cache bytes and pad rows cannot reach valid rows: three poisons, the same finite results."""
    from tests.graphs.gpu_measure import poison_differences

    for numerics, storage in (("exact", "bf16"), ("official", "bf16"), ("official", "fp8")):
        with record.block("poison") as (samples,):
            engine = nano_engine(
                place, "full", numerics=numerics, cache_storage=storage, token_budget=32 if place.dry else 256,
                max_requests=8, max_seq_len=1024, draft_tokens=1, num_blocks=32,
            )  # fmt: skip
            found = samples.setdefault(f"{numerics}.{engine.settings.storage}" if not place.dry else storage, {})
            found["full"] = poison_differences(engine)
            found["eager"] = _eager_differences(engine)


def _eager_differences(engine: Engine) -> dict[str, dict[str, int]]:
    results = [_poisoned(engine, *values) for values in POISONS]
    found: dict[str, dict[str, int]] = {}
    for kind, first in results[0].items():
        pairs = [pair for other in results[1:] for pair in zip(first, other[kind], strict=True)]
        found[kind] = {
            "not_finite": sum(int(not t.isfinite().all()) for result in results for t in result[kind]),
            "differing": sum(differs(a, b) for a, b in pairs),
        }
    return found


@torch.no_grad()
def _poisoned(engine: Engine, byte: int, value: float) -> dict[str, list[torch.Tensor]]:
    """Steps with pads whose floats are ``value``, on caches that were full of poison before these requests came."""
    runner, results = engine.runner, {}
    for tensor in runner.caches.tensors():
        tensor.fill_(byte if tensor.dtype == torch.uint8 else value)
    sequences = [Sequence(first_block=4 * n, first_page=8 * n, state_slot=n) for n in (1, 2)]
    for kind, sizes in (("prefill", (150, 5)), ("mixed", (70, 1)), ("decode", (1, 1))):
        rows = sum(sizes)
        parts = [s.segment(random_tokens(n, n), (n - 1,)) for s, n in zip(sequences, sizes, strict=True)]
        inputs = padded_inputs(runner.inputs(parts), rows + 43, 4, 2)
        logits, streams = runner.model.forward_streams(inputs, runner.caches)
        results[kind] = [logits, streams[:rows].clone()]
        streams[rows:] = value
        logits, streams = runner.model.forward_mtp(inputs, runner.caches, streams)
        results[f"draft of {kind}"] = [logits, streams[:rows]]
    return results


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
