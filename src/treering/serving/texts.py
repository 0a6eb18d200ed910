"""Texts of a server: how they become tokens and tokens become texts again."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from treering.data.rendering.encoder import open_tokenizer
from treering.errors import InputError
from treering.types import TokenIds


class Texts(Protocol):
    """A tokenizer as a server needs it."""

    def encode(self, text: str) -> TokenIds:
        """Token ids int32 [N] of a text, with what the tokenizer writes before one."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids; markers such as the end of a turn are left out."""
        ...


class TokenizerTexts:
    """The texts of a tokenizer folder.

    Example: `TokenizerTexts(Path("qwen3")).decode([9707])` is "Hello".
    """

    def __init__(self, folder: Path) -> None:
        """Opens `folder/tokenizer.json`; raises ConfigError if it is missing or broken."""
        self._tokenizer = open_tokenizer(folder)

    def encode(self, text: str) -> TokenIds:
        """See `Texts.encode`; raises InputError for a text without a token."""
        tokens = np.array(self._tokenizer.encode(text).ids, np.int32)
        if tokens.size == 0:
            raise InputError(f"a prompt holds at least one token, got the text {text!r}; send one")
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Texts.decode`."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))
