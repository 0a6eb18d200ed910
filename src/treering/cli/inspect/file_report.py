"""Measure what the trees of a file's trajectories share, which tokens are trained, and why branches diverge."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from treering.analysis.vision_tower import VisionTowerShape
from treering.data import RenderedTrajectory
from treering.data.cache.dataset import TokenDataset
from treering.data.image import ImageData
from treering.data.rendering.encoder import open_tokenizer
from treering.data.trajectory import cut_images
from treering.errors import plural
from treering.tree.forest import Forest
from treering.tree.repeats import Fork, explain_losses
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

if TYPE_CHECKING:
    from tokenizers import Tokenizer

COLUMNS = ("row", "other", "position", "reads", "other reads", "forks", "tokens", "share", "shift")
_NUM_TOKENS_SHOWN = 6
_NUM_MERGED = 20
"""Forks that are examined for each cause shown."""
_MAX_CHARACTERS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CutReport:
    """Another cut of a file into samples; counts are sums over its trees, bounds are best possible speedups."""

    samples: int
    flat_tokens: int
    unique_tokens: int
    sharing: float
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
    """Tasks whose rewards are all the same, so that group-relative advantages are 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagesReport:
    """Images of a file; figures are sums over tasks."""

    images: int
    """Images of all rows, repeats included."""
    distinct: int
    """Distinct images per task, summed: the number that a vision tower computes."""
    distinct_in_file: int
    tokens: int
    """Placeholders of all rows, part of the flat tokens."""
    unique_tokens: int
    """Placeholders in the trees, part of the unique tokens."""
    flop_bound: float | None
    """FLOP bound of the file with the vision tower, each distinct image of a task once; None if no config.json
    has its sizes."""


class _Counts:
    def __init__(self, dataset: TokenDataset, vision_tower: VisionTowerShape | None) -> None:
        self._dataset, self._vision_tower = dataset, vision_tower
        self._turn_ends = dataset.last_turn_ends
        self._num_images = self._num_distinct = self._image_tokens = self._unique_image_tokens = 0
        self._flat_vision_flops = self._vision_flops = 0
        self.tree = self._turns_tree = Work(num_tokens=0, num_pairs=0)
        self.branching = BranchingCounter()
        self.num_prompt_shared = self.largest_tree = self.num_without_routes = 0

    def add(self, rows: npt.NDArray[np.int64]) -> Forest:
        """Count a task and return its tree."""
        lengths, prompts = self._dataset.lengths[rows], self._dataset.rows["num_prompt_tokens"][rows]
        forest = self._forest(rows, lengths)
        self.tree += tree_work([forest])
        self.branching.add(forest)
        self.largest_tree = max(self.largest_tree, forest.num_tokens)
        if self._dataset.has_routes:
            self.num_without_routes += Forest.from_sequences(self._dataset.tokens(row) for row in rows).num_tokens
        self.num_prompt_shared += self._work(rows, prompts).num_tokens + int((lengths - prompts).sum())
        if self._dataset.images:
            self._add_images([placed.image for row in rows for placed in self._dataset.placed(row)], forest)
        # Samples of a trajectory are prefixes of its last one, so only the last adds tokens to the tree.
        self._turns_tree += self._work(rows, self._turn_ends[rows])
        return forest

    def _work(self, rows: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> Work:
        """Return the work of the tree of each row's first tokens."""
        return flat_work(sizes) if rows.size == 1 else tree_work([self._forest(rows, sizes)])

    def _forest(self, rows: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> Forest:
        """Return the tree of each row's first tokens; rows without any are skipped."""
        dataset, present = self._dataset, sizes > 0
        has_images = dataset.rows["num_images"][rows].any()
        numbers, ends = rows[present].tolist(), sizes[present].tolist()
        tokens = (dataset.tokens(row)[:end] for row, end in zip(numbers, ends, strict=True))
        placed = (cut_images(dataset.placed(row), end) for row, end in zip(numbers, ends, strict=True))
        routes = None
        if dataset.has_routes:
            found = (dataset.routes(row) for row in numbers)
            routes = [own if own is None else own[:end] for own, end in zip(found, ends, strict=True)]
        return Forest.from_sequences(tokens, images=list(placed) if has_images else None, routed_experts=routes)

    def _add_images(self, placed: Sequence[ImageData], forest: Forest) -> None:
        self._num_images += len(placed)
        self._num_distinct += len(forest.images)
        self._image_tokens += sum(image.num_tokens for image in placed)
        self._unique_image_tokens += int((forest.tokens < 0).sum())
        if self._vision_tower is not None:
            self._flat_vision_flops += self._vision_tower.flops(placed)
            self._vision_flops += self._vision_tower.flops(forest.images)

    def images(self, flat: Work, shape: ModelShape) -> ImagesReport:
        text = [train_flops(shape, work.num_tokens, work.num_pairs) for work in (flat, self.tree)]
        return ImagesReport(
            images=self._num_images,
            distinct=self._num_distinct,
            distinct_in_file=len(self._dataset.images),
            tokens=self._image_tokens,
            unique_tokens=self._unique_image_tokens,
            flop_bound=None
            if self._vision_tower is None
            else (text[0] + self._flat_vision_flops) / (text[1] + self._vision_flops),
        )

    def turns(self, shape: ModelShape) -> CutReport:
        ends = self._dataset.turn_ends
        return _cut(ends.size, flat_work(ends), self._turns_tree, shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Where two trajectories diverge; rows count the trajectories of the file from 1."""

    row: int
    other_row: int
    same_task: bool
    position: int
    """First position where they differ."""
    token: int | None
    """Token of this row there; None if the trajectory has ended."""
    other_token: int | None
    text: str | None
    """Text of this row from there on; None without a tokenizer."""
    other_text: str | None
    forks: int
    """Number of forks with the same text; this one is the costliest."""
    tokens: int
    """Tokens after these forks (between tasks, also before them) that agree again and are computed twice."""
    shift: int
    """Number of positions by which they come later in this row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyReport:
    """Equal tokens, in runs of at least 16, that one tree per task does not share."""

    repeated_tokens: int
    repeated_share: float
    """Share of the distinct tokens."""
    forks: int
    causes: tuple[Cause, ...]
    """Costliest forks, most tokens first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReport:
    """One file with one tree per task; counts are sums over tasks, bounds are best possible speedups."""

    file: str
    trajectories: int
    rows: int
    """Sequences; a chat whose template rewrites history has several."""
    tasks: int
    flat_tokens: int
    trained_tokens: int
    """Trained tokens among the flat tokens."""
    copies: tuple[tuple[int, int], ...]
    """Rows equal to an earlier row, each with the first such row; rows count from 1."""
    unique_tokens: int
    sharing: float
    token_bound: float
    flop_bound: float
    prompt_only_bound: float
    """Token bound if only prompts, the tokens before the first trained one, are merged."""
    whole_set: CutReport
    """All trajectories in one forest, across tasks."""
    turns: CutReport
    """Each assistant turn as a sample, from the start of its trajectory to the end of the turn."""
    branching: Branching
    longest: int
    """Tokens of the longest sequence."""
    largest_tree: int
    """Distinct tokens of the largest task."""
    largest_id: int
    """The largest token id."""
    rewards: RewardsReport | None
    """None if no trajectory has a reward."""
    images: ImagesReport | None = None
    """None if the file has no images."""
    unique_tokens_without_routes: int | None = None
    """Distinct tokens if their routed experts were left out; None if the file has none."""
    why: WhyReport | None = None
    """Causes of lost sharing; None without `--why`."""


def measure(
    dataset: TokenDataset,
    shape: ModelShape,
    tokenizer_dir: Path | None = None,
    num_causes: int = 0,
    vision_tower: VisionTowerShape | None = None,
) -> FileReport:
    """Return the report of a dataset, built one tree at a time; only the search for causes keeps all trees.

    `vision_tower` is the one to count for images.
    """
    counts, forests = _Counts(dataset, vision_tower), list[Forest]()
    for task in range(dataset.num_tasks):
        forest = counts.add(dataset.rows_of(task))
        if num_causes:
            forests.append(forest)
    flat, tree = flat_work(dataset.lengths), counts.tree
    bounds = work_bounds(flat, tree, shape)
    return FileReport(
        file=dataset.facts.source,
        trajectories=dataset.facts.num_trajectories,
        rows=dataset.num_rows,
        tasks=dataset.num_tasks,
        flat_tokens=flat.num_tokens,
        trained_tokens=dataset.num_trained,
        copies=tuple((row + 1, first + 1) for row, first in dataset.copies()),
        unique_tokens=tree.num_tokens,
        sharing=1.0 - tree.num_tokens / flat.num_tokens,
        token_bound=bounds.token_bound,
        flop_bound=bounds.flop_bound,
        prompt_only_bound=flat.num_tokens / counts.num_prompt_shared,
        whole_set=_cut(dataset.num_rows, flat, merged_work(*dataset.flat_keys, after_part=dataset.release), shape),
        turns=counts.turns(shape),
        branching=counts.branching.total(),
        longest=int(dataset.lengths.max()),
        largest_tree=counts.largest_tree,
        largest_id=int(dataset.rows["largest_id"].max()),
        rewards=_rewards(dataset),
        images=counts.images(flat, shape) if dataset.images else None,
        unique_tokens_without_routes=counts.num_without_routes if dataset.has_routes else None,
        why=explain_tasks(dataset, forests, tokenizer_dir, num_causes) if num_causes else None,
    )


def _cut(num_samples: int, flat: Work, tree: Work, shape: ModelShape) -> CutReport:
    bounds = work_bounds(flat, tree, shape)
    return CutReport(
        samples=num_samples,
        flat_tokens=flat.num_tokens,
        unique_tokens=tree.num_tokens,
        sharing=1.0 - tree.num_tokens / flat.num_tokens if flat.num_tokens else 0.0,
        token_bound=bounds.token_bound,
        flop_bound=bounds.flop_bound,
    )


def _rewards(dataset: TokenDataset) -> RewardsReport | None:
    rows = dataset.rows
    # A trajectory of several rows has one reward.
    is_known = (np.diff(rows["index"], prepend=-1) != 0) & ~np.isnan(rows["reward"])
    if not is_known.any():
        return None
    by_task = np.argsort(rows["task"][is_known], kind="stable")
    tasks, rewards = rows["task"][is_known][by_task], rows["reward"][is_known][by_task]
    least, most = np.full((2, dataset.num_tasks), [[np.inf], [-np.inf]])
    np.minimum.at(least, tasks, rewards)
    np.maximum.at(most, tasks, rewards)
    is_several = np.bincount(tasks, minlength=dataset.num_tasks) > 1
    return RewardsReport(
        num_rewards=rewards.size,
        mean=float(rewards.mean()),
        spread=float(rewards.std()),
        groups=int(is_several.sum()),
        equal_groups=int((least == most)[is_several].sum()),
    )


def explain_tasks(
    dataset: TokenDataset, forests: Sequence[Forest], tokenizer_dir: Path | None, num_causes: int
) -> WhyReport:
    """Return the `num_causes` costliest causes in a file; forks with the same text count as one cause.

    Args:
        dataset: of the file.
        forests: one per task.
        tokenizer_dir: decodes tokens; None shows only ids.
        num_causes: at least 1.

    Example: rows `[1, 2, *run]` and `[1, 3, *run]` of one task with a run of 20 tokens have one cause, with 20 tokens.
    """
    rows = [int(row) for task in range(dataset.num_tasks) for row in dataset.rows_of(task)]
    tokenizer = None if tokenizer_dir is None else open_tokenizer(tokenizer_dir)
    losses = explain_losses(forests, _NUM_MERGED * num_causes)
    alike: dict[tuple[bool, int | None, int | None], list[Fork]] = {}
    for found in losses.divergences:
        alike.setdefault((found.forest == found.other_forest, found.token, found.other_token), []).append(found)
    causes = sorted(alike.values(), key=lambda forks: -sum(fork.num_tokens for fork in forks))[:num_causes]

    def cause(forks: Sequence[Fork]) -> Cause:
        found = forks[0]
        ours, theirs = rows[found.branch], rows[found.other_branch]
        return Cause(
            row=ours + 1,
            other_row=theirs + 1,
            same_task=found.forest == found.other_forest,
            position=found.position,
            token=found.token,
            other_token=found.other_token,
            text=_text(tokenizer, dataset.row(ours), found.position),
            other_text=_text(tokenizer, dataset.row(theirs), found.position),
            forks=len(forks),
            tokens=sum(fork.num_tokens for fork in forks),
            shift=found.shift,
        )

    return WhyReport(
        repeated_tokens=losses.num_repeated_tokens,
        repeated_share=losses.repeated_share,
        forks=losses.num_forks,
        causes=tuple(map(cause, causes)),
    )


def as_table(file: str, unique_tokens: int, why: WhyReport) -> Table:
    """Return the causes of one file as a table for the terminal; `share` is of the file's unique tokens."""
    title = (
        f"{file}: {plural(why.repeated_tokens, 'unique token')} ({why.repeated_share:.0%}) repeat another trajectory; "
        f"the costliest of {plural(why.forks, 'fork')} where two trajectories part"
    )
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="left" if "reads" in name else "right", no_wrap="reads" in name)
    for cause in why.causes:
        other = f"{cause.other_row}" if cause.same_task else f"{cause.other_row}, other task"
        # Use `Text`, so that trajectory text is not parsed as markup.
        reads = [Text(_short(cause.text, cause.token)), Text(_short(cause.other_text, cause.other_token))]
        share = f"{cause.tokens / unique_tokens:.1%}"
        table.add_row(
            *(f"{cause.row}", other, f"{cause.position:,}"),
            *reads,
            *(f"{cause.forks:,}", f"{cause.tokens:,}", share, f"{cause.shift:+,}"),
        )
    return table


def _text(tokenizer: "Tokenizer | None", trajectory: RenderedTrajectory, position: int) -> str | None:
    if tokenizer is None:
        return None
    ids = trajectory.tokens[position : position + _NUM_TOKENS_SHOWN].tolist()
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def _short(text: str | None, token: int | None) -> str:
    if token is None:
        return "(ends)"
    if text is None:
        return str(token)
    quoted = repr(text)
    return quoted if len(quoted) <= _MAX_CHARACTERS else f"{quoted[: _MAX_CHARACTERS - 1]}…"
