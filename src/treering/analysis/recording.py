"""Recorded rollouts of several epochs as flat arrays, the input of replays and measurements.

R rollouts, sorted by epoch, then step, then input order   N tokens of all rollouts, one rollout after another
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from treering.arrays import BoolArray, Float64Array, Int32Array, Int64Array
from treering.compiling.lean import kernel
from treering.data import RenderedTrajectory, Trajectory
from treering.errors import InputError
from treering.types import PromptId

_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recorded:
    """Rollouts of a run as flat arrays.

    Example: prompt [5, 6], sampled [7, 8], given [9], sampled [4] have offsets [0, 6], starts [2], lengths [3],
    run_ends [0, 1, 4, 4, 4, 6] and nexts [2, 2, 2, 3, 5, 5, 6].
    """

    prompt_ids: tuple[PromptId, ...]
    """Prompts in order of first appearance; other fields use indices into this."""
    tokens: Int32Array
    """int32 [N], prompts included."""
    offsets: Int64Array
    """int64 [R + 1], where each rollout's prompt begins, and N."""
    starts: Int64Array
    """int64 [R], index of the first sampled token."""
    lengths: Int64Array
    """int64 [R] >= 1, sampled tokens."""
    run_ends: Int64Array
    """int64 [N], end of the sampled run that contains the token; the token's own index if it was not sampled."""
    nexts: Int64Array
    """int64 [N + 1], index of the first sampled token from here on; the rollout's end if there is none."""
    prompts: Int64Array
    """int64 [R], index of the prompt."""
    epochs: Int64Array
    """int64 [R], ascending."""
    steps: Int64Array
    """int64 [R], ascending within an epoch; all 0 unless every rollout has a step."""
    rewards: Float64Array
    """float64 [R], NaN where unknown."""

    @property
    def num_rollouts(self) -> int:
        """R."""
        return self.starts.size

    def response(self, rollout: int) -> Int32Array:
        """Return a rollout from its first sampled token on, observations included."""
        return self.tokens[self.starts[rollout] : self.offsets[rollout + 1]]


def record(
    trajectories: Sequence[Trajectory],
    rendered: Sequence[RenderedTrajectory],
    *,
    in_file_order: bool = False,
    choose: "Callable[[Outline], Outline]" = lambda whole: whole,
) -> Recorded:
    """Build a recording from trajectories and their tokens; skip those without a sampled token.

    Args:
        trajectories: trajectories in file order.
        rendered: their tokens.
        in_file_order: the n-th trajectory of a prompt counts as epoch n, and epochs in the file are ignored.
        choose: selects some of the rollouts.

    Raises:
        InputError: a trajectory has no epoch and `in_file_order` is false, or none has a sampled token.

    Example: prompts a, b, a in file order have the epochs 0, 0, 1.
    """
    rows = [
        RolloutFacts(one.task_id, one.epoch, one.step, int(row.loss_mask.sum()), row.reward)
        for one, row in zip(trajectories, rendered, strict=True)
    ]
    return choose(outline(rows, in_file_order=in_file_order)).record(lambda row: rendered[row])


class RolloutFacts(NamedTuple):
    """Properties of a rollout, without its tokens."""

    task_id: PromptId
    epoch: int | None
    step: int | None
    num_sampled: int
    reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outline:
    """Rollouts of a recording in its order, without their tokens.

    Example: its `lengths`, `prompts`, `epochs`, `steps` and `rewards` are those of the `Recorded`.
    """

    prompt_ids: tuple[PromptId, ...]
    rows: Int64Array
    """int64 [R], index of each rollout in the input."""
    prompts: Int64Array
    lengths: Int64Array
    epochs: Int64Array
    steps: Int64Array
    rewards: Float64Array

    @property
    def num_rollouts(self) -> int:
        """R."""
        return self.rows.size

    def taking(self, rollouts: Int64Array) -> "Outline":
        """Select rollouts, int64 [K], ascending. Prompts keep their indices."""
        columns = ("rows", "prompts", "lengths", "epochs", "steps", "rewards")
        return replace(self, **{name: getattr(self, name)[rollouts] for name in columns})

    def record(self, tokens_of: Callable[[int], RenderedTrajectory]) -> Recorded:
        """Build the recording; `tokens_of` returns the tokens of a row, and is called once for each row in order."""
        parts = [tokens_of(row) for row in self.rows.tolist()]
        offsets = np.concatenate([[0], np.cumsum([one.tokens.size for one in parts])]).astype(np.int64)
        run_ends, nexts = sampled_runs(np.concatenate([one.loss_mask for one in parts]), offsets)
        return Recorded(
            prompt_ids=self.prompt_ids,
            tokens=np.concatenate([one.tokens for one in parts]).astype(np.int32, copy=False),
            offsets=offsets,
            starts=nexts[offsets[:-1]],
            lengths=self.lengths,
            run_ends=run_ends,
            nexts=nexts,
            prompts=self.prompts,
            epochs=self.epochs,
            steps=self.steps,
            rewards=self.rewards,
        )


def outline(rows: Sequence[RolloutFacts], *, in_file_order: bool = False) -> Outline:
    """Outline rollouts in file order; arguments and errors are those of `record`."""
    if in_file_order:
        counts: dict[PromptId, int] = {}
        rows = [one._replace(epoch=_count(counts, one.task_id), step=None) for one in rows]
    for number, one in enumerate(rows, start=1):
        if one.epoch is None:
            raise InputError(
                f"history is measured from one epoch to the next, but trajectory {number} (task {one.task_id!r}) has "
                'no "epoch"; write the pass over the prompts that sampled it into each line'
            )
    kept = [number for number, one in enumerate(rows) if one.num_sampled]
    if not kept:
        raise InputError(
            f"history needs sampled tokens, but none of {len(rows)} rollouts has any; mark them in loss_mask"
        )
    has_steps = all(rows[number].step is not None for number in kept)
    kept.sort(key=lambda number: (rows[number].epoch, rows[number].step if has_steps else 0))
    numbers: dict[PromptId, int] = {}
    ordered = [rows[number] for number in kept]
    prompts = [numbers.setdefault(one.task_id, len(numbers)) for one in ordered]
    return Outline(
        prompt_ids=tuple(numbers),
        rows=np.array(kept, np.int64),
        prompts=np.array(prompts, np.int64),
        lengths=np.array([one.num_sampled for one in ordered], np.int64),
        epochs=np.array([one.epoch for one in ordered], np.int64),
        steps=np.array([one.step if has_steps else 0 for one in ordered], np.int64),
        rewards=np.array([np.nan if one.reward is None else one.reward for one in ordered]),
    )


def _count(counts: dict[PromptId, int], prompt: PromptId) -> int:
    counts[prompt] = counts.get(prompt, -1) + 1
    return counts[prompt]


def some_prompts(recorded: Outline, *, weights: Int64Array, limit: int) -> Outline:
    """Choose whole prompts in a seeded order until their weights sum to `limit`; keep their rollouts of every epoch.

    Args:
        recorded: rollouts to choose from.
        weights: int64 [R], weight of each rollout.
        limit: approximate total weight of the chosen prompts.

    Example: of 100 prompts with 8 rollouts in each of 4 epochs, weights of 1 and a limit of 320 choose 10 prompts.
    """
    if weights.sum() <= limit:
        return recorded
    order = prompt_order(len(recorded.prompt_ids))
    totals = np.bincount(recorded.prompts, weights=weights, minlength=order.size).astype(np.int64)[order]
    is_chosen = np.zeros(order.size, np.bool_)
    is_chosen[order[np.cumsum(totals) - totals < limit]] = True
    return recorded.taking(np.flatnonzero(is_chosen[recorded.prompts]))


def prompt_order(num_prompts: int) -> Int64Array:
    """Return a fixed random order of the prompts, int64 [P]."""
    return np.random.default_rng(_SEED).permutation(num_prompts)


def other_prompts(present: BoolArray) -> Int64Array:
    """Return a different prompt for each, all distinct, int64 [P]: the next present one in `prompt_order`, cyclically.

    Prompts that are not `present`, bool [P], get -1; so does a prompt that is the only one.

    Example: prompts 2, 0, 1 in that order, all present, have the others 1, 2, 0.
    """
    others = np.full(present.size, -1, np.int64)
    order = prompt_order(present.size)
    order = order[present[order]]
    if order.size > 1:
        others[order] = np.roll(order, -1)
    return others


def sampled_runs(is_sampled: BoolArray, offsets: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Find where the sampled runs of rollouts end: `Recorded.run_ends` and `Recorded.nexts`.

    Args:
        is_sampled: bool [N].
        offsets: int64 [R + 1], where each rollout begins.
    """
    run_ends, nexts = np.empty(is_sampled.size, np.int64), np.empty(is_sampled.size + 1, np.int64)
    nexts[is_sampled.size] = is_sampled.size
    _fill_runs(is_sampled, offsets, run_ends, nexts)
    return run_ends, nexts


@kernel
def _fill_runs(is_sampled: BoolArray, offsets: Int64Array, run_ends: Int64Array, nexts: Int64Array) -> None:
    for rollout in range(offsets.size - 1):
        run_end = following = offsets[rollout + 1]
        for position in range(offsets[rollout + 1] - 1, offsets[rollout] - 1, -1):
            if is_sampled[position]:
                following = position
            else:
                run_end = position
            run_ends[position] = run_end if is_sampled[position] else position
            nexts[position] = following
