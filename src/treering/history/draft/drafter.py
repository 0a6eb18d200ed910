"""The drafter: proposes next tokens for a batch of rows, from history, running siblings and each row's own context.

It never sees the sampling noise, and a wrong draft costs only time.

    B rows   D drafted tokens   A for each row, the tokens of the draft that it was verified with
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from treering.arrays import Int64Array
from treering.errors import ConfigError, InputError, StateError
from treering.history.budget import DraftController, VerifyCosts
from treering.history.draft.acceptance import (
    Acceptance,
    ReliabilityBin,
    as_bins,
    as_counts,
    check_fault,
    check_latest,
    learn,
    mark,
)
from treering.history.draft.kernel import NUM_SCRATCH_BYTES, Budget, Output, propose
from treering.history.draft.tree import MAX_NODES, Model
from treering.history.draft.worth import Value
from treering.history.draft_types import DraftRows, Drafts, contradiction, no_drafts
from treering.history.features import NUM_KINDS, NUM_VOTES, SOURCES, Source, sources_of
from treering.history.match.sources import Rows, SearchState, SourceGate
from treering.history.store.history_reader import SnapshotSource
from treering.history.store.store import HistoryStore
from treering.types import is_count

MIN_ACCEPTANCE = 0.018
"""Default of `min_acceptance` in a `Drafter` and in a run's configuration."""

Shape = Literal["tree", "chain"]


def _check_integer(name: str, value: object, least: int, most: int) -> None:
    if not is_count(value, least=least) or value > most:
        raise ConfigError(
            f"{name} of a drafter must be an integer from {least} to {most}, got {value!r}; correct it, or turn "
            "drafting off"
        )


def repeat(drafts: Drafts, leaders: Int64Array) -> tuple[Drafts, Int64Array]:
    """Return every row with the draft that it was verified with, and the index of each token in `drafts`, int64 [A].

    Example: drafts of 2, 0 and 1 tokens with leaders [0, 0, 2] become drafts of 2, 2 and 1, from 0, 1, 0, 1 and 2.
    """
    sizes = (drafts.offsets[1:] - drafts.offsets[:-1])[leaders]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    origins = np.arange(offsets[-1]) + np.repeat(drafts.offsets[leaders] - offsets[:-1], sizes)
    repeated = Drafts(
        tokens=drafts.tokens[origins],
        offsets=offsets,
        parents=drafts.parents[origins],
        acceptance=drafts.acceptance[origins],
    )
    return repeated, origins


class Drafter:
    """Proposes continuations of each row, and learns from what was accepted.

    For each row it finds matches, positions where the row's context occurs: in the prompt's history, in the running
    rollouts of its group, in the row itself, and in history and running rollouts of other prompts. Matches vote for
    their next tokens. The drafter keeps the tokens of this tree of continuations that are most likely to be reached and
    accepted, by estimates that `observe` keeps calibrated.

    A drafter belongs to one engine and so to one thread; a store can serve many drafters.

    Args:
        store: its newest snapshot is read at each `propose`. History of other prompts is read where all rows are new,
            else once per as many steps as it has blocks of 64 tokens.
        max_draft: most tokens per row, 1 to 64.
        min_acceptance: in (0, 1]: least probability that a row's first drafted token is accepted, while the cost of
            passes is unknown. Later tokens must be likelier to be reached and accepted: by 0.036 after 8 others, by
            0.23 after 32. With `use_costs`, the tokens that pay are drafted instead.
        shape: "tree", or "chain" for engines that cannot verify trees.
        sources: sources that are searched, at least one.
        max_live_tokens: newest tokens of a running rollout or prompt that are searched, >= 16.
        max_other_tokens: tokens of other prompts' history that are searched, >= 0.

    Raises:
        ConfigError: a value is out of range.

    Example:
        >>> import numpy as np
        >>> from treering.history.store.store import HistoryStore
        >>> store = HistoryStore()
        >>> store.add("q", [np.array([7, 8, 9], np.int32)] * 2, version=0)
        >>> store.publish()
        >>> drafter = Drafter(store)
        >>> count = lambda *values: np.array(values, np.int64)
        >>> rows = DraftRows(prompt_ids=["q"], groups=count(0), tokens=np.array([[5, 6, 7]], np.int32),
        ...                  num_tokens=count(3), num_prompt_tokens=count(2), max_drafts=count(4))
        >>> drafts = drafter.propose(rows)
        >>> drafts.tokens.tolist(), drafts.parents.tolist()
        ([8, 9], [-1, 0])
        >>> drafter.observe(rows, count(2))
        >>> sum(bin.num_drafted for bin in drafter.reliability())
        2
    """

    def __init__(
        self,
        store: SnapshotSource,
        *,
        max_draft: int = 64,
        min_acceptance: float = MIN_ACCEPTANCE,
        shape: Shape = "tree",
        sources: tuple[Source, ...] = SOURCES,
        max_live_tokens: int = 4096,
        max_other_tokens: int = 1 << 18,
    ) -> None:
        _check_integer("max_draft", max_draft, 1, MAX_NODES)
        _check_integer("max_live_tokens", max_live_tokens, 16, 1 << 24)
        _check_integer("max_other_tokens", max_other_tokens, 0, 1 << 28)
        if not isinstance(min_acceptance, int | float | np.number) or not 0 < min_acceptance <= 1:
            raise ConfigError(
                f"min_acceptance must be a probability in (0, 1], got {min_acceptance!r}; {MIN_ACCEPTANCE} is usual"
            )
        if shape not in get_args(Shape):
            raise ConfigError(f"shape must be one of {', '.join(get_args(Shape))}, got {shape!r}; choose one")
        if not sources or not set(sources) <= set(SOURCES):
            raise ConfigError(f"sources must be at least one of {SOURCES}, got {sources!r}; correct them")
        if not isinstance(getattr(store, "snapshot", None), Mapping):
            raise ConfigError(f"a drafter needs a treering.HistoryStore, got {store!r}; make one, which may be empty")
        self._store = store
        self._max_draft = max_draft
        self.shape = shape
        """"tree" or "chain"."""
        self._acceptance = Acceptance()
        self._controller = DraftController(float(min_acceptance), self._acceptance.rests)
        self._sources = SourceGate(np.array([source in sources for source in SOURCES]), self._acceptance.asked)
        self._search_state = SearchState(
            max_live_tokens=max_live_tokens,
            max_other_tokens=max_other_tokens if "others" in sources else 0,
        )
        self._newest = store.snapshot
        self._leaders, self._weights, self._num_searched = np.zeros(0, np.int64), np.ones(0), 0
        self._shares, self._features = np.zeros((0, NUM_VOTES), np.float32), np.zeros((0, NUM_KINDS), np.int32)
        self._scratch = np.empty(NUM_SCRATCH_BYTES, np.uint8)
        self._latest: tuple[DraftRows, Drafts] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes held outside the store: indexes of running prompts, running rows, other prompts, weights."""
        return self._search_state.num_bytes + self._acceptance.num_bytes

    @property
    def costs(self) -> VerifyCosts | None:
        """The costs in use; see `use_costs`."""
        return self._controller.costs

    def use_costs(self, costs: VerifyCosts | None) -> None:
        """Set the costs of passes and drafting, so that the tokens that pay are drafted; None to use `min_acceptance`.

        Raises:
            ConfigError: `costs` is neither a `VerifyCosts` nor None.
        """
        if not isinstance(costs, VerifyCosts | None):
            raise ConfigError(f"costs of a drafter must be a VerifyCosts, or None if unknown, got {costs!r}; make one")
        self._controller.use_costs(costs)

    def is_backing_off(self) -> bool:
        """Return whether this step drafts nothing, whatever its rows; it is then counted and needs no `propose`."""
        newest = self._store.snapshot
        if newest is not self._newest:
            self._newest = newest
            self._controller.note_news()
        return not self._controller.is_due()

    def propose(self, rows: DraftRows, *, is_last: bool = False) -> Drafts:
        """Draft for each row at most `max_draft` and `rows.max_drafts[b]` tokens; a draft may be empty.

        Args:
            rows: rows of the step.
            is_last: whether no request takes the place of a row that ends. If costs are known, tokens then are worth
                less to rows that others outlast.

        Raises:
            InputError: `rows` is not a `DraftRows`, or counts of a row contradict each other.
        """
        if not isinstance(rows, DraftRows):
            raise InputError(f"propose needs a DraftRows, got {rows!r}; make one of the step's rows")
        num_rows = len(rows.prompt_ids)
        # If this call fails, the state of the rows no longer belongs to the previous call.
        self._latest = None
        if self.is_backing_off():
            self._latest = (rows, no_drafts(num_rows))
            return self._latest[1]
        self._prepare(rows)
        size = num_rows * self._max_draft
        offsets = np.empty(num_rows + 1, np.int64)
        tokens, parents = np.empty(size, np.int32), np.empty(size, np.int32)
        acceptance, paths = np.empty(size, np.float32), np.empty(size)
        searched, learnt = self._search_state, self._acceptance
        self._weights = np.ones(num_rows)
        bad_row, cutoff, num_grown = propose(
            Rows(
                rows.tokens, rows.num_tokens, rows.num_prompt_tokens, searched.live.row_scopes, rows.max_drafts,
                self._leaders, searched.prompt_slots, searched.own_spans,
            ),
            searched.history,
            searched.live.running,
            searched.others,
            searched.live.states,
            self._sources.due(),
            Model(learnt.weights, self.shape == "chain"),
            Budget(
                self._max_draft, *self._controller.leasts, *self._controller.curve,
                self._controller.fixed if is_last else 0.0,
            ),
            learnt.num_undrafted,
            Output(offsets, tokens, parents, acceptance, paths, self._shares, self._features, np.zeros(num_rows, bool)),
            Value(np.empty(num_rows), self._weights, np.empty(num_rows)),
            self._scratch,
        )  # fmt: skip
        if bad_row >= 0:
            raise InputError(contradiction(rows, bad_row))
        end = int(offsets[-1])
        if end > 0 or rows.max_drafts.any():
            self._controller.note_drafts(self._num_searched, end, cutoff, num_grown)
        drafts = Drafts(tokens=tokens[:end], offsets=offsets, parents=parents[:end], acceptance=acceptance[:end])
        self._latest = (rows, drafts)
        return drafts

    def observe(
        self,
        rows: DraftRows,
        accepted: NDArray[np.integer[Any]],
        ended: NDArray[np.bool_] | None = None,
        leaves: NDArray[np.integer[Any]] | None = None,
    ) -> None:
        """Learn from the outcome of the latest drafts; at most once per `propose`. Empty drafts teach nothing.

        Args:
            rows: the object that the latest `propose` got.
            accepted: integers [B], drafted tokens of each row that were accepted; of its leader's draft if it has a
                leader.
            ended: bool [B], rows that were cut off after their accepted tokens by something that tokens do not show,
                such as a limit; their later drafted tokens teach nothing. Not for stop tokens, because the drafter
                should learn that nothing follows them.
            leaves: integers [B], index within the row's draft of the last accepted token, -1 for none. Without it, a
                row teaches nothing from the first token on whose acceptance `accepted` leaves open, where its draft
                branches. Pass it for trees.

        Raises:
            StateError: `rows` is another object, or was observed before.
            InputError: a shape or dtype is wrong, or numbers do not belong to the drafts; nothing is learnt then.
        """
        drafts = check_latest(self._latest, rows)
        num_drafted, shares, features = drafts.tokens.size, self._shares, self._features
        if self._num_searched < self._leaders.size and num_drafted > 0:
            drafts, origins = repeat(drafts, self._leaders)
            shares, features = shares[origins], features[origins]
        counts, was_cut, last = as_counts(drafts, accepted, ended, leaves)
        was_accepted, searched, table = np.empty(drafts.tokens.size, np.int8), self._search_state, self._acceptance
        fault = mark(
            drafts.offsets, drafts.parents, counts, last, leaves is not None, was_cut, was_accepted,
            searched.live.states, searched.live_slots,
        )  # fmt: skip
        check_fault(fault, drafts, counts, last)
        self._latest = None
        if drafts.tokens.size == 0:
            return
        learn(
            drafts.offsets, drafts.parents, drafts.acceptance, shares, features, was_accepted,
            table.weights, table.squares, table.reliability,
        )  # fmt: skip
        self._sources.note(drafts.offsets, features, was_accepted, self._controller.token_s(self._num_searched))
        # Accepted tokens per leader, including its duplicates.
        num_gained = float(counts @ self._weights) * self._num_searched / counts.size
        self._controller.note_accepted(self._num_searched, num_drafted, num_gained)

    def warm_up(self) -> None:
        """Compile what `propose` and `observe` call, or load it from numba's cache, on made-up rows.

        Then no engine step waits for it: compiling takes ten seconds of a processor, loading a few tenths of a second.
        The drafter itself does not change.
        """
        context = np.arange(16, dtype=np.int32)
        with HistoryStore() as store:
            for prompt_id in ("q", "other"):
                store.add(prompt_id, [context] * 2, version=0)
            store.publish()
            twin, counts = Drafter(store, shape=self.shape), np.zeros(2, np.int64)
            # In the second step a row is replaced, in the third both have the same tokens.
            for num_tokens, newest, leaders in ((3, 1, None), (5, 2, None), (7, 2, counts)):
                rows = DraftRows(
                    prompt_ids=["q", f"new {newest}"], groups=np.array([0, newest]), tokens=np.stack([context] * 2),
                    num_tokens=counts + num_tokens, num_prompt_tokens=counts + 2, max_drafts=counts + 4,
                    row_ids=np.array([0, newest]), leaders=leaders,
                )  # fmt: skip
                twin.propose(rows)
                twin.observe(rows, counts)
            twin.use_costs(VerifyCosts(num_tokens=np.array([1, 8]), seconds=np.array([1e-3, 2e-3])))

    def sources_of_latest(self) -> Int64Array:
        """Return the index in `SOURCES` of the strongest match of each token of the latest drafts, int64 [D].

        Call it between `propose` and `observe`.

        Raises:
            StateError: there are no drafts, or `observe` was called.
        """
        if self._latest is None:
            raise StateError("there are no drafts whose sources are known; call propose first, and this before observe")
        num_drafted = self._latest[1].tokens.size
        return sources_of(self._features[:num_drafted])

    def reliability(self) -> tuple[ReliabilityBin, ...]:
        """Return how often estimates came true, by their size, likeliest last."""
        return as_bins(self._acceptance.reliability)

    def state(self) -> dict[str, NDArray[Any]]:
        """Return copies of what was learnt, for a checkpoint. The store is saved separately (`HistoryStore.save`)."""
        return self._acceptance.state()

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue as a new drafter with this state; forget running rows and unobserved drafts.

        Raises:
            InputError: names, shapes or values are wrong; nothing changes then.
        """
        self._acceptance.load_state(state)
        # A state does not include texts of rows that have left.
        self._search_state.forget()
        self._latest = None
        self.use_costs(self.costs)

    def _prepare(self, rows: DraftRows) -> None:
        """Bring the search state and the budget up to the rows of this step."""
        searched, num_rows = self._search_state, len(rows.prompt_ids)
        is_same = rows is searched.rows
        searched.take(rows, self._store.snapshot)
        if not is_same or rows.leaders is not None:
            num_before = self._num_searched
            # The compiled draft call reports a leader out of range.
            self._leaders = np.arange(num_rows) if rows.leaders is None else rows.leaders
            self._num_searched = int(np.count_nonzero(np.bincount(self._leaders % max(num_rows, 1))))
            if not is_same or self._num_searched != num_before:
                self._controller.use_rows(self._num_searched, num_rows - self._num_searched)
        size = num_rows * self._max_draft
        if self._shares.shape[0] < size:
            self._shares, self._features = (
                np.empty((size, NUM_VOTES), np.float32),
                np.empty((size, NUM_KINDS), np.int32),
            )
