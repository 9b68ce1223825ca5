"""From a prompt to token ids: the engine's rules, which need no model to be checked."""

from collections.abc import Iterable, Sequence

from .tokenizer import Tokenizer

Prompt = str | Sequence[int]


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    """Token ids; a text gets a beginning-of-sentence token unless it spells one.

    Raises:
        ValueError: an empty text, a text without a tokenizer, or no prompt at all.
    """
    if not isinstance(prompt, str):
        if not isinstance(prompt, Iterable):
            raise ValueError(f"prompt must be a text or a list of token ids, got {prompt!r}")
        return list(prompt)
    if tokenizer is None:
        raise ValueError(f"a text prompt needs a tokenizer.json in the checkpoint directory, got none: {prompt!r}")
    if not prompt:
        raise ValueError("prompt must have at least 1 character, got an empty text")
    ids = tokenizer.encode(prompt)
    return ids if ids[:1] == [tokenizer.bos_id] else [tokenizer.bos_id, *ids]
