"""Encodes and decodes text with a tokenizer folder, and finds its end tokens."""

from pathlib import Path

import numpy as np

from treering.data.rendering.encoder import open_tokenizer
from treering.data.rendering.script import TURN_END
from treering.data.rendering.template import ChatTemplate
from treering.data.rendering.template_files import CONFIG_FILE, SPECIAL_TOKENS_FILE, read_settings, token_text
from treering.data.trajectory import Message
from treering.errors import InputError
from treering.types import TokenIds

_ANSWER = "an-answer-of-the-assistant"


class TextTokens:
    """A Hugging Face tokenizer folder, opened once.

    Example: with Qwen's tokenizer, `TextTokens(folder).encode("2+2=")` gives 4 tokens, and `end_tokens` are those
    of <|im_end|> and <|endoftext|>.
    """

    def __init__(self, folder: Path) -> None:
        """Opens the folder; raises ConfigError if it has no tokenizer."""
        self.folder = folder
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

    def encode(self, text: str, *, adds_special: bool = False) -> TokenIds:
        """Token ids int32 [T]; `adds_special`: with what the tokenizer writes around a text."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=adds_special).ids, np.int32)

    def decode(self, tokens: TokenIds) -> str:
        """The text, without special tokens."""
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True))


def end_of_turn(template: ChatTemplate) -> str | None:
    """What a chat template writes after an assistant's answer, without white space.

    Where it writes nothing after a last answer, the token that stands before the next message, which training takes for
    the end of the turn too. None if there is neither, or if the template refuses a user and an assistant.

    Example: "<|eot_id|>" for Llama 3 and "<end_of_turn>" for Gemma.
    """
    try:
        text = template.text([Message(role="user", content="a question"), Message(role="assistant", content=_ANSWER)])
    except InputError:
        return None
    _, answer, after = text.rpartition(_ANSWER)
    return (after.strip() or template.turn_end.missing or None) if answer else None


def _end_of_text(folder: Path) -> str | None:
    files = (read_settings(folder / name) for name in (CONFIG_FILE, SPECIAL_TOKENS_FILE))
    return next((text for text in (token_text(settings.get("eos_token")) for settings in files) if text), None)
