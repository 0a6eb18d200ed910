"""Replay recorded rollouts with a drafter, epoch after epoch, with the prompt's own history or another prompt's.

The replay is teacher-forced: draft tokens that agree with the recording are accepted, and one more token is emitted. As
in a run, a step drafts from earlier steps, and its rollouts are published to the store when it ends.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from treering.analysis.recording import Recorded, other_prompts
from treering.arrays import Int8Array, Int32Array, Int64Array
from treering.compiling.lean import kernel
from treering.history.draft.drafter import Drafter
from treering.history.draft_types import DraftRows
from treering.history.features import Source
from treering.history.store.store import MAX_EPOCHS, HistoryStore

Look = Literal["all", "history", "other_prompt", "own"]
"""Sources that a replayed rollout may draft from. all: the drafter's setting. history: the prompt's earlier epochs and
the rollout's own context. other_prompt: another prompt's history and the own context. own: only the context."""

NUM_ROWS = 64
"""Rows that are replayed at the same time."""

_SOURCES: dict[Look, tuple[Source, ...]] = {
    "history": ("history", "own"),
    "other_prompt": ("history", "own"),
    "own": ("own",),
}
_NO_LIMIT = np.iinfo(np.int64).max // 2


@dataclass(slots=True, kw_only=True)
class Drafted:
    """Sums over all row-steps of an epoch.

    Example: two row-steps that drafted 4 and 2 tokens, of which 3 and 0 were accepted, emitted 5: 2.5 tokens per step,
    an acceptance of 0.5.
    """

    num_steps: int = 0
    """Row-steps: forward passes times rows."""
    num_tokens: int = 0
    """Emitted sampled tokens."""
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens per row-step; 1.0 is plain decoding."""
        return self.num_tokens / self.num_steps

    @property
    def acceptance(self) -> float | None:
        """Accepted share of the drafted tokens; None without drafts."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None


def replay(
    recorded: Recorded,
    look: Look,
    *,
    max_epochs: int = MAX_EPOCHS,
    settings: Mapping[str, Any] | None = None,
    on_tokens: Callable[[int], None] = lambda _: None,
    origins: Int8Array | None = None,
) -> dict[int, Drafted]:
    """Replay a recording; the drafter keeps its state from epoch to epoch.

    Args:
        recorded: epochs in order.
        look: allowed sources, see `Look`.
        max_epochs: epochs of a prompt that the store keeps.
        settings: arguments of the `Drafter`; `sources` is used only if `look` is "all".
        on_tokens: called with the number of newly emitted tokens.
        origins: int8 [N] of the recording, or None. The index in `SOURCES` of each token that was drafted and accepted
            is written here; other entries are unchanged.

    Returns:
        Totals by epoch.

    Example: if every prompt repeats its rollouts in each epoch, "history" emits many tokens per step from the second
    epoch on, and "other_prompt" about one.
    """
    given = {**(settings or {}), **({"sources": _SOURCES[look]} if look in _SOURCES else {})}
    store = HistoryStore(max_bytes=1 << 62, max_epochs=max_epochs)
    drafter = Drafter(store, **given)
    numbers = np.arange(len(recorded.prompt_ids))
    looked_up = other_prompts(np.isin(numbers, recorded.prompts)) if look == "other_prompt" else numbers
    found: dict[int, Drafted] = {}
    for epoch, rollouts in _steps(recorded):
        drafted = found.setdefault(epoch, Drafted())
        ReplayRows(recorded, rollouts, looked_up).run(drafter, drafted, on_tokens, origins)
        _publish(store, recorded, rollouts, epoch)
    return found


class ReplayRows:
    """Rows of an engine that replays rollouts in a batch; a free row takes the next rollout."""

    def __init__(
        self, recorded: Recorded, rollouts: Int64Array, looked_up: Int64Array, groups: Int64Array | None = None
    ) -> None:
        """Replay up to `NUM_ROWS` rollouts at a time.

        Args:
            recorded: the rollouts.
            rollouts: int64 [K], the rollouts to replay, in order.
            looked_up: int64 [P], id under which the store has each prompt's history.
            groups: int64 [R], equal for siblings; None groups rollouts by prompt.
        """
        self._recorded, self._looked_up = recorded, looked_up
        self._groups = recorded.prompts if groups is None else groups
        self._waiting = iter(rollouts.tolist())
        size = min(NUM_ROWS, rollouts.size)
        longest = int((recorded.offsets[rollouts + 1] - recorded.offsets[rollouts]).max())
        self._buffer = np.zeros((size, longest), np.int32)
        self._rollouts = np.empty(size, np.int64)
        self._positions = np.empty(size, np.int64)
        self._num_busy = size
        for row in range(size):
            self._take(row, next(self._waiting))

    def run(
        self, drafter: Drafter, drafted: Drafted, on_tokens: Callable[[int], None], origins: Int8Array | None = None
    ) -> None:
        """Step until all rollouts are finished.

        Args:
            drafter: makes and learns from the drafts.
            drafted: receives the counts.
            on_tokens: called with the number of newly emitted tokens.
            origins: int8 [N], receives the index in `SOURCES` of each accepted token.
        """
        recorded = self._recorded
        while self._num_busy:
            rows = self._rows()
            drafts = drafter.propose(rows)
            positions = self._positions[: self._num_busy]
            accepted, leaves = agreement(
                recorded.tokens, recorded.run_ends, positions, drafts.tokens, drafts.offsets, drafts.parents
            )
            emitted = np.minimum(accepted + 1, recorded.run_ends[positions] - positions)
            if origins is not None:
                write_origins(
                    origins, positions, drafts.offsets, drafts.parents, accepted, leaves, drafter.sources_of_latest()
                )
            if drafts.tokens.size:
                # The policy chose where a run ends, so draft tokens after its end count as rejected.
                drafter.observe(rows, accepted, leaves=leaves)
            drafted.num_steps += accepted.size
            drafted.num_tokens += int(emitted.sum())
            drafted.num_drafted += drafts.tokens.size
            drafted.num_accepted += int(accepted.sum())
            on_tokens(int(emitted.sum()))
            self._move(emitted)

    def _rows(self) -> DraftRows:
        rollouts = self._rollouts[: self._num_busy].copy()
        begins = self._recorded.offsets[rollouts]
        prompts = self._recorded.prompts[rollouts]
        return DraftRows(
            # A single prompt has no other prompt: its index is -1, which has no history.
            prompt_ids=self._looked_up[prompts].tolist(),
            groups=self._groups[rollouts],
            tokens=self._buffer[: self._num_busy],
            num_tokens=self._positions[: self._num_busy] - begins,
            num_prompt_tokens=self._recorded.starts[rollouts] - begins,
            max_drafts=np.full(rollouts.size, _NO_LIMIT, np.int64),
            row_ids=rollouts,
        )

    def _move(self, emitted: Int64Array) -> None:
        """Move rows past emitted and given tokens, last rows first, so that freed rows can be filled."""
        nexts = self._positions[: self._num_busy] + emitted
        ends = self._recorded.offsets[self._rollouts[: self._num_busy] + 1]
        positions = np.where(nexts < ends, self._recorded.nexts[nexts], ends)
        self._positions[: self._num_busy] = positions
        for row in np.flatnonzero(positions == ends)[::-1].tolist():
            self._refill(row)

    def _refill(self, row: int) -> None:
        rollout = next(self._waiting, None)
        if rollout is not None:
            self._take(row, rollout)
            return
        last = self._num_busy = self._num_busy - 1
        self._buffer[row] = self._buffer[last]
        self._rollouts[row], self._positions[row] = self._rollouts[last], self._positions[last]

    def _take(self, row: int, rollout: int) -> None:
        begin, end = self._recorded.offsets[rollout : rollout + 2].tolist()
        # Copy the whole rollout: tokens past a row's count are not read.
        self._buffer[row, : end - begin] = self._recorded.tokens[begin:end]
        self._rollouts[row], self._positions[row] = rollout, self._recorded.starts[rollout]


def _steps(recorded: Recorded) -> Iterator[tuple[int, Int64Array]]:
    is_first = np.ones(recorded.num_rollouts, np.bool_)
    is_first[1:] = (np.diff(recorded.epochs) != 0) | (np.diff(recorded.steps) != 0)
    starts = np.flatnonzero(is_first)
    for rollouts in np.split(np.arange(recorded.num_rollouts), starts[1:]):
        yield int(recorded.epochs[rollouts[0]]), rollouts


def _publish(store: HistoryStore, recorded: Recorded, rollouts: Int64Array, epoch: int) -> None:
    groups: dict[int, list[int]] = {}
    for rollout in rollouts.tolist():
        groups.setdefault(int(recorded.prompts[rollout]), []).append(rollout)
    for prompt, members in groups.items():
        store.add(prompt, [recorded.response(one) for one in members], epoch)
    store.publish()


def agreement(
    recorded: Int32Array,
    run_ends: Int64Array,
    positions: Int64Array,
    tokens: Int32Array,
    offsets: Int64Array,
    parents: Int32Array,
) -> tuple[Int64Array, Int64Array]:
    """Count the draft tokens of each row that agree with the recording, within the current sampled run.

    Args:
        recorded: int32 [N] tokens.
        run_ends: int64 [N], see `Recorded`.
        positions: int64 [B], index of each row's next token.
        tokens: int32 [D], draft tokens; `offsets` and `parents` as in `Drafts`.
        offsets: int64 [B + 1].
        parents: int32 [D].

    Returns:
        int64 [B] accepted tokens, and int64 [B] the index in the row's draft of the last accepted one, -1 for none.

    Example: if 7, 8 follow, the draft 7, 9, 8 with parents -1, 0, 0 has two accepted tokens; the last has index 2.
    """
    accepted, leaves = np.zeros(positions.size, np.int64), np.full(positions.size, -1, np.int64)
    _agree(recorded, run_ends, positions, tokens, offsets, parents, accepted, leaves)
    return accepted, leaves


@kernel
def _agree(
    recorded: Int32Array, run_ends: Int64Array, positions: Int64Array, tokens: Int32Array, offsets: Int64Array,
    parents: Int32Array, accepted: Int64Array, leaves: Int64Array,
) -> None:  # fmt: skip
    for b in range(positions.size):
        position, end = positions[b], run_ends[positions[b]]
        # One pass is enough, because a child comes after its parent.
        for i in range(offsets[b], offsets[b + 1]):
            if position < end and parents[i] == leaves[b] and tokens[i] == recorded[position]:
                leaves[b] = i - offsets[b]
                accepted[b] += 1
                position += 1


@kernel
def write_origins(
    origins: Int8Array,
    positions: Int64Array,
    offsets: Int64Array,
    parents: Int32Array,
    accepted: Int64Array,
    leaves: Int64Array,
    sources: Int64Array,
) -> None:
    """Write the source of each accepted token to its index of the recording, int8 [N].

    Args:
        origins: changed in place.
        positions: int64 [B], index of each row's next token.
        offsets: int64 [B + 1], offsets of the rows' drafts.
        parents: int32 [D], see `Drafts`.
        accepted: int64 [B], see `agreement`.
        leaves: int64 [B], see `agreement`.
        sources: int64 [D], source of each drafted token.
    """
    for b in range(positions.size):
        at = leaves[b]
        for back in range(accepted[b]):
            origins[positions[b] + accepted[b] - 1 - back] = sources[offsets[b] + at]
            at = parents[offsets[b] + at]
