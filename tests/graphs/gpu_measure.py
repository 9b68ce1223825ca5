"""Measurements on an engine that replays graphs; every function returns raw samples, which a caller judges.

They run on any engine: on a GPU in ``test_gpu_engine.py``, and on graphs of CPU tensors in ``tests/test_start_up.py``,
which shows that the measurements themselves see what they should.
"""

from collections.abc import Iterator, Sequence as Rows
from dataclasses import dataclass, fields
from typing import Any

import torch

from dsv4.capture_stage import DraftInputs
from dsv4.engine import Engine
from dsv4.graphs.capture import CapturedStep
from dsv4.inputs import Segment, StepInputs
from dsv4.runner import Sequence

from ..tiny_model import as_bits, random_tokens

HISTORY = 130  # tokens that decoding requests have behind them: one page and two rows, one whole ratio-128 window
Outputs = tuple[torch.Tensor, torch.Tensor]
Samples = dict[str, dict[str, dict[str, int]]]


@dataclass
class _Case:
    kind: str
    bucket_tokens: int
    segments: list[Segment]


def replay_differences(engine: Engine, *, padded: bool, functions: Rows[str] = ("step", "draft")) -> Samples:
    """Differing elements of replays against eager calls, by function, kind of step and size of bucket.

    Args:
        engine: with graphs, ``max_seq_len`` of 512 or more and pages for ``max_requests`` such sequences.
        padded: compare with the eager call on the same padded batch; else with the unpadded call, of whose equality
            only a deterministic engine is capable.
        functions: which of the engine's to measure.

    Every bucket is replayed full and with the most pads that it can have, for prefill, decode and mixed steps; the
    draft function also on the streams of each of these. Caches are put back before each of the two calls.
    """
    found: Samples = {}
    _write_history(engine)
    for function in (name for name in engine.started.captured if name in functions):
        for case in _cases(engine, function):
            inputs = _inputs(engine, function, case.segments)
            errors = _replay_and_eager(engine, engine.started.captured[function], inputs, padded=padded)
            sizes = found.setdefault(function, {}).setdefault(case.kind, {})
            sizes[str(case.bucket_tokens)] = sizes.get(str(case.bucket_tokens), 0) + errors
    return found


def total(found: Samples) -> int:
    return sum(errors for kinds in found.values() for sizes in kinds.values() for errors in sizes.values())


def _inputs(engine: Engine, function: str, segments: Rows[Segment]) -> StepInputs | DraftInputs:
    step = engine.runner.inputs(segments)
    if function == "step":
        return step
    streams = engine.runner.empty_streams(len(step.token_ids))
    g = torch.Generator(device=streams.device).manual_seed(len(streams))
    return DraftInputs(step, streams.normal_(generator=g))


def _replay_and_eager(engine: Engine, step: CapturedStep, inputs: StepInputs | DraftInputs, *, padded: bool) -> int:
    before = [t.clone() for t in engine.runner.caches.tensors()]
    replayed = clones(step(inputs))
    path = step.last_path
    if path is None or path.bucket is None:
        raise RuntimeError(f"a step must be replayed to be compared, got {path}")
    after = [t.clone() for t in engine.runner.caches.tensors()]
    put_back(engine, before)
    if padded:
        inputs = _cloned(step.inputs.fill(inputs, path.bucket))
    eager = step.eager(inputs)
    errors = sum(num_different(got, want[: len(got)]) for got, want in zip(replayed, eager, strict=True))
    return errors + sum(num_different(a, b) for a, b in zip(after, engine.runner.caches.tensors(), strict=True))


def _cases(engine: Engine, function: str) -> Iterator[_Case]:
    """Steps for every bucket of a ladder: as many rows as it holds, and one more than the bucket below."""
    settings, ladder = engine.settings, engine.started.captured[function].ladder
    longest, most, smaller, seed = settings.max_seq_len, settings.max_requests, 0, 0
    verified = 1 + settings.draft_tokens if function == "step" else 1
    for bucket in ladder.buckets:
        for rows in sorted({smaller + 1, bucket.tokens}):
            seed += 1
            tokens = random_tokens(rows, engine.config.vocab_size, seed)
            if rows <= longest:
                yield _Case("prefill", bucket.tokens, [placed(engine, 0).segment(tokens, (rows - 1,))])
            if rows <= most:
                yield _Case("decode", bucket.tokens, [_decoding(engine, n, tokens[n : n + 1]) for n in range(rows)])
            decoding = min(rows // 2, most - 1)
            if decoding and rows - decoding + HISTORY <= longest:
                segments = [_decoding(engine, n + 1, tokens[n : n + 1]) for n in range(decoding)]
                segments.append(_decoding(engine, 0, tokens[decoding:]))
                yield _Case("mixed", bucket.tokens, segments)
            requests = rows // verified
            if verified > 1 and requests and rows % verified == 0 and requests <= most:
                parts = [tokens[verified * n : verified * (n + 1)] for n in range(requests)]
                yield _Case(
                    "verify", bucket.tokens, [_decoding(engine, n, p, range(verified)) for n, p in enumerate(parts)]
                )
        smaller = bucket.tokens


def _decoding(engine: Engine, index: int, tokens: Rows[int], logits: Rows[int] | None = None) -> Segment:
    wanted = (len(tokens) - 1,) if logits is None else tuple(logits)
    return placed(engine, index).segment(tokens, wanted, start=HISTORY)


def placed(engine: Engine, index: int) -> Sequence:
    """Pages of request ``index``, apart from those of every other."""
    blocks = engine.settings.max_blocks
    return Sequence(first_block=index * blocks, first_page=2 * index * blocks, state_slot=index)


def _write_history(engine: Engine) -> None:
    for index in range(engine.settings.max_requests):
        segment = placed(engine, index).segment(random_tokens(HISTORY, engine.config.vocab_size, 1000 + index))
        _, streams = engine.runner.run([segment])
        if engine.settings.draft_tokens:
            engine.runner.run_draft([segment], streams)


def rows_alone_and_among(engine: Engine, total: int, rows: int = 64, history: int = 200) -> int:
    """C10 through graphs: differing elements of ``rows`` rows alone and among others, ``total`` in all.

    Args:
        engine: deterministic, with logits for every row of ``rows`` in its largest bucket, pages for two sequences of
            ``history + total`` tokens.
        total: rows of the larger step.
    """
    mine = random_tokens(history + rows, engine.config.vocab_size, 1)
    others = random_tokens(total - rows, engine.config.vocab_size, 2)
    outcomes, buckets = [], []
    for together in (False, True):
        sequence = placed(engine, 0)
        engine.runner.run([sequence.segment(mine[:history])])
        segments = [sequence.segment(mine[history:], range(rows))]
        if together:
            segments.append(placed(engine, 1).segment(others, (len(others) - 1,)))
        logits, streams = engine.runner.run(segments)
        path = engine.started.captured["step"].last_path
        if path is None or path.bucket is None:
            raise RuntimeError(f"a step of {total} rows must be replayed, got {path}")
        buckets.append(path.bucket)
        outcomes.append((logits[:rows].clone(), streams[:rows].clone()))
    if buckets[0] == buckets[1]:
        raise RuntimeError(f"the two steps must replay two buckets, got {buckets[0]} twice")
    return sum(num_different(a, b) for a, b in zip(*outcomes, strict=True))


def _cloned(inputs: Any) -> Any:
    if isinstance(inputs, torch.Tensor):
        return inputs.clone()
    return type(inputs)(**{f.name: _cloned(getattr(inputs, f.name)) for f in fields(inputs)})


def clones(outputs: Outputs) -> Outputs:
    logits, streams = outputs
    return logits.clone(), streams.clone()


def put_back(engine: Engine, before: Rows[torch.Tensor]) -> None:
    for tensor, value in zip(engine.runner.caches.tensors(), before, strict=True):
        tensor.copy_(value)


def num_different(got: torch.Tensor, want: torch.Tensor) -> int:
    """Elements that are not bitwise equal; a different shape is an error of every element."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return max(got.numel(), want.numel(), 1)
    if got.dtype == torch.uint8:
        return int((got != want).sum())
    return int((as_bits(got.contiguous()) != as_bits(want.contiguous())).sum())
