"""What `treering inspect` counts of one file: what trees share, other cuts of the data, branching, and rewards."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from treering.cli.inspect.why import WhyReport, explain_tasks
from treering.data import RenderedTrajectory
from treering.data.cache.dataset import TokenDataset
from treering.tree.forest import Forest
from treering.tree.stats import Branching, BranchingCounter, Work, flat_work, merged_work, tree_work, work_bounds
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
    dataset: TokenDataset, shape: ModelShape, tokenizer_dir: Path | None = None, num_causes: int = 0
) -> FileReport:
    """The report of a dataset, one tree at a time; the search for causes alone keeps all trees."""
    counts, forests = _Counts(), list[Forest]()
    for task in dataset.tasks():
        forest = Forest.from_sequences([one.tokens for one in task])
        counts.add(task, forest)
        if num_causes:
            forests.append(forest)
    flat, tree = flat_work(dataset.lengths), counts.tree
    bounds = work_bounds(flat, tree, shape)
    return FileReport(
        file=dataset.facts.source,
        trajectories=dataset.num_rows,
        tasks=dataset.num_tasks,
        flat_tokens=flat.num_tokens,
        unique_tokens=tree.num_tokens,
        sharing=1.0 - tree.num_tokens / flat.num_tokens,
        token_bound=bounds.token_bound,
        flop_bound=bounds.flop_bound,
        prompt_only_bound=flat.num_tokens / counts.num_prompt_shared,
        whole_set=_whole_set(dataset, flat, shape),
        turns=counts.turns(shape),
        branching=counts.branching.total(),
        longest=int(dataset.lengths.max()),
        largest_tree=counts.largest_tree,
        largest_id=int(dataset.rows["largest_id"].max()),
        rewards=_rewards(counts.rewards),
        why=explain_tasks(dataset, forests, tokenizer_dir, num_causes) if num_causes else None,
    )


class _Counts:
    """Sums over tasks."""

    def __init__(self) -> None:
        self.tree = self._turns_flat = self._turns_tree = Work(num_tokens=0, num_pairs=0)
        self.branching = BranchingCounter()
        self.rewards: list[list[float]] = []
        """Of each task."""
        self.num_prompt_shared = self.largest_tree = self._num_turns = 0

    def add(self, task: Sequence[RenderedTrajectory], forest: Forest) -> None:
        self.tree += tree_work([forest])
        self.branching.add(forest)
        self.largest_tree = max(self.largest_tree, forest.num_tokens)
        self.num_prompt_shared += _num_prompt_shared_tokens(task)
        # A trajectory of several sequences has one reward.
        self.rewards.append(list({one.index: one.reward for one in task if one.reward is not None}.values()))
        # Samples of one trajectory are prefixes of its last one, so only the last adds tokens to the tree.
        trained = [one for one in task if one.turn_ends.size]
        self._turns_tree += tree_work([Forest.from_sequences([one.tokens[: one.turn_ends[-1]] for one in trained])])
        for one in trained:
            self._num_turns += one.turn_ends.size
            self._turns_flat += flat_work(one.turn_ends)

    def turns(self, shape: ModelShape) -> TurnsReport:
        bounds = work_bounds(self._turns_flat, self._turns_tree, shape)
        return TurnsReport(
            samples=self._num_turns,
            flat_tokens=self._turns_flat.num_tokens,
            unique_tokens=self._turns_tree.num_tokens,
            token_bound=bounds.token_bound,
            flop_bound=bounds.flop_bound,
        )


def _num_prompt_shared_tokens(task: Sequence[RenderedTrajectory]) -> int:
    sizes = [one.num_prompt_tokens for one in task]
    prompts = Forest.from_sequences([one.tokens[:size] for one, size in zip(task, sizes, strict=True) if size])
    return prompts.num_tokens + sum(one.tokens.size for one in task) - sum(sizes)


def _whole_set(dataset: TokenDataset, flat: Work, shape: ModelShape) -> WholeSetReport:
    tree = merged_work(*dataset.flat_tokens, after_part=dataset.release)
    bounds = work_bounds(flat, tree, shape)
    return WholeSetReport(
        unique_tokens=tree.num_tokens,
        sharing=1.0 - tree.num_tokens / flat.num_tokens,
        token_bound=bounds.token_bound,
        flop_bound=bounds.flop_bound,
    )


def _rewards(groups: Sequence[Sequence[float]]) -> RewardsReport | None:
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
