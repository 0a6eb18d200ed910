"""Drafts in plain Python, by looking at every place of every text: what the compiled drafter must equal.

Also builders of stores and rows from lists.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from treering.history.draft import Drafter, DraftRows, Drafts
from treering.history.store import HistoryStore

SOURCES = ("history", "siblings", "own")


@dataclass(frozen=True, kw_only=True)
class Row:
    prompt_id: str | int = "q"
    prompt: tuple[int, ...] = (5, 6)
    rollout: tuple[int, ...] = ()
    group: int = 0
    max_drafts: int = 8


def store_of(history: Mapping[str | int, Mapping[int, Sequence[Sequence[int]]]], **options: int) -> HistoryStore:
    """A store with prompt -> version -> rollouts, published."""
    store = HistoryStore(**options)
    for prompt_id, versions in history.items():
        for version, rollouts in versions.items():
            store.add(prompt_id, [np.array(rollout, np.int32) for rollout in rollouts], version)
    store.publish()
    return store


def draft_rows(rows: Sequence[Row], *, num_spare: int = 3) -> DraftRows:
    """The rows in one buffer whose unused columns hold garbage."""
    contexts = [(*row.prompt, *row.rollout) for row in rows]
    width = max((len(context) for context in contexts), default=0) + num_spare
    tokens = np.full((len(rows), width), 1, np.int32)
    for b, context in enumerate(contexts):
        tokens[b, : len(context)] = context
    return DraftRows(
        prompt_ids=[row.prompt_id for row in rows],
        groups=np.array([row.group for row in rows], np.int64),
        tokens=tokens,
        num_tokens=np.array([len(context) for context in contexts], np.int64),
        num_prompt_tokens=np.array([len(row.prompt) for row in rows], np.int64),
        max_drafts=np.array([row.max_drafts for row in rows], np.int64),
    )


def drafted(drafts: Drafts) -> list[list[int]]:
    """Each row's tokens."""
    return [drafts.tokens[a:b].tolist() for a, b in zip(drafts.offsets[:-1], drafts.offsets[1:], strict=True)]


def one_draft(drafter: Drafter, row: Row) -> list[int]:
    return drafted(drafter.propose(draft_rows([row])))[0]


@dataclass(frozen=True, kw_only=True)
class Naive:
    """The drafter's rules, read off its documentation."""

    history: Mapping[str | int, Sequence[Sequence[int]]]  # prompt -> rollouts, newest first
    state: Mapping[str, np.ndarray]
    max_draft: int = 8
    min_acceptance: float = 0.4
    max_match: int = 16
    sources: Sequence[str] = SOURCES
    max_live_tokens: int = 4096

    def draft(self, rows: Sequence[Row], b: int) -> tuple[list[int], list[float]]:
        """Tokens of row b with the estimated acceptance of each."""
        limit = min(self.max_draft, rows[b].max_drafts)
        best: list[tuple[int, float]] = []
        for source in SOURCES:
            if source in self.sources and limit > 0:
                chain = self._chain(source, *self._matches(source, rows, b), limit)
                if chain and (not best or chain[0][1] > best[0][1]):
                    best = chain
        kept, product = [], 1.0
        for token, estimate in best:
            product *= estimate
            if product < self.min_acceptance:
                break
            kept.append((token, estimate))
        return [token for token, _ in kept], [estimate for _, estimate in kept]

    def _matches(self, source: str, rows: Sequence[Row], b: int) -> tuple[int, list[tuple[Sequence[int], int]]]:
        """(length of the longest match, its places in order): a place is a text and where the match ends in it."""
        own = (*rows[b].prompt, *rows[b].rollout)
        pattern = own if source == "own" else (-1, *rows[b].rollout)
        for length in range(min(self.max_match, len(pattern)), 0, -1):
            end = tuple(pattern[len(pattern) - length :])
            places = [place for place in self._places(source, rows, b) if _ends_with(*place, end)]
            if places:
                whole = source != "own" and length == len(pattern)
                return (16 if whole else length), places if source == "history" else places[:32]
        return 0, []

    def _places(self, source: str, rows: Sequence[Row], b: int) -> list[tuple[Sequence[int], int]]:
        """Every place of a source that has a token behind it, in order of preference."""
        if source == "history":
            texts = [(-1, *rollout) for rollout in self.history.get(rows[b].prompt_id, [])]
            return [(text, end) for text in texts for end in range(1, len(text))]
        if source == "own":
            text = (*rows[b].prompt, *rows[b].rollout)
            return [(text, end) for end in range(len(text) - 1, 0, -1) if len(text) - end <= self.max_live_tokens]
        found = []
        for other, row in enumerate(rows):
            if other != b and row.group == rows[b].group:
                text = (-1, *row.rollout)
                ends = range(len(text) - 1, 0, -1)
                found += [(text, end) for end in ends if end == 1 or len(text) - end <= self.max_live_tokens]
        return found

    def _chain(
        self, source: str, length: int, places: list[tuple[Sequence[int], int]], limit: int
    ) -> list[tuple[int, float]]:
        chain: list[tuple[int, float]] = []
        while places and len(chain) < limit:
            nexts = [text[end] for text, end in places]
            # Counter keeps the order of first appearance, so the newest of equally frequent ones comes first.
            token, votes = Counter(nexts).most_common(1)[0]
            chain.append((token, self._estimate(source, length, votes, len(nexts))))
            places = [(text, end + 1) for text, end in places if text[end] == token and end + 1 < len(text)]
            length += 1
        return chain

    def _estimate(self, source: str, length: int, votes: int, total: int) -> float:
        share = votes / total
        bucket = (int(total > 1)) if share == 1 else 2 if share >= 0.75 else 3 if share >= 0.5 else 4
        length = min(length, 16)
        cell = np.ravel_multi_index((SOURCES.index(source), length - 1, bucket), (3, 16, 5))
        prior = (1 - 0.5**length) * (0.7, 0.85, 0.75, 0.55, 0.3)[bucket]
        return float((self.state["num_accepted"][cell] + 4 * prior) / (self.state["num_tried"][cell] + 4))


def _ends_with(text: Sequence[int], end: int, pattern: tuple[int, ...]) -> bool:
    return end >= len(pattern) and tuple(text[end - len(pattern) : end]) == pattern
