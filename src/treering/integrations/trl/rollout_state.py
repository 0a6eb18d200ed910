"""State that `HistoryRollouts` keeps between calls and in checkpoints: draws, and each prompt's latest rollouts."""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from treering.engine.protocol import Request, Rollout
from treering.engine.speculation import ObservedCosts
from treering.errors import ConfigError
from treering.files.writing import read_facts, write_folder
from treering.history.draft.drafter import Drafter
from treering.history.store.store import HistoryStore
from treering.types import PromptId, TokenIds, hash_of_prompt

ID_COLUMNS = ("prompt_id", "id", "index")
"""Columns that may hold prompt ids if no column is named; the first one found is used."""


class PromptIds:
    """Prompt ids of a dataset, and how often each prompt was drawn.

    Example: a dataset with the columns "prompt" and "id" names its prompts; other prompts are known by a hash of their
    tokens.
    """

    def __init__(self, dataset: Any, column: str | None) -> None:
        """Read the ids of a dataset's prompts.

        Args:
            dataset: the trainer's; None, or one without columns, has no ids.
            column: column with the ids; None: the first of `ID_COLUMNS`.

        Raises:
            ConfigError: the column is missing, or has a value that is neither text nor a whole number.
        """
        columns = list(getattr(dataset, "column_names", None) or ())
        if column is not None and column not in columns:
            raise ConfigError(f"id_column={column!r} is not a column of the training data; choose one of {columns}")
        found = column or next((name for name in ID_COLUMNS if name in columns), None)
        can_read = found is not None and "prompt" in columns and hasattr(dataset, "__len__")
        self._ids = _read(dataset["prompt"], dataset[found], str(found)) if can_read else {}
        self._draws: dict[PromptId, int] = {}

    def of(self, prompt: Any, tokens: Sequence[int]) -> PromptId:
        """Return a prompt's id: the dataset's, or a hash of its token ids.

        Example: two prompts with the same tokens have the same hash, in every process.
        """
        known = self._ids.get(_key(prompt)) if self._ids and prompt is not None else None
        return hash_of_prompt(tokens) if known is None else known

    def draw(self, prompt_ids: Iterable[PromptId]) -> dict[PromptId, int]:
        """Return the draw of each prompt of one call and advance it; draws count from 0 per prompt."""
        found = {prompt_id: self._draws.get(prompt_id, 0) for prompt_id in prompt_ids}
        self._draws |= {prompt_id: draw + 1 for prompt_id, draw in found.items()}
        return found

    def state(self) -> list[tuple[PromptId, int]]:
        """Return the draws so far, for a checkpoint."""
        return list(self._draws.items())

    def load_state(self, state: Iterable[Sequence[Any]]) -> None:
        """Continue counting from a saved state."""
        self._draws = {prompt_id: int(draw) for prompt_id, draw in state}


def _read(prompts: Iterable[Any], ids: Iterable[Any], column: str) -> Mapping[str, PromptId]:
    found: dict[str, PromptId] = {}
    for prompt, prompt_id in zip(prompts, ids, strict=True):
        if type(prompt_id) not in (str, int):
            raise ConfigError(
                f"prompt ids must be texts or whole numbers, but column {column!r} holds {prompt_id!r}; convert it"
            )
        found.setdefault(_key(prompt), prompt_id)
    return found


def _key(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)


_TOKEN_S = 3e-6
"""Seconds to add and index one token; measured: 1.2 us for 4,300 tokens on two slow cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRollouts:
    """Rollouts of a prompt's latest draw."""

    version: int
    """Policy version at which they ended."""
    draw: int = -1
    """Their draw, if a later call may continue it; -1 if it has ended."""
    tokens: Mapping[int, TokenIds] = field(default_factory=dict)
    """Tokens by sample index."""


class DraftHistory:
    """Latest rollouts of each prompt, indexed for a drafter only when their prompts run again.

    A run whose prompts never repeat, or whose drafts do not pay off, spends only the memory of the tokens.

    Example: after `keep` gets the rollouts of "q" in draw 0, `prepare` with requests of draw 1 makes them available as
    drafts, if the budget of `costs` allows.
    """

    def __init__(self, costs: ObservedCosts) -> None:
        """`costs` decides whether to index, and is charged the processor time that indexing takes."""
        self._costs = costs
        self._latest: dict[PromptId, KeptRollouts] = {}
        self._unread: set[PromptId] = set()
        self._store: HistoryStore | None = None
        self.drafter: Drafter | None = None
        """Drafter over the history; None while the history is empty."""

    def keep(self, rollouts: Iterable[Rollout], version: int) -> None:
        """Record finished rollouts, or turns of rollouts, and the policy version at which they ended."""
        for rollout in rollouts:
            before = self._latest.get(rollout.prompt_id)
            others = before.tokens if before is not None and before.draw == rollout.draw else {}
            tokens = {**others, rollout.sample: rollout.tokens}
            self._latest[rollout.prompt_id] = KeptRollouts(version=version, draw=rollout.draw, tokens=tokens)
            self._unread.add(rollout.prompt_id)

    def prepare(self, requests: Iterable[Request]) -> None:
        """Index earlier draws of the requested prompts, if that is likely to pay off."""
        running = {request.prompt_id: request.draw for request in requests if request.prompt_id in self._unread}
        due = {name: self._latest[name] for name, draw in running.items() if self._latest[name].draw != draw}
        num_tokens = sum(tokens.size for kept in due.values() for tokens in kept.tokens.values())
        if not due or not self._costs.is_promising() or not self._costs.can_spend(_TOKEN_S * num_tokens):
            return
        start = time.process_time()
        if self._store is None:
            self._store = HistoryStore()
            self.drafter = Drafter(self._store)
        for prompt_id, kept in due.items():
            self._store.add(prompt_id, list(kept.tokens.values()), kept.version)
        self._store.publish()
        self._unread.difference_update(due)
        self._costs.note_overhead(time.process_time() - start)

    def latest(self) -> dict[PromptId, KeptRollouts]:
        """Return the latest rollouts of every prompt, for a checkpoint."""
        return dict(self._latest)

    def load(self, latest: dict[PromptId, KeptRollouts]) -> None:
        """Continue from saved `latest` rollouts."""
        self._latest, self._unread = dict(latest), set(latest)


_FILE = "tokens.npy"


def save_state(checkpoint: Path, rank: int, version: int, ids: PromptIds, history: DraftHistory) -> None:
    """Write the state into a checkpoint's folder, atomically."""
    latest = history.latest()
    rollouts = [tokens for kept in latest.values() for tokens in kept.tokens.values()]
    facts = {
        "version": version,
        "draws": ids.state(),
        "prompts": [[prompt_id, kept.version, len(kept.tokens)] for prompt_id, kept in latest.items()],
        "sizes": [int(tokens.size) for tokens in rollouts],
    }
    tokens = np.concatenate(rollouts) if rollouts else np.zeros(0, np.int32)
    write_folder(_folder(checkpoint, rank), lambda folder: np.save(folder / _FILE, tokens), facts)


def load_state(checkpoint: Path, rank: int, ids: PromptIds, history: DraftHistory) -> int:
    """Read a state back; return its policy version.

    Raises:
        StateError: the state is damaged.
    """
    facts = read_facts(_folder(checkpoint, rank))
    tokens = np.load(_folder(checkpoint, rank) / _FILE)
    parts = iter(np.split(tokens, np.cumsum(facts["sizes"])[:-1]) if facts["sizes"] else [])
    history.load(
        {
            prompt_id: KeptRollouts(version=version, tokens={sample: next(parts) for sample in range(count)})
            for prompt_id, version, count in facts["prompts"]
        }
    )
    ids.load_state(facts["draws"])
    return int(facts["version"])


def has_state(checkpoint: Path, rank: int) -> bool:
    """Return whether a checkpoint's folder has the state of a process."""
    return _folder(checkpoint, rank).is_dir()


def _folder(checkpoint: Path, rank: int) -> Path:
    # One parent per process: writing a folder removes leftovers of killed writers next to it.
    return checkpoint / f"history_rollouts_{rank}" / "state"
