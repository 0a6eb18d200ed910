"""Text to token ids and back, and the tokens that end a turn."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from treering.data.rendering.encoder import TURN_END, begin_of, missing_begin, open_tokenizer
from treering.data.rendering.renderer import Renderer
from treering.data.rendering.template import end_of_text
from treering.data.rendering.thoughts import answer_start, without_headers
from treering.errors import ConfigError, InputError
from treering.files.writing import read_object
from treering.types import TokenIds

_END_TOKENS = 64
"""Number of last prompt tokens that are searched for an opened thought."""
_SPACE = "▁"
"""Space in SentencePiece tokens."""
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_VISIBLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_BYTES: Mapping[str, int] = MappingProxyType(
    {chr(each): each for each in _VISIBLE}
    | {chr(0x100 + i): each for i, each in enumerate(sorted({*range(256)} - {*_VISIBLE}))}
)
"""Byte of each letter in tokens of byte-level tokenizers, which write spaces and control characters as letters."""


class TextTokens:
    """A Hugging Face tokenizer folder, opened once."""

    def __init__(self, folder: Path) -> None:
        """Open the folder; raise ConfigError if it has no tokenizer."""
        self.folder = folder
        self._tokenizer = open_tokenizer(folder)
        self._end_of_text = end_of_text(folder)
        self._begin = begin_of(self._tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        special = [token.content for token in added.values() if token.special]
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")
        self._added = frozenset(added)
        decoder = json.dumps(json.loads(self._tokenizer.to_str())["decoder"], ensure_ascii=False)
        self._is_byte_level, self._has_marks_for_spaces = '"ByteLevel"' in decoder, f'"{_SPACE}"' in decoder

    @property
    def vocab_size(self) -> int:
        """Upper bound of the token ids, including added tokens."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Existing tokens that end a turn or a text: the chat marker, then the end of text."""
        ids = [self._tokenizer.token_to_id(token) for token in (TURN_END, self._end_of_text) if token is not None]
        return tuple(dict.fromkeys(i for i in ids if i is not None))

    def id_of(self, text: str) -> int | None:
        """Return the token with this text, written as in tokenizer.json or as plain text, or None."""
        token_id = self._tokenizer.token_to_id(text)
        if token_id is not None:
            return int(token_id)
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        # An unknown text may become one token too: the one for unknown words.
        is_one = len(ids) == 1 and self._tokenizer.decode(ids, skip_special_tokens=False) == text
        return int(ids[0]) if is_one else None

    def text_of(self, token_id: int) -> str | None:
        """Return a token's text as in tokenizer.json, or None if the tokenizer has no such id."""
        text = self._tokenizer.id_to_token(token_id)
        return None if text is None else str(text)

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token, which may be part of a character; a special token gives those of its name.

        Example: in Qwen's tokenizer the two tokens of an emoji are 3 bytes and 1 byte.
        """
        text = self.text_of(token_id) or ""
        if token_id in self._added:
            return text.encode()
        if self._is_byte_level:
            return bytes(_BYTES[letter] for letter in text if letter in _BYTES)
        if found := _BYTE_TOKEN.fullmatch(text):
            return bytes.fromhex(found[1])
        return (text.replace(_SPACE, " ") if self._has_marks_for_spaces else text).encode()

    def encode(self, text: str, *, adds_special: bool = False) -> TokenIds:
        """Encode text as token ids int32 [T].

        Args:
            text: the text.
            adds_special: whether to add the tokenizer's start tokens once, as in raw training text. End tokens are
                never added, because a prompt goes on.
        """
        tokens = np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        return np.concatenate([missing_begin(tokens, self._begin), tokens]) if adds_special else tokens

    def decode(self, tokens: TokenIds) -> str:
        """Return the text without special tokens."""
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True))

    def decode_all(self, tokens: TokenIds) -> str:
        """Return the text with special tokens, some of which begin thoughts and calls."""
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False))

    def end_of(self, prompt: TokenIds) -> str:
        """Return the end of a prompt with special tokens; it may open a thought."""
        return self.decode_all(prompt[-_END_TOKENS:])

    def without_special(self, text: str) -> str:
        """Convert a part of the result of `decode_all` to what `decode` returns."""
        return self._special.sub("", without_headers(text))

    def answer(self, tokens: TokenIds, prompt: TokenIds) -> str:
        """Return the text after a response's thought, without special tokens; "" if the thought does not end.

        Args:
            tokens: int32 [T], the response.
            prompt: int32 [P], which may open the thought.
        """
        written = self.decode_all(tokens)
        start = answer_start(written, self.end_of(prompt))
        if start is None:
            return ""
        rest = written[start:]
        is_whole = rest == written and without_headers(rest) == rest
        return self.decode(tokens) if is_whole else self.without_special(rest)


_MODEL_FILES = ("generation_config.json", "config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class StopToken:
    """A token that ends a turn.

    Example: `str(StopToken(token_id=2, text="<|im_end|>", source="tokenizer"))` is "<|im_end|> (2, tokenizer)".
    """

    token_id: int
    text: str | None
    """Text in the tokenizer; None if the tokenizer has no such id."""
    source: str
    """Name of the first source that has it."""

    def __str__(self) -> str:
        return f"{self.text or 'a token without text'} ({self.token_id}, {self.source})"


def find_stop_tokens(
    tokens: TextTokens, renderer: Renderer | None = None, *, model: Path | None = None, named: Sequence[str | int] = ()
) -> tuple[StopToken, ...]:
    """Find all tokens that end a turn, each once, in the order of the arguments.

    Rollouts, episodes, evaluations and the server stop at them, and checkpoints list them in generation_config.json.

    Args:
        tokens: the tokenizer, which gives its `end_tokens`.
        renderer: renderer of chats, which gives its `turn_ends`; None for raw text.
        model: the policy's folder; its generation_config.json and config.json give one or several `eos_token_id`.
        named: texts or ids of single tokens from the settings.

    Raises:
        ConfigError: a named text is not one token, or the tokenizer does not have a named id.
        InputError: one of the two model files cannot be read.

    Example: Llama 3's tokenizer ends texts with <|end_of_text|>, its template ends turns with <|eot_id|>, and its
    generation_config.json adds <|eom_id|>: all three stop a rollout.
    """
    found: list[tuple[int, str]] = [(token_id, "tokenizer") for token_id in tokens.end_tokens]
    found += [] if renderer is None else [(token_id, "chat template") for token_id in renderer.turn_ends]
    found += [] if model is None else _ends_of_model(model)
    found += [(_named_id(tokens, one), "task.stop_tokens") for one in named]
    sources = dict(reversed(found))
    return tuple(
        StopToken(token_id=token_id, text=tokens.text_of(token_id), source=sources[token_id])
        for token_id in dict.fromkeys(token_id for token_id, _ in found)
    )


def _named_id(tokens: TextTokens, named: str | int) -> int:
    token_id = named if isinstance(named, int) else tokens.id_of(named)
    if token_id is None:
        raise ConfigError(
            f"task.stop_tokens must name single tokens, and {named!r} is not one of {tokens.folder}; write it as in "
            "its tokenizer.json, or give the id"
        )
    if tokens.text_of(token_id) is None:
        raise ConfigError(
            f"task.stop_tokens must hold ids of the tokenizer, and {named} is not one of {tokens.folder}, which has "
            f"{tokens.vocab_size}; correct it"
        )
    return token_id


def _ends_of_model(folder: Path) -> list[tuple[int, str]]:
    found = []
    for file in (folder / name for name in _MODEL_FILES):
        settings = read_object(file) if file.is_file() else {}
        # Multimodal models keep the text model's settings in an inner object.
        inner = settings.get("text_config")
        for source in (settings, inner if isinstance(inner, dict) else {}):
            found += [(token_id, file.name) for token_id in _ids(source.get("eos_token_id"), file)]
    return found


def _ids(value: Any, file: Path) -> Iterator[int]:
    """Yield the ids of a field with one, several or none; -1 also means none."""
    values: Iterable[Any] = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in values:
        if type(token_id) is not int:
            raise InputError(f"{file}: eos_token_id must be a token id or a list of them, got {value!r}; correct it")
        if token_id >= 0:
            yield token_id
