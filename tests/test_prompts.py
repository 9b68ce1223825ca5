"""Which types of token ids are prompts, and what is said of the others."""

import re

import numpy as np
import pytest
import torch

from dsv4 import evaluate

from .engines import greedy, make_engine, recorded_texts


@pytest.mark.parametrize("convert", [
    tuple, np.array, torch.tensor,
    lambda ids: np.array(ids, np.uint16), lambda ids: list(np.array(ids)), lambda ids: torch.tensor(ids).int(),
], ids=["tuple", "array", "tensor", "uint16", "NumPy integers", "int32 tensor"])  # fmt: skip
def test_ids_of_other_types(nano_model, golden, convert):
    engine, text = make_engine(nano_model), recorded_texts(golden)[0]
    assert engine.generate([convert(text.prompt)], greedy(2))[0].token_ids == text.continuation[:2]
    logits = evaluate.last_logits(engine.runner, convert(text.prompt))
    assert logits.argmax().item() == text.continuation[0]


WRONG_IDS = [
    (np.array([5.0, 6.0]), "an array of float64 with shape [2]"),
    (np.array([True, False]), "an array of bool with shape [2]"),
    (np.array([[5, 6]]), "an array of int64 with shape [1, 2]"),
    (np.array(5), "an array of int64 with shape []"),
    (torch.tensor([5.0]), "a tensor of torch.float32 with shape [1]"),
    (torch.tensor([True]), "a tensor of torch.bool with shape [1]"),
    (torch.tensor([[5], [6]]), "a tensor of torch.int64 with shape [2, 1]"),
    (torch.tensor(5), "a tensor of torch.int64 with shape []"),
    (b"ab", "b'ab'"),
    ({5, 6}, "{5, 6}"),
    (None, "None"),
]


@pytest.mark.parametrize("prompt, got", WRONG_IDS, ids=[got for _, got in WRONG_IDS])
def test_what_is_no_ids_is_refused_by_name(nano_model, prompt, got):
    engine = make_engine(nano_model)
    rule = f"token ids: a list, or a one-dimensional array or tensor of integers, got {got}"
    assert engine.generate([prompt], greedy(1))[0].error == f"prompt must be a text or {rule}"
    with pytest.raises(ValueError, match=re.escape(f"prompt must be {rule}")):
        evaluate.last_logits(engine.runner, prompt)
    with pytest.raises(ValueError, match=re.escape(f"tokens must be {rule}")):
        evaluate.score(engine.runner, prompt, window=1)


@pytest.mark.parametrize("token", [np.float32(5), np.bool_(True), 5.0, True, "5"], ids=repr)
def test_elements_of_other_types_are_refused(nano_model, token):
    message = make_engine(nano_model).generate([[5, token]], greedy(1))[0].error
    assert message == f"prompt: token id at index 1 must be an integer in [0, 2048), got {token!r}"
