"""Encodes and decodes text with a tokenizer folder, and finds its end tokens."""

import json
from pathlib import Path

import numpy as np

from treering.data.rendering.encoder import open_tokenizer
from treering.data.rendering.script import TURN_END
from treering.errors import ConfigError
from treering.types import TokenIds


class TextTokens:
    """A Hugging Face tokenizer folder, opened once.

    Example: with Qwen's tokenizer, `TextTokens(folder).encode("2+2=")` gives 4 tokens, and `end_tokens` are those
    of <|im_end|> and <|endoftext|>.
    """

    def __init__(self, folder: Path) -> None:
        """Opens the folder; raises ConfigError if it has no tokenizer."""
        self._tokenizer = open_tokenizer(folder)
        self._end_of_text = _end_of_text(folder)

    @property
    def vocab_size(self) -> int:
        """Upper bound of the token ids, including added tokens."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end a turn or a text, as far as they exist: the chat marker, then the end of text."""
        ids = [self._tokenizer.token_to_id(token) for token in (TURN_END, self._end_of_text) if token is not None]
        return tuple(dict.fromkeys(i for i in ids if i is not None))

    @property
    def has_turn_end(self) -> bool:
        """Whether the chat marker of a turn's end is one token."""
        return self._tokenizer.token_to_id(TURN_END) is not None

    def encode(self, text: str) -> TokenIds:
        """Token ids int32 [T], without added special tokens."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, tokens: TokenIds) -> str:
        """The text, without special tokens."""
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True))


def _end_of_text(folder: Path) -> str | None:
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return None
    try:
        token = json.loads(file.read_text(encoding="utf-8")).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"tokenizer_config.json is a JSON object, {file} is not ({error}); fetch it again") from error
    # Older folders store a token as an object with its settings.
    return token.get("content") if isinstance(token, dict) else token
