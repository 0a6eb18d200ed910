"""Recorded rollouts as a replay needs them: flat arrays, and at every token how far its sampled run goes.

Knows files, tasks and what was sampled. Knows nothing of drafters and of what they may see.

    R rollouts   N tokens of all rollouts, one rollout after another
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from treering.analysis.recording import sampled_runs
from treering.arrays import BoolArray, Float64Array, Int32Array, Int64Array
from treering.data import RenderedTrajectory, Renderer, Trajectory, read_trajectories
from treering.errors import InputError

SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recording:
    """Rollouts in file order.

    Attributes:
        tokens: int32 [N], prompts included.
        is_sampled: bool [N], what a policy wrote; the rest was given to it.
        offsets: int64 [R + 1], where each rollout begins.
        starts: int64 [R], place in `tokens` of each rollout's first sampled token, which its prompt stands before.
        tasks: int64 [R], number of the task, counted as they first appear.
        generations: int64 [R], the epoch, else the step; 0 where the file has neither.
        rewards: float64 [R], NaN where unknown.
        run_ends: int64 [N], where the sampled run that a token is in ends; the token's own place where it was given.
        nexts: int64 [N + 1], the first sampled place from here on, the rollout's end where there is none.
        num_tasks_left_out: tasks of the file that are not here, because of a limit.
        gaps: what only some rollouts have of epoch and step, a sentence each.

    Example: prompt [5, 6], sampled [7, 8], given [9], sampled [4] have starts [2], run_ends [0, 1, 4, 4, 4, 6] and
    nexts [2, 2, 2, 3, 5, 5, 6].
    """

    tokens: Int32Array
    is_sampled: BoolArray
    offsets: Int64Array
    starts: Int64Array
    tasks: Int64Array
    generations: Int64Array
    rewards: Float64Array
    run_ends: Int64Array
    nexts: Int64Array
    num_tasks_left_out: int = 0
    gaps: tuple[str, ...] = ()

    @property
    def num_rollouts(self) -> int:
        """Rollouts."""
        return self.offsets.size - 1

    @property
    def num_sampled(self) -> int:
        """Sampled tokens, those that a replay emits."""
        return int(self.is_sampled.sum())

    def response(self, rollout: int) -> Int32Array:
        """A rollout without its prompt: from the first sampled token on, what was given in between included."""
        return self.tokens[self.starts[rollout] : self.offsets[rollout + 1]]


def record(trajectories: Sequence[Trajectory], rendered: Sequence[RenderedTrajectory]) -> Recording:
    """The recording of trajectories, each beside its tokens; those without a sampled token are left out.

    Raises:
        InputError: none has a sampled token.
    """
    kept = [pair for pair in zip(trajectories, rendered, strict=True) if pair[1].loss_mask.any()]
    if not kept:
        raise InputError(f"a replay needs sampled tokens, and none of {len(rendered)} rollouts has any: mark them")
    lengths = [one.tokens.size for _, one in kept]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    is_sampled = np.concatenate([one.loss_mask for _, one in kept])
    numbers: dict[object, int] = {}
    run_ends, nexts = sampled_runs(is_sampled, offsets)
    generations, gaps = _generations([one for one, _ in kept])
    return Recording(
        tokens=np.concatenate([one.tokens for _, one in kept]).astype(np.int32),
        is_sampled=is_sampled,
        offsets=offsets,
        starts=nexts[offsets[:-1]],
        tasks=np.array([numbers.setdefault(one.task_id, len(numbers)) for one, _ in kept], np.int64),
        generations=generations,
        rewards=np.array([np.nan if one.reward is None else one.reward for one, _ in kept]),
        run_ends=run_ends,
        nexts=nexts,
        gaps=gaps,
    )


def read_recording(file: Path, tokenizer: Path | None, limit_tokens: int | None = None) -> Recording:
    """The rollouts of a trajectory file.

    Args:
        file: JSON Lines, plain or .gz, of messages or tokens.
        tokenizer: folder that messages are rendered with.
        limit_tokens: whole tasks, in a seeded order, until they have as many sampled tokens; None is all of them.

    Raises:
        InputError: a missing or bad file, messages without a tokenizer, or nothing that was sampled.
    """
    trajectories = read_trajectories(file)
    rendered = Renderer(tokenizer=tokenizer).render(trajectories)
    if limit_tokens is None:
        return record(trajectories, rendered)
    sampled: dict[object, int] = {}
    for one in rendered:
        sampled[one.task_id] = sampled.get(one.task_id, 0) + int(one.loss_mask.sum())
    taken = _some(sampled, limit_tokens)
    pairs = [pair for pair in zip(trajectories, rendered, strict=True) if pair[0].task_id in taken]
    recording = record([one for one, _ in pairs], [one for _, one in pairs])
    return replace(recording, num_tasks_left_out=len(sampled) - len(taken))


def _some(sampled: Mapping[object, int], limit_tokens: int) -> set[object]:
    """Tasks, one after another in a seeded order, while those before have fewer sampled tokens than the limit."""
    order = np.random.default_rng(SEED).permutation(len(sampled))
    counts = np.array(list(sampled.values()), np.int64)[order]
    names = list(sampled)
    return {names[i] for i in order[np.cumsum(counts) - counts < limit_tokens].tolist()}


def _generations(trajectories: Sequence[Trajectory]) -> tuple[Int64Array, tuple[str, ...]]:
    """Epochs if all rollouts have one, else steps, else zeros; and what only some of them have."""
    gaps: list[str] = []
    for name in ("epoch", "step"):
        values = [getattr(one, name) for one in trajectories]
        num_without = values.count(None)
        if not num_without:
            return np.array(values, np.int64), tuple(gaps)
        if num_without < len(values):
            gaps.append(
                f"{num_without} of {len(values)} rollouts have no {name}, so {name}s do not say which rollouts are "
                "earlier: give all of them one"
            )
    return np.zeros(len(trajectories), np.int64), tuple(gaps)
