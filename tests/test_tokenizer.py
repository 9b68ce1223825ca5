import json
import shutil
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings, strategies as st

from dsv4.chat import encode_messages
from dsv4.tokenizer import Tokenizer

NANO = Path(__file__).parents[1] / "assets" / "nano"
TOKENIZER = Tokenizer.from_dir(NANO)
ids_of_all_kinds = st.lists(st.integers(0, 2100), max_size=40)  # some beyond the vocabulary of 2,048


def test_special_ids():
    assert (TOKENIZER.bos_id, TOKENIZER.eos_id, TOKENIZER.pad_id) == (0, 1, 2)
    assert TOKENIZER.special_ids == frozenset(range(7))
    assert [TOKENIZER.token_id(t) for t in ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")] == [3, 4, 5, 6]
    assert TOKENIZER.vocab_size == 2048
    with pytest.raises(ValueError, match="a token must be in the vocabulary, got '<｜System｜>'"):
        TOKENIZER.token_id("<｜System｜>")


@settings(deadline=None)
@given(st.text())
def test_round_trip(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids, skip_special=False) == text
    assert TOKENIZER.encode(text, add_bos=True) == [0, *ids]


def test_special_tokens_are_spelled_and_skipped():
    ids = TOKENIZER.encode("<｜User｜>Genesis<｜end▁of▁sentence｜>")
    assert ids[0] == 3 and ids[-1] == 1
    assert TOKENIZER.decode(ids) == "Genesis"
    assert TOKENIZER.decode(ids, skip_special=False) == "<｜User｜>Genesis<｜end▁of▁sentence｜>"


def test_chat_on_nano():
    ids = TOKENIZER.encode(encode_messages([{"role": "user", "content": "Who was Noah?"}], thinking=False))
    assert ids[:2] == [0, 3] and ids[-2:] == [4, 6]
    assert ids.count(0) == 1 and TOKENIZER.decode(ids) == "Who was Noah?"


@settings(deadline=None, max_examples=200)
@given(ids_of_all_kinds, st.booleans())
@example(TOKENIZER.encode("añ€😀")[:-1], True)
def test_stream_concatenates_to_decode(ids, skip):
    stream = TOKENIZER.stream(skip_special=skip)
    pieces = [stream.push([token]) for token in ids] + [stream.finish()]
    assert "".join(pieces) == TOKENIZER.decode(ids, skip_special=skip)
    assert stream.push(ids) + stream.finish() == TOKENIZER.decode(ids, skip_special=skip)


@settings(deadline=None)
@given(st.text(alphabet="aé€😀中", min_size=1, max_size=12))
def test_stream_emits_whole_characters_as_soon_as_possible(text):
    stream, seen, raw = TOKENIZER.stream(), "", b""
    for token in TOKENIZER.encode(text):
        seen += stream.push([token])
        raw += TOKENIZER.token_bytes(token)
        assert "\ufffd" not in seen
        assert seen == raw.decode(errors="ignore")
    assert stream.finish() == "" and seen == text


def test_every_token_decodes_to_its_bytes():
    for token in range(TOKENIZER.vocab_size):
        assert TOKENIZER.token_bytes(token).decode(errors="replace") == TOKENIZER.decode([token], skip_special=False)


def test_invalid_ids():
    for call in (TOKENIZER.decode, TOKENIZER.stream().push):
        with pytest.raises(ValueError, match="token ids must be >= 0, got -1"):
            call([5, -1])
    assert TOKENIZER.decode([2048, 9999]) == ""


def copy_nano(directory: Path, **config) -> Path:
    shutil.copy(NANO / "tokenizer.json", directory)
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def test_special_ids_from_the_model_config(tmp_path):
    copy_nano(tmp_path, bos_token={"content": "<｜User｜>"})
    (tmp_path / "config.json").write_text('{"bos_token_id": 0, "eos_token_id": 6}')
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (3, 6, None)


def test_loading_errors(tmp_path):
    with pytest.raises(ValueError, match="a checkpoint directory must hold tokenizer.json, got "):
        Tokenizer.from_dir(tmp_path)
    with pytest.raises(ValueError, match="must name eos_token, got none in "):
        Tokenizer.from_dir(copy_nano(tmp_path, bos_token="<｜User｜>"))
    with pytest.raises(ValueError, match="eos_token must be in tokenizer.json, got '<end>'"):
        Tokenizer.from_dir(copy_nano(tmp_path, bos_token="<｜User｜>", eos_token="<end>"))
    with pytest.raises(ValueError, match="eos_token must be in tokenizer.json, got 7"):
        Tokenizer.from_dir(copy_nano(tmp_path, bos_token="<｜User｜>", eos_token=7))
    for text, message in (("[]", "must be a JSON object, got list"), ("{", "must be valid JSON, got: ")):
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.raises(ValueError, match=f"tokenizer_config.json {message}"):
            Tokenizer.from_dir(tmp_path)
    plain = tokenizers.Tokenizer(tokenizers.models.BPE())
    with pytest.raises(ValueError, match="the decoder of tokenizer.json must be ByteLevel, got NoneType"):
        Tokenizer(plain, bos_id=0, eos_id=1, pad_id=None)
