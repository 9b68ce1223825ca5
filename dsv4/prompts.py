"""From a prompt to token ids: the engine's rules, which need no model to be checked."""

from collections.abc import Sequence

import numpy as np
import torch

from .tokenizer import Tokenizer

TokenIds = Sequence[int] | np.ndarray | torch.Tensor
Prompt = str | TokenIds


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    """Token ids; a text gets a beginning-of-sentence token unless it spells one.

    Raises:
        ValueError: an empty text, a text without a tokenizer, or no prompt at all.
    """
    if not isinstance(prompt, str):
        return plain_ids(prompt, "prompt must be a text or")
    if tokenizer is None:
        raise ValueError(f"a text prompt needs a tokenizer.json in the checkpoint directory, got none: {prompt!r}")
    if not prompt:
        raise ValueError("prompt must have at least 1 character, got an empty text")
    ids = tokenizer.encode(prompt)
    return ids if ids[:1] == [tokenizer.bos_id] else [tokenizer.bos_id, *ids]


def plain_ids(ids: TokenIds, subject: str) -> list[int]:
    """Token ids as a list: of a list or other sequence, of a NumPy array or of a tensor, with NumPy integers converted.

    Elements of other types stay as they are: ``check_token_ids`` names them.

    Raises:
        ValueError: beginning with ``subject``, for anything else: arrays of floats, of bools or of another rank too.
    """
    if isinstance(ids, torch.Tensor):
        integers = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
        if integers and ids.dim() == 1:
            return ids.tolist()
        got = f"a tensor of {ids.dtype} with shape {list(ids.shape)}"
    elif isinstance(ids, np.ndarray):
        if ids.dtype.kind in "iu" and ids.ndim == 1:
            return ids.tolist()
        got = f"an array of {ids.dtype} with shape {list(ids.shape)}"
    elif isinstance(ids, Sequence) and not isinstance(ids, (str, bytes, bytearray, memoryview)):
        if set(map(type, ids)) <= {int}:  # without a loop in Python over a long prompt
            return list(ids)
        return [int(token) if isinstance(token, np.integer) else token for token in ids]
    else:
        got = repr(ids)
    raise ValueError(f"{subject} token ids: a list, or a one-dimensional array or tensor of integers, got {got}")
