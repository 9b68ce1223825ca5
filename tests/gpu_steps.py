"""Steps of an engine on a GPU: how often the host waits for the device, and samples that equal the CPU's.

The functions return raw samples: every number in ``samples`` counts what went wrong and must be zero (``bar``).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dsv4.engine import Engine
from dsv4.engine_config import EngineConfig
from dsv4.sampling import SamplingParams, sample
from dsv4.step_plan import Request
from dsv4.transfer import Download

NANO = Path(__file__).resolve().parent.parent / "assets" / "nano"
PROMPTS = ([5, 9, 11, 17], list(range(20, 320)), [7] * 3, list(range(40, 90)))
PARAMS = (
    SamplingParams(max_new_tokens=24),
    SamplingParams(max_new_tokens=40, temperature=0.8, top_p=0.9, seed=3),
    SamplingParams(max_new_tokens=12, temperature=1.2, seed=4),
    SamplingParams(max_new_tokens=31, ignore_eos=True),
)


@contextmanager
def only_downloads_wait(waits: list[int]) -> Iterator[None]:
    """Any call that makes the host wait raises, except ``Download.wait``, whose waits are counted in ``waits[-1]``."""
    wait = Download.wait

    def counted(self: Download) -> torch.Tensor:
        waits[-1] += self._event is not None
        torch.cuda.set_sync_debug_mode("default")
        try:
            return wait(self)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    Download.wait = counted
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
        Download.wait = wait


def waits(graphs: str = "full", draft_tokens: int = 0) -> dict[str, Any]:
    """Prompts in chunks, greedy and seeded decoding side by side: at most one wait per step, one more with drafts.

    The first round of prompts is not looked at: torch starts its own libraries in it.
    """
    settings = EngineConfig(
        device="cuda", compile="off", graphs=graphs, draft_tokens=draft_tokens, max_seq_len=512, max_requests=4,
        token_budget=128, chunk_tokens=64, num_blocks=16,
    )  # fmt: skip
    engine = Engine.from_checkpoint(NANO, settings, progress=False)
    loop, per_step, ahead = engine.loop, [], []
    for round_number in range(2):
        for index, (ids, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            ids = [token + round_number for token in ids]  # no prefix of the first round
            loop.add(Request(id=f"{round_number}.{index}", prompt_ids=ids, params=params.with_seed()))
        while loop.has_work:
            if not round_number:
                loop.step()
                continue
            per_step.append(0)
            with only_downloads_wait(per_step):
                loop.step()
            ahead.append(loop._ahead is not None)
    torch.cuda.synchronize()
    allowed = 1 + bool(draft_tokens)
    samples = {
        "steps_with_more_waits": sum(count > allowed for count in per_step),
        "no_step_waited": int(not any(per_step)),
        "nothing_built_ahead": int(not draft_tokens and not any(ahead)),
    }
    detail = {"waits": per_step, "built_ahead": sum(ahead), "steps": len(per_step)}
    return {"samples": samples, "bar": 0, "detail": detail}


def sampled_tokens(rows: int = 64, vocabulary: int = 129_280) -> dict[str, Any]:
    """Greedy and seeded rows on the GPU: the CPU's tokens, alone and in the batch, twice."""
    g = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(rows, vocabulary, generator=g)
    logits[1, [90_000, 70]] = 99.0  # a tie
    kinds = ((0.0, 1.0), (0.7, 1.0), (1.0, 0.9), (1.5, 0.5), (1.0, 1e-6))
    params = [
        SamplingParams(temperature=kinds[row % 5][0], top_p=kinds[row % 5][1], seed=row * 7919 if row % 5 else None)
        for row in range(rows)
    ]
    params[1] = SamplingParams()
    steps = list(range(rows))
    want = sample(logits, params, steps)
    on_gpu = logits.cuda()
    got, again = sample(on_gpu, params, steps).cpu(), sample(on_gpu, params, steps).cpu()
    alone = torch.cat([sample(on_gpu[r : r + 1], params[r : r + 1], steps[r : r + 1]).cpu() for r in range(rows)])
    samples = {
        "unlike_cpu": int((got != want).sum()), "unlike_alone": int((got != alone).sum()),
        "unlike_again": int((got != again).sum()), "tie": int(got[1] != 70),
    }  # fmt: skip
    return {"samples": samples, "bar": 0, "detail": {"tokens": got.tolist()}}
