"""Which prompt a TRL rollout continues, and how often the run has drawn it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from treering.errors import ConfigError
from treering.types import PromptId, hash_of_prompt

ID_COLUMNS = ("prompt_id", "id", "index")
"""Columns of a dataset that hold ids of its prompts, where no column is named; the first one counts."""


class PromptIds:
    """Ids of prompts, and draws.

    Example: a dataset with the columns "prompt" and "id" gives each prompt its id; another dataset's prompts are known
    by a hash of their tokens.
    """

    def __init__(self, dataset: Any, column: str | None) -> None:
        """Reads the ids of a dataset's prompts.

        Args:
            dataset: of the trainer; None, or one without columns, has no ids.
            column: of the ids; None looks for one of `ID_COLUMNS`.

        Raises:
            ConfigError: the column is missing, or holds something else than texts and whole numbers.
        """
        columns = list(getattr(dataset, "column_names", None) or ())
        if column is not None and column not in columns:
            raise ConfigError(f"id_column={column!r} is no column of the training data, which has {columns}; name one")
        found = column or next((name for name in ID_COLUMNS if name in columns), None)
        can_read = found is not None and "prompt" in columns and hasattr(dataset, "__len__")
        self._ids = _read(dataset["prompt"], dataset[found], str(found)) if can_read else {}
        self._draws: dict[PromptId, int] = {}

    def of(self, prompt: Any, tokens: Sequence[int]) -> PromptId:
        """The id of a prompt: its dataset's, else a hash of its token ids.

        Example: two prompts with the same tokens have the same hash, in every process.
        """
        known = self._ids.get(_key(prompt)) if self._ids and prompt is not None else None
        return hash_of_prompt(tokens) if known is None else known

    def draw(self, prompt_ids: Iterable[PromptId]) -> dict[PromptId, int]:
        """The draws of the prompts of one call, counted from 0 for each prompt."""
        found = {prompt_id: self._draws.get(prompt_id, 0) for prompt_id in prompt_ids}
        self._draws |= {prompt_id: draw + 1 for prompt_id, draw in found.items()}
        return found

    def state(self) -> list[tuple[PromptId, int]]:
        """Draws so far, for a checkpoint."""
        return list(self._draws.items())

    def load_state(self, state: Iterable[Sequence[Any]]) -> None:
        """Continues counting from a `state`."""
        self._draws = {prompt_id: int(draw) for prompt_id, draw in state}


def _read(prompts: Iterable[Any], ids: Iterable[Any], column: str) -> Mapping[str, PromptId]:
    found: dict[str, PromptId] = {}
    for prompt, prompt_id in zip(prompts, ids, strict=True):
        if type(prompt_id) not in (str, int):
            raise ConfigError(
                f"ids of prompts are texts or whole numbers, and {column!r} holds {prompt_id!r}; convert it"
            )
        found.setdefault(_key(prompt), prompt_id)
    return found


def _key(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
