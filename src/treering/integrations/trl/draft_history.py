"""Earlier rollouts of a run's prompts, indexed for drafts when a prompt comes again, if that is worth the time."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from treering.engine.request import Request
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
    draw: int = -1
    """Their draw, which a call may go on with; -1 for one that has ended."""
    tokens: Mapping[int, TokenIds] = field(default_factory=dict)
    """By sample."""


class DraftHistory:
    """Keeps each prompt's latest rollouts, and gives a drafter those of the prompts that run.

    A run whose prompts never come again, or whose drafts do not pay, spends nothing on them but the memory of their
    tokens.

    Example: after `keep` has the rollouts of "q" in its first draw, `prepare` with requests of its second makes them
    drafts, if the budget of `costs` allows.
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
        """Takes finished rollouts or turns of rollouts, and the policy version that ended them."""
        for rollout in rollouts:
            before = self._latest.get(rollout.prompt_id)
            others = before.tokens if before is not None and before.draw == rollout.draw else {}
            tokens = {**others, rollout.sample: rollout.tokens}
            self._latest[rollout.prompt_id] = KeptRollouts(version=version, draw=rollout.draw, tokens=tokens)
            self._unread.add(rollout.prompt_id)

    def prepare(self, requests: Iterable[Request]) -> None:
        """Indexes earlier draws of the prompts of requests, if that is likely to pay."""
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
        """The latest rollouts of every prompt, for a checkpoint."""
        return dict(self._latest)

    def load(self, latest: dict[PromptId, KeptRollouts]) -> None:
        """Continues from `latest`."""
        self._latest, self._unread = dict(latest), set(latest)
