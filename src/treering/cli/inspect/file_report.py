"""What `treering inspect` counts of one file: what trees share, other cuts of the data, branching, and rewards."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from treering.cli.inspect.why import WhyReport, explain_tasks
from treering.data import RenderedTrajectory, by_task
from treering.tree.forest import Forest
from treering.tree.stats import Branching, branching, flat_work, tree_work, work_bounds
from treering.types import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeSetReport:
    """All trajectories of a file in one forest, across tasks."""

    unique_tokens: int
    sharing: float
    token_bound: float
    flop_bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnsReport:
    """Each assistant turn as a sample: the tokens from the start of its trajectory to the end of the turn."""

    samples: int
    flat_tokens: int
    unique_tokens: int
    token_bound: float
    flop_bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardsReport:
    """Rewards of the trajectories that have one, and of the tasks with several of them."""

    num_rewards: int
    mean: float
    spread: float
    """Standard deviation over the trajectories."""
    groups: int
    """Tasks with at least two rewards."""
    equal_groups: int
    """Those whose rewards are all the same: advantages relative to the group are 0 there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReport:
    """One file with one tree per task; figures are sums over tasks, bounds are best possible speedups."""

    file: str
    trajectories: int
    tasks: int
    flat_tokens: int
    unique_tokens: int
    sharing: float
    token_bound: float
    flop_bound: float
    prompt_only_bound: float
    """Token bound if only prompts, the tokens before the first trained one, are merged."""
    whole_set: WholeSetReport
    turns: TurnsReport
    branching: Branching
    longest: int
    """Tokens of the longest sequence."""
    largest_tree: int
    """Distinct tokens of the largest task."""
    largest_id: int
    """The largest token id."""
    rewards: RewardsReport | None
    """None if no trajectory has one."""
    why: WhyReport | None = None
    """Where sharing is lost; None without `--why`."""


def measure(
    file: str,
    trajectories: Sequence[RenderedTrajectory],
    shape: ModelShape,
    tokenizer_dir: Path | None = None,
    num_causes: int = 0,
) -> FileReport:
    """The report of rendered trajectories, one or more, under the name `file`."""
    tasks = by_task(trajectories)
    forests = [Forest.from_sequences([t.tokens for t in task]) for task in tasks]
    flat, tree = flat_work(_lengths(trajectories)), tree_work(forests)
    bounds = work_bounds(flat, tree, shape)
    why = explain_tasks(trajectories, tasks, forests, tokenizer_dir, num_causes) if num_causes else None
    return FileReport(
        file=file,
        trajectories=len(trajectories),
        tasks=len(tasks),
        flat_tokens=flat.num_tokens,
        unique_tokens=tree.num_tokens,
        sharing=1.0 - tree.num_tokens / flat.num_tokens,
        token_bound=bounds.token_bound,
        flop_bound=bounds.flop_bound,
        prompt_only_bound=flat.num_tokens / sum(_num_prompt_shared_tokens(task) for task in tasks),
        whole_set=_whole_set(trajectories, shape),
        turns=_turns(tasks, shape),
        branching=branching(*forests),
        longest=max(trajectory.tokens.size for trajectory in trajectories),
        largest_tree=max(forest.num_tokens for forest in forests),
        largest_id=max(int(trajectory.tokens.max()) for trajectory in trajectories),
        rewards=_rewards(tasks),
        why=why,
    )


def _lengths(trajectories: Sequence[RenderedTrajectory]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array([trajectory.tokens.size for trajectory in trajectories], dtype=np.int64)


def _num_prompt_shared_tokens(task: Sequence[RenderedTrajectory]) -> int:
    prompts = Forest.from_sequences([t.tokens[: t.num_prompt_tokens] for t in task if t.num_prompt_tokens])
    return prompts.num_tokens + sum(t.tokens.size - t.num_prompt_tokens for t in task)


def _whole_set(trajectories: Sequence[RenderedTrajectory], shape: ModelShape) -> WholeSetReport:
    flat = flat_work(_lengths(trajectories))
    tree = tree_work([Forest.from_sequences([t.tokens for t in trajectories])])
    bounds = work_bounds(flat, tree, shape)
    return WholeSetReport(
        unique_tokens=tree.num_tokens,
        sharing=1.0 - tree.num_tokens / flat.num_tokens,
        token_bound=bounds.token_bound,
        flop_bound=bounds.flop_bound,
    )


def _turns(tasks: Sequence[Sequence[RenderedTrajectory]], shape: ModelShape) -> TurnsReport:
    # Samples of one trajectory are prefixes of its last one, so only the last adds tokens to the tree.
    trained = [[t for t in task if t.turn_ends.size] for task in tasks]
    tree = tree_work(Forest.from_sequences([t.tokens[: t.turn_ends[-1]] for t in task]) for task in trained)
    lengths = np.concatenate([np.empty(0, np.int32), *(t.turn_ends for task in trained for t in task)])
    flat = flat_work(lengths)
    bounds = work_bounds(flat, tree, shape)
    return TurnsReport(
        samples=lengths.size,
        flat_tokens=flat.num_tokens,
        unique_tokens=tree.num_tokens,
        token_bound=bounds.token_bound,
        flop_bound=bounds.flop_bound,
    )


def _rewards(tasks: Sequence[Sequence[RenderedTrajectory]]) -> RewardsReport | None:
    # A trajectory of several sequences has one reward.
    by_index = [{one.index: one.reward for one in task if one.reward is not None} for task in tasks]
    groups = [list(rewards.values()) for rewards in by_index]
    rewards = [reward for group in groups for reward in group]
    several = [group for group in groups if len(group) > 1]
    if not rewards:
        return None
    return RewardsReport(
        num_rewards=len(rewards),
        mean=float(np.mean(rewards)),
        spread=float(np.std(rewards)),
        groups=len(several),
        equal_groups=sum(len(set(group)) == 1 for group in several),
    )
