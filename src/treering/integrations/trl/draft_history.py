"""Earlier rollouts of a run's prompts, indexed for drafts when a prompt comes again, if that is worth the time."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from treering.engine.rollout import Rollout
from treering.engine.speculation.observed_costs import ObservedCosts
from treering.history.draft.drafter import Drafter
from treering.history.store.store import HistoryStore
from treering.types import PromptId, TokenIds

_TOKEN_S = 3e-6
"""Seconds of adding and indexing one token: 1.2 us were measured for 4,300 tokens on two slow cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRollouts:
    """A prompt's rollouts of its latest draw."""

    version: int
    """Policy version that ended them."""
    tokens: tuple[TokenIds, ...]


class DraftHistory:
    """Keeps each prompt's latest rollouts, and gives a drafter those of the prompts that run.

    A run whose prompts never come again, or whose drafts do not pay, spends nothing on them but the memory of their
    tokens.

    Example: after `keep(rollouts, 1)`, `prepare(["q"])` makes the rollouts of "q" drafts, if the budget of
    `costs` allows.
    """

    def __init__(self, costs: ObservedCosts) -> None:
        """`costs` decides, and counts the seconds of the processor that indexing takes."""
        self._costs = costs
        self._latest: dict[PromptId, KeptRollouts] = {}
        self._unread: set[PromptId] = set()
        self._store: HistoryStore | None = None
        self.drafter: Drafter | None = None
        """Drafts from the history; None until there is some."""

    def keep(self, rollouts: Iterable[Rollout], version: int) -> None:
        """Takes the finished rollouts of one draw, and the policy version that ended them."""
        grouped: dict[PromptId, list[TokenIds]] = {}
        for rollout in rollouts:
            grouped.setdefault(rollout.prompt_id, []).append(rollout.tokens)
        for prompt_id, group in grouped.items():
            self._latest[prompt_id] = KeptRollouts(version=version, tokens=tuple(group))
        self._unread |= grouped.keys()

    def prepare(self, prompt_ids: Iterable[PromptId]) -> None:
        """Indexes the rollouts of prompts that are about to run, if that is likely to pay."""
        due = [prompt_id for prompt_id in prompt_ids if prompt_id in self._unread]
        num_tokens = sum(tokens.size for prompt_id in due for tokens in self._latest[prompt_id].tokens)
        if not due or not self._costs.is_promising() or not self._costs.can_spend(_TOKEN_S * num_tokens):
            return
        start = time.process_time()
        if self._store is None:
            self._store = HistoryStore()
            self.drafter = Drafter(self._store)
        for prompt_id in due:
            kept = self._latest[prompt_id]
            self._store.add(prompt_id, list(kept.tokens), kept.version)
        self._store.publish()
        self._unread.difference_update(due)
        self._costs.note_overhead(time.process_time() - start)

    def latest(self) -> dict[PromptId, KeptRollouts]:
        """The latest rollouts of every prompt, for a checkpoint."""
        return dict(self._latest)

    def load(self, latest: dict[PromptId, KeptRollouts]) -> None:
        """Continues from `latest`."""
        self._latest, self._unread = dict(latest), set(latest)
