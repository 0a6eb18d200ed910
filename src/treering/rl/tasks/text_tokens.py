"""Text as token ids and back, and the tokens that end a turn."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from treering.data.rendering.encoder import TURN_END, begin_of, begun, open_tokenizer
from treering.data.rendering.renderer import Renderer
from treering.data.rendering.template import end_of_text
from treering.data.rendering.thoughts import answer_start, without_headers
from treering.errors import ConfigError, InputError
from treering.files.writing import read_object
from treering.types import TokenIds

_END_TOKENS = 64
"""Tokens of a prompt's end in which an opened thought is looked for."""
_SPACE = "▁"
"""A space, in tokens of SentencePiece."""
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_VISIBLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_BYTES: Mapping[str, int] = MappingProxyType(
    {chr(each): each for each in _VISIBLE}
    | {chr(0x100 + i): each for i, each in enumerate(sorted({*range(256)} - {*_VISIBLE}))}
)
"""The byte of each letter in tokens of byte-level tokenizers, which have none for spaces and control characters."""


class TextTokens:
    """A Hugging Face tokenizer folder, opened once.

    Example: with Qwen's tokenizer, `TextTokens(folder).encode("2+2=")` gives 4 tokens, and `end_tokens` are those
    of <|im_end|> and <|endoftext|>.
    """

    def __init__(self, folder: Path) -> None:
        """Opens the folder; raises ConfigError if it has no tokenizer."""
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
        """Tokens that end a turn or a text, as far as they exist: the chat marker, then the end of text."""
        ids = [self._tokenizer.token_to_id(token) for token in (TURN_END, self._end_of_text) if token is not None]
        return tuple(dict.fromkeys(i for i in ids if i is not None))

    def id_of(self, text: str) -> int | None:
        """The token whose text this is, as it stands in tokenizer.json or as plain text; None if there is none."""
        token_id = self._tokenizer.token_to_id(text)
        if token_id is not None:
            return int(token_id)
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        # An unknown text may become one token too: that for unknown words.
        is_one = len(ids) == 1 and self._tokenizer.decode(ids, skip_special_tokens=False) == text
        return int(ids[0]) if is_one else None

    def text_of(self, token_id: int) -> str | None:
        """The text of a token as it stands in tokenizer.json; None if the tokenizer has no such id."""
        text = self._tokenizer.id_to_token(token_id)
        return None if text is None else str(text)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token, which may be a part of a character; of a special one those of its name.

        Example: under Qwen's tokenizer the two tokens of an emoji are 3 bytes and 1 byte.
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
        """Token ids int32 [T].

        Args:
            text: the text.
            adds_special: whether what the tokenizer writes before a text stands before it, once, as in raw text that is
                trained. What it writes after a text never follows: a prompt goes on.
        """
        tokens = np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        return begun(tokens, self._begin) if adds_special else tokens

    def decode(self, tokens: TokenIds) -> str:
        """The text, without special tokens."""
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True))

    def decode_all(self, tokens: TokenIds) -> str:
        """The text, with special tokens: some of them begin thoughts and calls."""
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False))

    def end_of(self, prompt: TokenIds) -> str:
        """The end of a prompt with special tokens, which may open a thought."""
        return self.decode_all(prompt[-_END_TOKENS:])

    def without_special(self, text: str) -> str:
        """A part of what `decode_all` returns, as `decode` would return it."""
        return self._special.sub("", without_headers(text))

    def answer(self, tokens: TokenIds, prompt: TokenIds) -> str:
        """The text after a response's thought, without special tokens; "" if the thought has no end.

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
    """As the tokenizer has it; None if the tokenizer has no such id."""
    source: str
    """Where it was found first."""

    def __str__(self) -> str:
        return f"{self.text or 'a token without text'} ({self.token_id}, {self.source})"


def find_stop_tokens(
    tokens: TextTokens, form: Renderer | None = None, *, model: Path | None = None, named: Sequence[str | int] = ()
) -> tuple[StopToken, ...]:
    """All tokens that end a turn, each once, in the order of the arguments.

    Rollouts, episodes, evaluations and the server stop at them, and checkpoints name them in generation_config.json.

    Args:
        tokens: the tokenizer, with its `end_tokens`.
        form: how chats become text, with its `turn_ends`; None for raw text.
        model: the policy's folder, whose generation_config.json and config.json name one `eos_token_id` or several.
        named: texts or ids of single tokens, as the user set them.

    Raises:
        ConfigError: a named text is not one token, or a named id is none of the tokenizer's.
        InputError: one of the model's two files cannot be read.

    Example: Llama 3's tokenizer ends texts with <|end_of_text|>, its template turns with <|eot_id|>, and its
    generation_config.json adds <|eom_id|>: all three stop a rollout.
    """
    found: list[tuple[int, str]] = [(token_id, "tokenizer") for token_id in tokens.end_tokens]
    found += [] if form is None else [(token_id, "chat template") for token_id in form.turn_ends]
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
            f"task.stop_tokens names single tokens, and {named!r} is none of {tokens.folder}; write it as in its "
            "tokenizer.json, or give the id"
        )
    if tokens.text_of(token_id) is None:
        raise ConfigError(
            f"task.stop_tokens holds ids of the tokenizer, and {named} is none of {tokens.folder}, which has "
            f"{tokens.vocab_size}; correct it"
        )
    return token_id


def _ends_of_model(folder: Path) -> list[tuple[int, str]]:
    found = []
    for file in (folder / name for name in _MODEL_FILES):
        settings = read_object(file) if file.is_file() else {}
        # Models of text and images keep the text's settings in an object of their own.
        inner = settings.get("text_config")
        for place in (settings, inner if isinstance(inner, dict) else {}):
            found += [(token_id, file.name) for token_id in _ids(place.get("eos_token_id"), file)]
    return found


def _ids(value: Any, file: Path) -> Iterator[int]:
    """The ids of a field that has one, several or none; -1 stands for none."""
    values: Iterable[Any] = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in values:
        if type(token_id) is not int:
            raise InputError(f"{file}: eos_token_id is a token id or a list of them, got {value!r}; correct it")
        if token_id >= 0:
            yield token_id
