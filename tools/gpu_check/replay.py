"""Replays of the trained nano checkpoint against eager calls on the same padded, or on the unpadded, batch."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from dsv4.engine import Engine
from dsv4.inputs import Segment, StepInputs
from dsv4.runner import Sequence

from .common import Place, Record, differs, random_tokens
from .models import nano_engine, sequences

BUDGET, MAX_REQUESTS, BLOCKS_EACH, HISTORY = 512, 64, 3, 130
Steps = Iterator[tuple[str, int, list[Segment]]]


def replay(place: Place, record: Record, run: str) -> None:
    """``run``: ``numerics.mode[.backend][.deterministic]``; fills the points on padded or on unpadded equality."""
    numerics, mode, *more = run.split(".")
    deterministic = "deterministic" in more
    name = run.removesuffix(".deterministic")
    point = "replay_equals_unpadded" if deterministic else "replay_equals_padded"
    with record.block(point, "replay_buckets") as (samples, replayed):
        engine = _engine(place, numerics, mode, "libraries" if "libraries" in more else "triton", deterministic)
        found = samples.setdefault(name, {})
        seen = {"step": _counts(engine, "step"), "draft": _counts(engine, "draft")}
        write_history(engine, place)
        with record.profiling():
            for kind, number, segments in _steps(_totals(engine, place), place):
                _compare(engine, kind, number, segments, found, seen, padded=not deterministic)
        if not deterministic:
            replayed[name] = seen


def _engine(place: Place, numerics: str, mode: str, backend: str, deterministic: bool) -> Engine:
    return nano_engine(
        place, mode, backend, numerics=numerics, deterministic=deterministic, token_budget=64 if place.dry else BUDGET,
        max_requests=4 if place.dry else MAX_REQUESTS, max_seq_len=BLOCKS_EACH * 256, draft_tokens=1,
        prefix_reuse=False, num_blocks=BLOCKS_EACH * (4 if place.dry else MAX_REQUESTS),
        cache_storage="fp8" if numerics == "official" else "bf16",
    )  # fmt: skip


def captured(engine: Engine, function: str) -> Any:
    """The captured step or draft; ``None`` when the engine runs eagerly (dry runs)."""
    return engine.started.captured.get(function)


def _counts(engine: Engine, function: str) -> dict[str, int]:
    one = captured(engine, function)
    return {str(bucket.tokens): 0 for bucket in one.ladder.buckets} if one else {"0": 1}


def _totals(engine: Engine, place: Place) -> list[int]:
    """Row counts that fill every bucket of the ladder, and those that barely need it."""
    one = captured(engine, "step")
    sizes = [b.tokens for b in one.ladder.buckets] if one else [1, 2, 5, 8]
    return sorted({*sizes, *(s + 1 for s in sizes[:-1])})


def write_history(engine: Engine, place: Place) -> None:
    """Give every request real cache rows, so that decode steps read what a model wrote."""
    length = 20 if place.dry else HISTORY
    for index, sequence in enumerate(sequences(engine.settings.max_requests, BLOCKS_EACH)):
        engine.runner.run([sequence.segment(random_tokens(length, index))])


def _steps(totals: list[int], place: Place) -> Steps:
    """Kind, number and segments of every step, as placed by :func:`write_history`."""
    most, start = (4, 20) if place.dry else (MAX_REQUESTS, HISTORY)
    for number, total in enumerate(totals):
        tokens = random_tokens(total, 1000 + number)

        def placed(index: int, part: list[int], at: int, logits: tuple[int, ...]) -> Segment:
            return sequences(most, BLOCKS_EACH)[index].segment(part, logits, start=at)

        yield "prefill", number, [placed(0, tokens, 0, (total - 1,))]
        if total <= most:
            yield "decode", number, [placed(i, tokens[i : i + 1], start, (0,)) for i in range(total)]
        if total >= 2:
            decoding = min(total // 2, most - 1)
            segments = [placed(i + 1, tokens[i : i + 1], start, (0,)) for i in range(decoding)]
            yield "mixed", number, [*segments, placed(0, tokens[decoding:], start, (total - decoding - 1,))]
        if total % 2 == 0 and total // 2 <= most:
            yield "verify", number, [placed(i, tokens[2 * i : 2 * i + 2], start, (0, 1)) for i in range(total // 2)]


@torch.no_grad()
def _compare(
    engine: Engine, kind: str, number: int, segments: list[Segment], found: dict, seen: dict, *, padded: bool
) -> None:
    """Run a step and the draft over its streams through graphs and eagerly; note the differences by row count."""
    runner, model = engine.runner, engine.runner.model
    total = str(sum(len(s.token_ids) for s in segments))
    inputs = runner.inputs(segments)
    logits, streams = (t.clone() for t in runner.step(inputs, runner.caches))
    given = pad(engine, "step", inputs, seen) if padded else inputs
    want_logits, want_streams = model.forward_streams(given, runner.caches)
    found.setdefault(kind, {})[total] = differs(logits, want_logits[: len(logits)]) + differs(
        streams, want_streams[: len(streams)]
    )
    moved = [
        replace(s, token_ids=random_tokens(len(s.token_ids), number), logit_offsets=(len(s.token_ids) - 1,))
        for s in segments
    ]
    inputs = runner.inputs(moved)
    drafted = [t.clone() for t in runner.draft(inputs, runner.caches, streams)]
    if padded:
        given = pad(engine, "draft", inputs, seen)
        streams = torch.cat((streams, streams.new_zeros(len(given.positions) - len(streams), *streams.shape[1:])))
    else:
        given = inputs
    wanted = model.forward_mtp(given, runner.caches, streams)
    errors = sum(differs(a, b[: len(a)]) for a, b in zip(drafted, wanted, strict=True))
    found.setdefault("draft", {})[f"{kind}.{total}"] = errors


def pad(engine: Engine, function: str, inputs: StepInputs, seen: dict[str, dict[str, int]] | None = None) -> StepInputs:
    """``inputs`` padded as the bucket pads them that the last call of ``function`` replayed."""
    one = captured(engine, function)
    if one is None:
        return inputs
    path = one.last_path
    if path.bucket is None:
        raise RuntimeError(f"a step of {path.sizes} must be replayed, got {path.kind}: {path.reason}")
    if seen is not None:
        seen[function][str(path.bucket.tokens)] += 1
    return padded_inputs(inputs, path.bucket.tokens, path.bucket.requests, path.bucket.logits)


def padded_inputs(inputs: StepInputs, rows: int, requests: int, logits: int) -> StepInputs:
    """Pad rows and pad requests as docs/ops.md defines them; pad logit rows read row 0."""

    def longer(tensor: torch.Tensor, size: int, value: int) -> torch.Tensor:
        return torch.cat((tensor, tensor.new_full((size - tensor.shape[0], *tensor.shape[1:]), value)))

    valid = int(inputs.num_valid)
    return replace(
        inputs,
        **{n: longer(getattr(inputs, n), rows, -1) for n in ("token_ids", "positions", "row_requests", "window_slots")},
        **{n: longer(getattr(inputs, n), requests, -1) for n in ("block_tables", "window_tables", "state_slots")},
        seq_lens=longer(inputs.seq_lens, requests, 0),
        query_starts=longer(inputs.query_starts, requests + 1, valid),
        logit_rows=longer(inputs.logit_rows, logits, 0),
    )


# ---- batches and poison ----------------------------------------------------------------------------------------------


def batch_independence(place: Place, record: Record, backend: str) -> None:
    """C10: 64 rows alone and among others, after a 200-token history: logits and streams bitwise."""
    for numerics in ("exact", "official"):
        with record.block("batch_independence") as (samples,):
            engine = nano_engine(
                place, "full", backend, numerics=numerics, deterministic=True, token_budget=4352, max_requests=80,
                max_seq_len=4864, num_blocks=40, cache_storage="fp8" if numerics == "official" else "bf16",
            )  # fmt: skip
            found = samples.setdefault(numerics, {}).setdefault(backend, {})
            for path in ("eager", "full"):
                for total in (65, 129, 4225 if not place.dry else 200):
                    alone, among = (_rows_alone_or_among(engine, path, total, together) for together in (False, True))
                    errors = sum(differs(a, b) for a, b in zip(alone, among, strict=True))
                    found.setdefault(path, {})[str(total)] = errors


@torch.no_grad()
def _rows_alone_or_among(engine: Engine, path: str, total: int, together: bool) -> tuple[torch.Tensor, torch.Tensor]:
    runner = engine.runner
    mine, other = random_tokens(264, 1), random_tokens(total - 64, 2)
    sequence, second = Sequence(), Sequence(first_block=4, first_page=8, state_slot=1)
    step = runner.step if path == "full" else runner.model.forward_streams
    step(runner.inputs([sequence.segment(mine[:200])]), runner.caches)
    made = [sequence.segment(mine[200:], range(64))] + ([second.segment(other, (0,))] if together else [])
    logits, streams = step(runner.inputs(made), runner.caches)
    one = captured(engine, "step")
    if path == "full" and one and one.last_path.bucket is None:
        raise RuntimeError(f"a step of {total} rows must be replayed, got {one.last_path}")
    return logits[:64].clone(), streams[:64].clone()


def poison(place: Place, record: Record) -> None:
    """Unowned cache bytes and pad rows cannot reach valid rows: three poisons, the same finite results."""
    for numerics, storage in (("exact", "bf16"), ("official", "bf16"), ("official", "fp8")):
        for path in ("eager", "full"):
            with record.block("poison") as (samples,):
                engine = nano_engine(
                    place, "full" if path == "full" else "off", numerics=numerics, cache_storage=storage,
                    token_budget=256, max_requests=8, max_seq_len=1024, draft_tokens=1, num_blocks=32,
                )  # fmt: skip
                results = [_poisoned(engine, number) for number in range(3)]
                found = samples.setdefault(f"{numerics}.{storage}", {}).setdefault(path, {})
                for kind in results[0]:
                    bad = sum(int(not t.isfinite().all()) for r in results for t in r[kind])
                    pairs = [pair for r in results[1:] for pair in zip(results[0][kind], r[kind], strict=True)]
                    bad += sum(differs(a, b) for a, b in pairs)
                    found[kind] = bad


@torch.no_grad()
def _poisoned(engine: Engine, number: int) -> dict[str, list[torch.Tensor]]:
    runner = engine.runner
    for tensor in runner.caches.tensors():
        if tensor.dtype == torch.uint8:
            tensor.fill_((0, 0x7F, 0xFF)[number])
        else:
            tensor.fill_((0.0, float("nan"), float("inf"))[number])
    first, second = Sequence(first_block=5, first_page=11, state_slot=1), Sequence(9, 21, 2)
    eager = not engine.started.captured
    results = {}
    for kind, sizes in (("prefill", (150, 5)), ("mixed", (70, 1)), ("decode", (1, 1))):
        parts = [
            s.segment(random_tokens(size, size), range(min(size, 4)))
            for s, size in zip((first, second), sizes, strict=True)
        ]
        inputs = runner.inputs(parts)
        if eager:
            inputs = padded_inputs(inputs, 256 if kind == "prefill" else 80, 4, len(inputs.logit_rows))
        logits, streams = runner.step(inputs, runner.caches)
        results[kind] = [logits.clone(), streams[: sum(sizes)].clone()]
    inputs = runner.inputs([replace(p, token_ids=[9]) for p in parts])
    results["draft"] = [t.clone() for t in runner.draft(inputs, runner.caches, results["decode"][1])]
    return results
