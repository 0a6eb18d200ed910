"""What `treering inspect` counts of one file: what trees share, other cuts of the data, branching, and rewards."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from treering.analysis.tower import TowerShape
from treering.cli.inspect.why import WhyReport, explain_tasks
from treering.data import RenderedTrajectory
from treering.data.cache.dataset import TokenDataset
from treering.data.picture import Picture
from treering.data.rendering.rendered_trajectory import cut_pictures
from treering.tree.forest import Forest
from treering.tree.stats import (
    Branching,
    BranchingCounter,
    Work,
    flat_work,
    merged_work,
    train_flops,
    tree_work,
    work_bounds,
)
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
class PicturesReport:
    """Pictures of a file; figures are sums over tasks."""

    pictures: int
    """Places of all rows."""
    distinct: int
    """Pictures of other pixels, each counted once in each task that has it: a tower computes as many."""
    distinct_in_file: int
    tokens: int
    """Placeholders of all rows, part of the flat tokens."""
    unique_tokens: int
    """Those of them that trees hold, part of the unique tokens."""
    flop_bound: float | None
    """As that of the file, with the vision tower, each distinct picture of a task once; None if no config.json says its
    sizes."""


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
    pictures: PicturesReport | None = None
    """None if it has none."""
    why: WhyReport | None = None
    """Where sharing is lost; None without `--why`."""


def measure(
    dataset: TokenDataset,
    shape: ModelShape,
    tokenizer_dir: Path | None = None,
    num_causes: int = 0,
    tower: TowerShape | None = None,
) -> FileReport:
    """The report of a dataset, one tree at a time; the search for causes alone keeps all trees.

    `tower` is counted for pictures.
    """
    counts, forests = _Counts(tower), list[Forest]()
    for task in dataset.tasks():
        forest = _forest(task, [one.tokens.size for one in task])
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
        pictures=counts.pictures(flat, shape, len(dataset.pictures)) if dataset.pictures else None,
        why=explain_tasks(dataset, forests, tokenizer_dir, num_causes) if num_causes else None,
    )


class _Counts:
    """Sums over tasks."""

    def __init__(self, tower: TowerShape | None) -> None:
        self._tower = tower
        self._num_pictures = self._num_distinct = self._picture_tokens = self._unique_picture_tokens = 0
        self._flat_tower_flops = self._tower_flops = 0
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
        self._add_pictures([placed.picture for one in task for placed in one.pictures], forest)
        # A trajectory of several sequences has one reward.
        self.rewards.append(list({one.index: one.reward for one in task if one.reward is not None}.values()))
        # Samples of one trajectory are prefixes of its last one, so only the last adds tokens to the tree.
        trained = [one for one in task if one.turn_ends.size]
        self._turns_tree += _work(trained, [int(one.turn_ends[-1]) for one in trained])
        for one in trained:
            self._num_turns += one.turn_ends.size
            self._turns_flat += flat_work(one.turn_ends)

    def _add_pictures(self, placed: Sequence[Picture], forest: Forest) -> None:
        self._num_pictures += len(placed)
        self._num_distinct += len(forest.pictures)
        self._picture_tokens += sum(picture.num_tokens for picture in placed)
        self._unique_picture_tokens += int((forest.tokens < 0).sum())
        if self._tower is not None:
            self._flat_tower_flops += self._tower.flops(placed)
            self._tower_flops += self._tower.flops(forest.pictures)

    def pictures(self, flat: Work, shape: ModelShape, num_distinct: int) -> PicturesReport:
        text = [train_flops(shape, work.num_tokens, work.num_pairs) for work in (flat, self.tree)]
        return PicturesReport(
            pictures=self._num_pictures,
            distinct=self._num_distinct,
            distinct_in_file=num_distinct,
            tokens=self._picture_tokens,
            unique_tokens=self._unique_picture_tokens,
            flop_bound=None
            if self._tower is None
            else (text[0] + self._flat_tower_flops) / (text[1] + self._tower_flops),
        )

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
    return _work(task, sizes).num_tokens + sum(one.tokens.size for one in task) - sum(sizes)


def _work(task: Sequence[RenderedTrajectory], sizes: Sequence[int]) -> Work:
    """Work of the tree of the first tokens of each row; rows without one have no part in it."""
    if len(task) == 1:
        return flat_work(np.array(sizes))
    return tree_work([_forest(task, sizes)])


def _forest(task: Sequence[RenderedTrajectory], sizes: Sequence[int]) -> Forest:
    begun = [(one, size) for one, size in zip(task, sizes, strict=True) if size]
    has_pictures = any(one.pictures for one in task)
    return Forest.from_sequences(
        (one.tokens[:size] for one, size in begun),
        pictures=[cut_pictures(one.pictures, size) for one, size in begun] if has_pictures else None,
    )


def _whole_set(dataset: TokenDataset, flat: Work, shape: ModelShape) -> WholeSetReport:
    tree = merged_work(*dataset.flat_keys, after_part=dataset.release)
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
