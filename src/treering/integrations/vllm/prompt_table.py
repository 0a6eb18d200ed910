"""Which prompt a row of tokens begins with, where the request does not say."""

from collections.abc import Container
from hashlib import blake2b

import numpy as np

from treering.arrays import Int32Array
from treering.types import PromptId, hash_of_prompt


class PromptTable:
    """Prompts by their tokens; finds the longest one that a row begins with.

    Example: with the prompts [5, 6] as "q" and [5, 6, 7, 8] as "r", the row [5, 6, 7, 8, 9] begins with "r" and
    [5, 6, 7, 9] with "q".
    """

    def __init__(self) -> None:
        """Holds no prompts."""
        self._ids: dict[int, dict[str, PromptId]] = {}

    def add(self, tokens: Int32Array, prompt_id: PromptId) -> None:
        """Adds a prompt, int32 [P] with P >= 1, or gives it another id."""
        self._ids.setdefault(tokens.size, {})[hash_of_prompt(tokens)] = prompt_id

    def find(self, tokens: Int32Array, history: Container[PromptId]) -> tuple[PromptId, int]:
        """The prompt that a context int32 [L], L >= 1, begins with, and its number of tokens.

        A whole context that history knows by its hash comes first, then the longest prompt of the table. A context
        that begins with none is a prompt itself, and joins the table under its hash.
        """
        whole = hash_of_prompt(tokens)
        found = (whole, int(tokens.size)) if whole in history else self._longest(tokens)
        if found is None:
            found = whole, int(tokens.size)
        if found[1] == tokens.size:
            self._ids.setdefault(tokens.size, {})[whole] = found[0]
        return found

    def _longest(self, tokens: Int32Array) -> tuple[PromptId, int] | None:
        """The longest prompt of the table that the tokens begin with; hashes each token once."""
        found, done = None, 0
        hashed = blake2b(digest_size=8)
        for size in sorted(size for size in self._ids if size <= tokens.size):
            hashed.update(np.ascontiguousarray(tokens[done:size], np.int32).tobytes())
            done = size
            prompt_id = self._ids[size].get(hashed.hexdigest())
            if prompt_id is not None:
                found = prompt_id, size
        return found
