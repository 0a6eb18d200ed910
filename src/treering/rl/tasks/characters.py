"""A character vocabulary, for tasks without a tokenizer."""

import numpy as np

from treering.errors import InputError
from treering.rl.tasks.task import Prompt
from treering.train.loop.batches import TrainingTask
from treering.types import TokenIds

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""Decoding of an id without a symbol; a policy with a larger vocabulary may sample one."""


class Characters:
    """Symbol i is token i.

    Example: `Characters("ab+").encode("a+b")` is [0, 2, 1].
    """

    def __init__(self, symbols: str) -> None:
        """`symbols` are distinct characters."""
        assert len(set(symbols)) == len(symbols), "a symbol has one id"
        self.symbols = symbols
        self._ids = {symbol: i for i, symbol in enumerate(symbols)}

    def encode(self, text: str) -> TokenIds:
        """Token ids int32 [T]; raises InputError for a character outside the vocabulary."""
        unknown = [symbol for symbol in text if symbol not in self._ids]
        if unknown:
            raise InputError(f"text is written in the symbols {self.symbols!r}, got {unknown[0]!r}; remove it")
        return np.array([self._ids[symbol] for symbol in text], np.int32)

    def decode(self, tokens: TokenIds) -> str:
        """The text; an id without a symbol becomes `UNKNOWN`."""
        return "".join(self.symbols[i] if 0 <= i < len(self.symbols) else UNKNOWN for i in tokens.tolist())

    def solution(self, prompt: Prompt, parts: list[tuple[str, bool]]) -> TrainingTask:
        """A prompt with a correct continuation, to train on; `parts` are texts, each with whether it is trained.

        Example: the prompt "2+3=" with parts [("5", True), (" ", False)] trains the fifth of six tokens.
        """
        encoded = [(self.encode(text), is_trained) for text, is_trained in parts]
        masks = [np.full(tokens.size, is_trained) for tokens, is_trained in encoded]
        return TrainingTask(
            task_id=prompt.prompt_id,
            sequences=(np.concatenate([prompt.tokens, *(tokens for tokens, _ in encoded)]),),
            loss_masks=(np.concatenate([np.zeros(prompt.tokens.size, bool), *masks]),),
        )
