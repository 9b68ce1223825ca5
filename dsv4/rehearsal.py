"""The last stage of start-up: a few requests that nobody asked for, so that the first real one meets nothing new.

Prewarm and capture load the model's kernels. What is left to the first request are the small ones around it, which CUDA
loads when they are first launched (sampling, drafting, copies), the first launch of every graph, which sends it to the
device, pinned memory, and Python's own caches.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .sampling import SamplingParams
from .start_up import StartUp
from .step_loop import StepLoop

_NEW_TOKENS = 4


def rehearse(generate: Callable[..., Any], loop: StepLoop, started: StartUp, *, texts: bool) -> None:
    """Replay every graph and serve requests on an idle loop through its engine's ``generate``, and forget them.

    First one request alone, with ``texts`` one that comes as text; then, where so many may run, a greedy one, a sampled
    one and one that its first token ends together. Their prompts take two chunks, and four tokens follow, where
    sequences may be so long; shorter ones get what fits. Counts of paths start from zero afterwards.
    """
    settings, longest = loop.settings, loop.scheduler.max_length
    new_tokens = min(_NEW_TOKENS, longest - 1)
    prompt = [0] * max(1, min(settings.chunk_tokens + 1, longest - new_tokens - settings.draft_tokens))
    greedy = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    sampled = replace(greedy, temperature=0.7, top_p=0.9, seed=1)
    stopped = replace(greedy, stop_token_ids=tuple(range(loop.config.vocab_size)))
    for step in started.captured.values():
        step.replay_pads()
    for prompts, params in (
        ([prompt], [greedy]),
        (["a"] if texts else [], [greedy] if texts else []),
        ([prompt] * 3, [greedy, sampled, stopped]),
    ):
        generate(prompts, params)
        loop.reset()
    for step in started.captured.values():
        step.path_counts.clear()
        step.last_path = None
