"""The drafter: proposed next tokens for a batch of rows, from history, running siblings and each row's own context.

Knows records and the order of calls. Knows nothing of engines: it never sees noise, and a wrong draft costs time only.

    B rows   L columns   D drafted tokens of all rows
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treering.errors import ConfigError, InputError, StateError
from treering.history.acceptance import SOURCES, Acceptance, Source, learn
from treering.history.arena import Arena
from treering.history.index import MAX_DEPTH
from treering.history.match import propose
from treering.history.store import HistoryStore
from treering.types import PromptId

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftRows:
    """The rows of one engine step; arrays are read in place, so they may be views of the engine's own.

    Attributes:
        prompt_ids: B ids; one that history does not know is fine.
        groups: int64 [B], equal numbers are siblings.
        tokens: int32 [B, L], row b's prompt and rollout so far from column 0 on; what stands behind is not read.
            Fastest where rows are contiguous.
        num_tokens: int64 [B], tokens of each context.
        num_prompt_tokens: int64 [B], how many of them are the prompt.
        max_drafts: int64 [B], the most that each row may get; 0 is none.

    Example: prompt [5, 6] and rollout [7] in a buffer of 4 columns are tokens [[5, 6, 7, 0]], num_tokens [3] and
    num_prompt_tokens [2].
    """

    prompt_ids: Sequence[PromptId]
    groups: Int64Array
    tokens: Int32Array
    num_tokens: Int64Array
    num_prompt_tokens: Int64Array
    max_drafts: Int64Array

    def __post_init__(self) -> None:
        shape = (len(self.prompt_ids),)
        if _kind_of(self.tokens) != np.int32 or self.tokens.ndim != 2 or self.tokens.shape[0] != shape[0]:
            raise InputError(
                f"tokens of {shape[0]} rows are int32 of shape ({shape[0]}, L), got {_kind_of(self.tokens)} of shape "
                f"{np.shape(self.tokens)}; pass the buffer's lines of these rows"
            )
        for name in ("groups", "num_tokens", "num_prompt_tokens", "max_drafts"):
            values = getattr(self, name)
            if _kind_of(values) != np.int64 or values.shape != shape:
                raise InputError(
                    f"{name} is int64 of shape {shape}, one entry per prompt_id, got {_kind_of(values)} of shape "
                    f"{np.shape(values)}; convert it"
                )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drafts:
    """Drafted tokens of all rows, one row after another; row b has those of `offsets[b]:offsets[b + 1]`.

    Attributes:
        tokens: int32 [D].
        offsets: int64 [B + 1].
        parents: int32 [D], number within the row's draft of the token before it; -1 is the context's last token.
        acceptance: float32 [D], estimated probability that it is accepted, given that those before it are.
        cells: int32 [D], what `observe` learns by.

    Example: a draft [8, 9] for row 0 and none for row 1 are tokens [8, 9], offsets [0, 2, 2], parents [-1, 0].
    """

    tokens: Int32Array
    offsets: Int64Array
    parents: Int32Array
    acceptance: NDArray[np.float32]
    cells: Int32Array

    def __post_init__(self) -> None:
        assert self.tokens.size == self.parents.size == self.acceptance.size == self.cells.size == self.offsets[-1]


class Drafter:
    """Proposes tokens that each row may go on with, and learns from what was accepted.

    For every source it takes the longest end of the context that occurs there with a token behind it, and of the
    sources the one whose first token is likeliest to be accepted. The draft goes on with the most frequent token of
    the occurrences that are left, until they end or the draft as a whole has become too unlikely.

    A drafter belongs to one engine and so to one thread; a store can serve many drafters.

    Args:
        store: its newest snapshot is read at each `propose`.
        max_draft: tokens per row at most, >= 1.
        min_acceptance: in (0, 1]; a draft ends before its estimated probability of being accepted whole falls below
            this. A source that looks too poor for its first token is tried again once in a while, the more rarely the
            more often it failed.
        max_match: longest match that is looked for, >= 1; with `max_draft` at most 64.
        sources: which are looked at, at least one; of equally likely ones history goes first, then siblings, then own.
        max_live_tokens: newest tokens of a running context that are searched, >= 1.

    Raises:
        ConfigError: a value out of range.

    Example:
        >>> import numpy as np
        >>> store = HistoryStore()
        >>> store.add("q", [np.array([7, 8, 9], np.int32)] * 2, version=0)
        >>> store.publish()
        >>> drafter = Drafter(store)
        >>> count = lambda *values: np.array(values, np.int64)
        >>> rows = DraftRows(prompt_ids=["q"], groups=count(0), tokens=np.array([[5, 6, 7]], np.int32),
        ...                  num_tokens=count(3), num_prompt_tokens=count(2), max_drafts=count(4))
        >>> drafts = drafter.propose(rows)
        >>> drafts.tokens.tolist(), drafts.parents.tolist(), [f"{value:.2f}" for value in drafts.acceptance]
        ([8, 9], [-1, 0], ['0.85', '0.85'])
        >>> drafter.observe(rows, count(2))
    """

    def __init__(
        self,
        store: HistoryStore,
        *,
        max_draft: int = 8,
        min_acceptance: float = 0.4,
        max_match: int = 16,
        sources: tuple[Source, ...] = SOURCES,
        max_live_tokens: int = 4096,
    ) -> None:
        for name, value in (("max_draft", max_draft), ("max_match", max_match), ("max_live_tokens", max_live_tokens)):
            if type(value) is not int or value < 1:
                raise ConfigError(
                    f"{name} of a drafter is a whole number, at least 1, got {value!r}; correct it, or use no drafter "
                    "at all"
                )
        if not isinstance(store, HistoryStore):
            raise ConfigError(f"a drafter reads a treering.HistoryStore, got {store!r}; make one, empty if need be")
        if max_match + max_draft > MAX_DEPTH:
            raise ConfigError(
                f"history is sorted by {MAX_DEPTH} tokens, so max_match + max_draft is at most that, got {max_match} + "
                f"{max_draft}; lower one of them"
            )
        if not 0 < min_acceptance <= 1:
            raise ConfigError(f"min_acceptance is a probability in (0, 1], got {min_acceptance}; 0.4 is usual")
        if not sources or not set(sources) <= set(SOURCES):
            raise ConfigError(f"sources are some of {SOURCES}, at least one, got {sources!r}; correct them")
        self._store = store
        self._max_draft = max_draft
        uses = np.array([source in sources for source in SOURCES])
        self._limits = (uses, max_draft, max_match, max_live_tokens, float(min_acceptance))
        self._acceptance = Acceptance()
        self._arena = Arena()
        self._latest: tuple[DraftRows, Drafts] | None = None

    def propose(self, rows: DraftRows) -> Drafts:
        """Drafts for each row, chains of at most `max_draft` and `rows.max_drafts[b]` tokens, possibly empty.

        Raises:
            InputError: a row's counts contradict each other.
        """
        num_rows = len(rows.prompt_ids)
        contexts = (rows.tokens, rows.num_tokens, rows.num_prompt_tokens, rows.groups, rows.max_drafts)
        slots = self._arena.slots(rows.prompt_ids, self._store.snapshot)
        texts = (slots, self._arena.spans, self._arena.text, self._arena.suffixes)
        table = (self._acceptance.estimate, self._acceptance.num_tried, self._acceptance.num_refused)
        size = num_rows * self._max_draft
        offsets = np.empty(num_rows + 1, np.int64)
        tokens, parents, cells = np.empty(size, np.int32), np.empty(size, np.int32), np.empty(size, np.int32)
        acceptance = np.empty(size, np.float32)
        output = (offsets, tokens, parents, acceptance, cells)
        bad_row = propose(*contexts, *texts, *self._limits, *table, *output)
        if bad_row >= 0:
            raise InputError(_contradiction(rows, bad_row))
        end = offsets[-1]
        drafts = Drafts(
            tokens=tokens[:end], offsets=offsets, parents=parents[:end], acceptance=acceptance[:end], cells=cells[:end]
        )
        self._latest = (rows, drafts)
        return drafts

    def observe(
        self, rows: DraftRows, accepted: NDArray[np.integer[Any]], ended: NDArray[np.bool_] | None = None
    ) -> None:
        """Learns from what became of the latest drafts; once per `propose`, and not needed after every one.

        Args:
            rows: those of the latest `propose`, the very same object.
            accepted: integers [B], drafted tokens of each row that were accepted.
            ended: bool [B], rows that ended behind their accepted tokens, so that the next drafted one was not tried.

        Raises:
            StateError: other rows, or a second time.
            InputError: a wrong shape or type, or more accepted tokens than drafted ones; nothing is learnt then.
        """
        if self._latest is None or self._latest[0] is not rows:
            raise StateError("observe belongs to the latest propose, once, and takes its rows object; propose first")
        drafts = self._latest[1]
        counts = np.asarray(accepted)
        has_ended = np.zeros(counts.shape, np.bool_) if ended is None else np.asarray(ended)
        shape = (len(rows.prompt_ids),)
        if (
            counts.shape != shape
            or has_ended.shape != shape
            or counts.dtype.kind not in "iu"
            or has_ended.dtype != bool
        ):
            raise InputError(
                f"accepted holds integers and ended booleans, both of shape {shape}, got {counts.dtype} of shape "
                f"{counts.shape} and {has_ended.dtype} of shape {has_ended.shape}; pass one entry per row"
            )
        num_drafted = drafts.offsets[1:] - drafts.offsets[:-1]
        if ((counts < 0) | (counts > num_drafted)).any():
            raise InputError(
                f"a row accepts between none and all of its drafted tokens, got {counts.tolist()} of "
                f"{num_drafted.tolist()}; count drafted tokens alone, without the one sampled behind them"
            )
        table = self._acceptance
        learned = (table.num_tried, table.num_accepted, table.prior, table.estimate)
        learn(drafts.offsets, drafts.cells, counts.astype(np.int64), has_ended, *learned)
        self._latest = None

    def state(self) -> dict[str, NDArray[np.float64]]:
        """What was learnt, for a checkpoint: copies. The store has its own (`HistoryStore.save`)."""
        return self._acceptance.state()

    def load_state(self, state: Mapping[str, NDArray[np.float64]]) -> None:
        """Goes on as the drafter whose `state` this is; drafts that were not observed are forgotten.

        Raises:
            InputError: other names, shapes or values; nothing is taken then.
        """
        self._acceptance.load_state(state)
        self._latest = None


def _kind_of(values: object) -> np.dtype[Any] | str:
    return values.dtype if isinstance(values, np.ndarray) else type(values).__name__


def _contradiction(rows: DraftRows, b: int) -> str:
    return (
        f"0 <= num_prompt_tokens <= num_tokens <= {rows.tokens.shape[1]} columns and max_drafts >= 0 in every row, got "
        f"{rows.num_prompt_tokens[b]}, {rows.num_tokens[b]} and {rows.max_drafts[b]} in row {b}; correct the counts"
    )
