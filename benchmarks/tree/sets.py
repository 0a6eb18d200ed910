"""Real trajectories that tree trainers are compared on: seeded samples of whole tasks, folded to a small vocabulary.

The files are not ours to ship: they are read from the folder of real data, and without it there are no sets.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from treering.data import DATA_VARIABLE, Renderer, Trajectory, data_folder, read_trajectories
from treering.errors import InputError
from treering.train.loop.batches import TrainingTask, group_by_task, task_order
from treering.types import LossMask, ModelShape, TokenIds

SHAPE = ModelShape(
    name="qwen3-8x512",
    num_layers=8,
    hidden_size=512,
    num_heads=8,
    num_kv_heads=4,
    head_size=64,
    intermediate_size=1536,
    vocab_size=4096,
)
"""27.3 million parameters per token."""

SAMPLE_TOKENS = 20_000
SEED = 0

FILES = MappingProxyType(
    {
        "tau": "tau_airline_gpt4o",
        "tau_tools": "tau_airline_gpt4o",
        "toolbench": "toolbench_dfsdt",
        "hotpotqa": "hotpotqa_react_reflexion",
        "math": "qwen25math_maj8",
        "game24": "tot_game24_cot100",
        "game24_bfs": "tot_game24_bfs",
        "crosswords": "tot_crosswords_dfs",
        "text": "tot_text_cot10",
    }
)
"""Files of `bench/` by set; `tau_tools` has the tool schemas in its system prompts, as the agent's model saw them."""

NO_DATA = f"the bench sets were left out: {DATA_VARIABLE} names no folder of real data, and ../shared/data is none"
TOOLS_FILE = "tools_airline.json"
NO_SHARING = "no_sharing"
SET_NAMES = (*FILES, NO_SHARING)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskSample:
    """Whole tasks of a set, a tree each, and how many the set has.

    Example: two tasks of [5, 6, 7], [5, 6, 8] and [5, 9], all trained, have 2 + 2 + 1 trained tokens.
    """

    name: str
    tasks: tuple[TrainingTask, ...]
    num_tasks_of_set: int

    @property
    def groups(self) -> list[tuple[TokenIds, ...]]:
        """The branches of each tree."""
        return [task.sequences for task in self.tasks]

    @property
    def num_trained_tokens(self) -> int:
        """Trained tokens of all branches together."""
        return sum(task.num_trained_tokens for task in self.tasks)

    def loss_masks(self) -> list[LossMask]:
        """One mask per branch, tasks in order."""
        return [mask for task in self.tasks for mask in task.loss_masks]


class TaskSource:
    """The tasks of every set, each file read and rendered once."""

    def __init__(self, folder: Path) -> None:
        """`folder` holds `bench` and `tokenizer`."""
        self._folder = folder / "bench"
        self._renderer = Renderer(tokenizer=folder / "tokenizer", template="plain")
        self._tasks: dict[str, list[TrainingTask]] = {}

    def tasks(self, name: str) -> list[TrainingTask]:
        """All tasks of a set that train anything, in file order.

        Raises:
            InputError: a missing or broken file.
        """
        if name not in self._tasks:
            trajectories = read_trajectories(self._folder / f"{FILES[name]}.jsonl.gz")
            if name == "tau_tools":
                trajectories = with_tools(trajectories, self._folder / TOOLS_FILE)
            tasks = group_by_task(self._renderer.render(trajectories))
            self._tasks[name] = [task for task in tasks if task.num_trained_tokens]
        return self._tasks[name]

    def sample(self, name: str, *, num_tokens: int | None = SAMPLE_TOKENS, seed: int = SEED) -> TaskSample:
        """A sample of a set of about that many flat tokens, or all of it for None; ids below `SHAPE.vocab_size`.

        `no_sharing` takes one branch of each task, files in turn.
        """
        tasks = self.tasks(name) if name in FILES else self._lone_branches(seed)
        taken = _in_turn(tasks, num_tokens) if name == NO_SHARING else sample_tasks(tasks, num_tokens, seed=seed)
        return TaskSample(name=name, tasks=fold_tasks(taken, SHAPE.vocab_size), num_tasks_of_set=len(tasks))

    def _lone_branches(self, seed: int) -> list[TrainingTask]:
        by_file = [_drawn(self.tasks(name), seed) for name in FILES if name != "tau_tools"]
        turns = zip_longest(*by_file)
        return [lone_branch(task) for turn in turns for task in turn if task is not None]


def find_source() -> TaskSource | None:
    """The sets of the real-data folder, or None where there is none."""
    folder = data_folder()
    return None if folder is None else TaskSource(folder)


def sample_sets(
    source: TaskSource | None, names: Sequence[str], num_tokens: int | None, *, is_named: bool
) -> list[TaskSample]:
    """Samples of these sets; none without real data.

    Raises:
        InputError: there is no real data, and they were asked for by name.
    """
    if source is not None:
        return [source.sample(name, num_tokens=num_tokens) for name in names]
    if names and is_named:
        raise InputError(f"the set {names[0]!r} needs real data: set {DATA_VARIABLE} to a folder that has it")
    return []


def sample_tasks(tasks: Sequence[TrainingTask], num_tokens: int | None, *, seed: int) -> list[TrainingTask]:
    """Whole tasks, in their order, of about `num_tokens` flat tokens together; all for None.

    Tasks are drawn in a seeded order, and each that brings the sum closer to `num_tokens` is taken. Where none does,
    because all are at least twice as large, the first one drawn is.

    Example: of tasks with 9, 30 and 4 tokens, drawn in this order, 12 takes the first and the last: 13.
    """
    if num_tokens is None:
        return list(tasks)
    taken: list[int] = []
    total = 0
    order = task_order(len(tasks), seed=seed, epoch=0).tolist()
    for i in order:
        size = num_flat_tokens(tasks[i])
        if abs(total + size - num_tokens) < abs(total - num_tokens):
            taken.append(i)
            total += size
    return [tasks[i] for i in sorted(taken or order[:1])]


def lone_branch(task: TrainingTask) -> TrainingTask:
    """The first branch of a task that trains anything, as a task.

    Raises:
        InputError: none does.
    """
    for sequence, mask in zip(task.sequences, task.loss_masks, strict=True):
        if mask[1:].any():
            return replace(task, sequences=(sequence,), loss_masks=(mask,))
    raise InputError(f"a branch to train needs a trained token, task {task.task_id!r} has none; drop the task")


def fold_tasks(tasks: Sequence[TrainingTask], vocab_size: int) -> tuple[TrainingTask, ...]:
    """The tasks with ids renumbered by frequency into [0, vocab_size)."""
    folded = iter(fold_ids([sequence for task in tasks for sequence in task.sequences], vocab_size))
    return tuple(replace(task, sequences=tuple(next(folded) for _ in task.sequences)) for task in tasks)


def fold_ids(sequences: Sequence[TokenIds], vocab_size: int | None = None) -> list[TokenIds]:
    """Renumber the ids that occur by frequency: the most frequent becomes 0; of equals, the smaller id comes first.

    Args:
        sequences: int32 [T] each, T >= 1.
        vocab_size: size of the new range; None uses the number of distinct ids. If the ids do not fit, those ranked in
            or beyond the last eighth of the range share that eighth, by the remainder of their rank.

    Returns:
        int32 arrays of the same shapes, all ids in [0, vocab_size).

    Raises:
        InputError: a vocab_size below 1.

    Example: [7, 9, 9, 5] folds to [2, 0, 0, 1]; with vocab_size=2, ids 7 and 5 share 1: [1, 0, 0, 1].
    """
    if vocab_size is not None and vocab_size < 1:
        raise InputError(f"vocab_size must be at least 1, got {vocab_size}")
    if not sequences:
        return []
    # Sequence by sequence, so that memory holds little more than the folded ids.
    found = [np.unique(sequence, return_counts=True) for sequence in sequences]
    ids, inverse = np.unique(np.concatenate([each for each, _ in found]), return_inverse=True)
    counts = np.zeros(ids.size, np.int64)
    np.add.at(counts, inverse.reshape(-1), np.concatenate([times for _, times in found]))
    rank = np.empty(ids.size, np.int64)
    rank[np.lexsort((ids, -counts))] = np.arange(ids.size)
    folded = _shared(rank, ids.size if vocab_size is None else vocab_size).astype(np.int32)
    return [folded[np.searchsorted(ids, sequence)] for sequence in sequences]


def _shared(rank: NDArray[np.int64], vocab_size: int) -> NDArray[np.int64]:
    if rank.size <= vocab_size:
        return rank
    num_shared = max(1, vocab_size // 8)
    num_own = vocab_size - num_shared
    return np.where(rank < num_own, rank, num_own + (rank - num_own) % num_shared)


def with_tools(trajectories: Iterable[Trajectory], file: Path) -> list[Trajectory]:
    """Trajectories whose system prompts end with the tool schemas of a file, one as JSON per line.

    Raises:
        InputError: the file is missing or is not a JSON list.
    """
    try:
        schemas = json.loads(file.read_text(encoding="utf-8"))
        lines = [json.dumps(schema, ensure_ascii=False) for schema in schemas]
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{file}: tool schemas are a JSON list, and it cannot be read ({error}); fetch it") from error
    return [_with_appendix(trajectory, "\n\n# Tools\n\n" + "\n".join(lines)) for trajectory in trajectories]


def num_flat_tokens(task: TrainingTask) -> int:
    """Tokens of all branches of a task, shared ones counted once per branch."""
    return sum(sequence.size for sequence in task.sequences)


def _with_appendix(trajectory: Trajectory, text: str) -> Trajectory:
    if trajectory.messages is None:
        raise InputError(f"tool schemas extend messages, task {trajectory.task_id!r} has tokens: leave the schemas out")
    extended = tuple(
        replace(message, content=f"{message.content or ''}{text}") if message.role == "system" else message
        for message in trajectory.messages
    )
    return replace(trajectory, messages=extended)


def _drawn(tasks: Sequence[TrainingTask], seed: int) -> list[TrainingTask]:
    return [tasks[i] for i in task_order(len(tasks), seed=seed, epoch=0).tolist()]


def _in_turn(tasks: Sequence[TrainingTask], num_tokens: int | None) -> list[TrainingTask]:
    """The first tasks of at least that many tokens together."""
    taken: list[TrainingTask] = []
    for task in tasks:
        if num_tokens is not None and sum(num_flat_tokens(some) for some in taken) >= num_tokens:
            break
        taken.append(task)
    return taken
