"""Text to token ids and back: a thin wrapper over the ``tokenizers`` library, and an incremental decoder.

``Tokenizer.from_dir`` reads ``tokenizer.json`` and the ``bos_token``, ``eos_token`` and ``pad_token`` of
``tokenizer_config.json``; for a token that is not named there, ``<name>_id`` of ``config.json``. Special tokens
spelled in the text become their ids; nothing is added unless asked for (chat prompts spell their own BOS).

Errors: ``ValueError`` for missing files or tokens, ids below 0 and tokenizers that are not byte-level.
"""

import codecs
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers


class Tokenizer:
    """A byte-level BPE tokenizer with its special ids."""

    def __init__(self, backend: tokenizers.Tokenizer, *, bos_id: int, eos_id: int, pad_id: int | None) -> None:
        _check_byte_level(backend)
        self._backend = backend
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.pad_id = pad_id
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    @classmethod
    def from_dir(cls, directory: str | Path) -> "Tokenizer":
        """Read the tokenizer of a checkpoint directory."""
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"a checkpoint directory must hold tokenizer.json, got {str(directory)!r}")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{path} must be a tokenizer file, got: {error}") from error
        names, ids = _read_json(directory / "tokenizer_config.json"), _read_json(directory / "config.json")
        bos_id, eos_id, pad_id = (_special_id(backend, name, names, ids) for name in ("bos", "eos", "pad"))
        if bos_id is None or eos_id is None:
            missing = "bos_token" if bos_id is None else "eos_token"
            raise ValueError(f"tokenizer_config.json or config.json must name {missing}, got none in {directory}")
        return cls(backend, bos_id=bos_id, eos_id=eos_id, pad_id=pad_id)

    @property
    def vocab_size(self) -> int:
        """Number of ids with a token; the model's embedding table may be larger."""
        return self._backend.get_vocab_size()

    def token_id(self, token: str) -> int:
        """The id of a token spelled exactly so."""
        token_id = self._backend.token_to_id(token)
        if token_id is None:
            raise ValueError(f"a token must be in the vocabulary, got {token!r}")
        return token_id

    def encode(self, text: str, *, add_bos: bool = False) -> list[int]:
        """Ids of a text; with ``add_bos`` the beginning-of-sentence id goes first."""
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ValueError(f"text must be valid Unicode, got a lone surrogate in {text!r}")
        ids = self._backend.encode(text, add_special_tokens=False).ids
        return [self.bos_id, *ids] if add_bos else ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ids; invalid UTF-8 becomes U+FFFD, ids without a token become nothing."""
        for token_id in ids:
            _check_id(token_id)
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one id stands for; empty for an id without a token."""
        _check_id(token_id)
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes(_BYTE_OF[character] for character in token)
        except KeyError:  # a token spelled in plain text, such as <｜User｜>
            return token.encode()

    def stream(self, *, skip_special: bool = True) -> "StreamDecoder":
        return StreamDecoder(self, skip_special=skip_special)


class StreamDecoder:
    """Decodes ids as they arrive.

    A piece never ends within a character: bytes of an unfinished one wait for the next id. All pieces of ``push`` and
    the last one of ``finish`` concatenate to ``Tokenizer.decode`` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """Text that became complete with ``ids``; may be empty."""
        return self._decoder.decode(b"".join(self._tokenizer.token_bytes(i) for i in ids if i not in self._skipped))

    def finish(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character, else nothing. The decoder can be used again."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def _byte_alphabet() -> dict[str, int]:
    """Character that stands for each byte in byte-level BPE: printable Latin-1 for itself, the rest from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _check_byte_level(backend: tokenizers.Tokenizer) -> None:
    kind = type(backend.decoder).__name__
    if kind != "ByteLevel":
        raise ValueError(f"the decoder of tokenizer.json must be ByteLevel, got {kind}")


def _check_id(token_id: int) -> None:
    if token_id < 0:
        raise ValueError(f"token ids must be >= 0, got {token_id}")


def _special_id(backend: tokenizers.Tokenizer, name: str, names: dict[str, Any], ids: dict[str, Any]) -> int | None:
    token = names.get(f"{name}_token")
    if isinstance(token, dict):  # a serialised AddedToken
        token = token.get("content")
    if token is None:
        return ids.get(f"{name}_token_id")
    token_id = backend.token_to_id(token) if isinstance(token, str) else None
    if token_id is None:
        raise ValueError(f"{name}_token must be in tokenizer.json, got {token!r}")
    return token_id


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must be valid JSON, got: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must be a JSON object, got {type(found).__name__}")
    return found
