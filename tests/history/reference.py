"""Define in plain Python which drafts are allowed, by scanning every position of every text a row may draft from.

Also build stores and rows from lists.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treering.history.draft.drafter import Drafter
from treering.history.draft_types import DraftRows, Drafts
from treering.history.store.store import HistoryStore

MARKER = -1
ALL_SOURCES = ("history", "siblings", "own", "others")
LEAST_EDIT = 3
"""Number of tokens that must agree before an edit for a position to count as a match."""


@dataclass(frozen=True, kw_only=True)
class Row:
    prompt_id: str | int = "q"
    prompt: tuple[int, ...] = (5, 6)
    rollout: tuple[int, ...] = ()
    group: int = 0
    max_drafts: int = 64

    @property
    def context(self) -> tuple[int, ...]:
        return (*self.prompt, *self.rollout)


def store_of(
    history: Mapping[Any, Mapping[int, Sequence[Sequence[int]]]],
    **options: int,
) -> HistoryStore:
    """Return a published store from prompt -> version -> rollouts."""
    store = HistoryStore(**options)
    for prompt_id, versions in history.items():
        for version, rollouts in versions.items():
            store.add(prompt_id, [np.array(rollout, np.int32) for rollout in rollouts], version)
    store.publish()
    return store


def simple(*rollouts: list[int], **options: Any) -> Drafter:
    """Return a drafter with one version of prompt "q" that drafts every match."""
    return Drafter(store_of({"q": {0: rollouts}}), **{"min_acceptance": 1e-6, **options})


def draft_rows(
    rows: Sequence[Row],
    *,
    num_spare: int = 3,
    row_ids: Sequence[int] | None = None,
    leaders: Sequence[int] | None = None,
) -> DraftRows:
    """Put the rows into one buffer whose unused columns hold garbage."""
    width = max((len(row.context) for row in rows), default=0) + num_spare
    tokens = np.full((len(rows), width), 1, np.int32)
    for b, row in enumerate(rows):
        tokens[b, : len(row.context)] = row.context
    return DraftRows(
        prompt_ids=[row.prompt_id for row in rows],
        groups=np.array([row.group for row in rows], np.int64),
        tokens=tokens,
        num_tokens=np.array([len(row.context) for row in rows], np.int64),
        num_prompt_tokens=np.array([len(row.prompt) for row in rows], np.int64),
        max_drafts=np.array([row.max_drafts for row in rows], np.int64),
        row_ids=None if row_ids is None else np.array(row_ids, np.int64),
        leaders=None if leaders is None else np.array(leaders, np.int64),
    )


def drafted(drafts: Drafts) -> list[list[int]]:
    return [drafts.tokens[a:b].tolist() for a, b in zip(drafts.offsets[:-1], drafts.offsets[1:], strict=True)]


def one_draft(drafter: Drafter, row: Row) -> list[int]:
    return drafted(drafter.propose(draft_rows([row])))[0]


def first_tokens(drafts: Drafts, b: int = 0) -> set[int]:
    """Return the tokens that a row's draft may begin with."""
    part = slice(drafts.offsets[b], drafts.offsets[b + 1])
    return set(drafts.tokens[part][drafts.parents[part] == -1].tolist())


def likeliest_path(drafts: Drafts, b: int = 0) -> list[int]:
    """Return the first path of a row's draft, which is its likeliest."""
    begin, end = drafts.offsets[b], drafts.offsets[b + 1]
    path = []
    for i in range(end - begin):
        if drafts.parents[begin + i] != i - 1:
            break
        path.append(int(drafts.tokens[begin + i]))
    return path


def same_drafts(a: Drafts, b: Drafts) -> bool:
    return all(
        getattr(a, name).tobytes() == getattr(b, name).tobytes()
        for name in ("tokens", "offsets", "parents", "acceptance")
    )


def walk(drafts: Drafts, b: int, truth: Sequence[int]) -> tuple[int, int]:
    """Return how many drafted tokens a rollout that continues with `truth` accepts, and the last one's index or -1."""
    begin, end = drafts.offsets[b], drafts.offsets[b + 1]
    leaf = -1
    for depth, token in enumerate(truth):
        found = [
            i for i in range(end - begin) if drafts.parents[begin + i] == leaf and drafts.tokens[begin + i] == token
        ]
        if not found:
            return depth, leaf
        leaf = found[0]
    return len(truth), leaf


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """Every text that rows may draft from."""

    history: Mapping[Any, Mapping[int, Sequence[Sequence[int]]]]
    rows: Sequence[Row]
    sources: Sequence[str] = ALL_SOURCES
    gone: Sequence[Row] = ()

    def check(self, drafts: Drafts, max_draft: int, least: float, *, is_chain: bool) -> None:
        """Raise if a draft breaks a rule of `Drafts` or of `Drafter`."""
        assert [a.dtype for a in (drafts.tokens, drafts.offsets, drafts.parents, drafts.acceptance)] == [
            np.int32, np.int64, np.int32, np.float32,
        ]  # fmt: skip
        assert drafts.offsets.size == len(self.rows) + 1
        assert drafts.offsets[0] == 0
        for b, row in enumerate(self.rows):
            part = slice(drafts.offsets[b], drafts.offsets[b + 1])
            tokens, parents = drafts.tokens[part].tolist(), drafts.parents[part].tolist()
            acceptance = drafts.acceptance[part].tolist()
            assert 0 <= len(tokens) <= min(max_draft, row.max_drafts)
            self._check_shape(tokens, parents, acceptance, least, is_chain=is_chain)
            paths = [path_of(tokens, parents, i) for i in range(len(tokens))]
            # The leaves' paths contain all other paths.
            for i in set(range(len(tokens))) - set(parents):
                assert self.may_draft(b, paths[i]), (b, row, paths[i])

    def _check_shape(
        self, tokens: list[int], parents: list[int], acceptance: list[float], least: float, *, is_chain: bool
    ) -> None:
        chances: list[float] = []
        for i, parent in enumerate(parents):
            assert -1 <= parent < i
            assert 0 < acceptance[i] <= 1
            chances.append(acceptance[i] * (chances[parent] if parent >= 0 else 1.0))
            assert chances[i] >= least * (1 - 1e-4)
        for parent in range(-1, len(tokens)):
            children = [i for i in range(len(tokens)) if parents[i] == parent]
            assert len({tokens[i] for i in children}) == len(children)
            assert len(children) <= 1 or not is_chain
            if children:
                assert children[0] == parent + 1
                assert acceptance[children[0]] == max(acceptance[i] for i in children)

    def may_draft(self, b: int, path: Sequence[int]) -> bool:
        """Return whether `path` occurs in a text of row b's sources, after a text that ends like the row's context."""
        row = self.rows[b]
        for text, context in self._texts(b):
            for at in range(1, len(text) - len(path) + 1):
                if list(text[at : at + len(path)]) == list(path) and _is_match(text[:at], context):
                    return True
        return self._may_follow_the_prompt(row, path)

    def _may_follow_the_prompt(self, row: Row, path: Sequence[int]) -> bool:
        """Search the prompt with the whole context, not only the rollout."""
        text = (MARKER, *row.prompt)
        return "own" in self.sources and any(
            list(text[at : at + len(path)]) == list(path) and _is_match(text[:at], (MARKER, *row.context))
            for at in range(1, len(text) - len(path) + 1)
        )

    def _texts(self, b: int) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """Yield each text with the context to search it with."""
        row = self.rows[b]
        context = (MARKER, *row.rollout)
        for prompt_id, versions in self.history.items():
            if ("history" if prompt_id == row.prompt_id else "others") in self.sources:
                yield from (((MARKER, *rollout), context) for rollouts in versions.values() for rollout in rollouts)
        others = [other for k, other in enumerate(self.rows) if k != b] + list(self.gone)
        if "siblings" in self.sources:
            yield from (((MARKER, *other.rollout), context) for other in others if other.group == row.group)
        if "others" in self.sources:
            foreign = [other for other in others if other.group != row.group]
            yield from (((MARKER, *text), context) for other in foreign for text in (other.rollout, other.prompt))
        if "own" in self.sources:
            yield (MARKER, *row.rollout), context


def path_of(tokens: Sequence[int], parents: Sequence[int], node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]


def common_end(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common suffix."""
    count = 0
    while count < min(len(a), len(b)) and a[-1 - count] == b[-1 - count]:
        count += 1
    return count


def _is_match(before: Sequence[int], context: Sequence[int]) -> bool:
    """Return whether `before` ends like the context, or does so before one edited token at either end or both."""
    behind_edit = max(
        common_end(before[:-1], context[:-1]), common_end(before, context[:-1]), common_end(before[:-1], context)
    )
    return common_end(before, context) >= 1 or behind_edit >= LEAST_EDIT
