"""Find the folder of real trajectories, or generate agent trajectories as token ids.

Generated trajectories have the shape of agent runs: one system prompt, a task message, turns of action and observation,
and trials that restart from an earlier turn. Tokens follow a sparse Markov chain, so a model can learn them.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from treering.data.trajectory import Trajectory
from treering.errors import ConfigError
from treering.types import MAX_TOKEN_ID

DATA_VARIABLE = "TREERING_DATA"
"""Environment variable that names the folder of real data."""

NUM_MARKERS = 3
"""Number of marker ids: 0 starts an action, 1 starts an observation or message, 2 ends either."""

_OPEN_ACTION, _OPEN_TEXT, _CLOSE = range(NUM_MARKERS)
_NUM_FOLLOWERS = 4

_Turn: TypeAlias = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]


def data_folder() -> Path | None:
    """Return the folder of real data: `TREERING_DATA`, else `../shared/data`; None if it does not exist.

    Callers that get None use generated trajectories and report it.

    Example: with TREERING_DATA=~/trajectories and that folder present, `data_folder()` is its path.
    """
    folder = Path(os.environ.get(DATA_VARIABLE) or Path("..", "shared", "data")).expanduser()
    return folder if folder.is_dir() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec:
    """Settings of generated trajectories; equal specs generate equal trajectories.

    Example: the defaults generate 4 tasks of 6 trials over a vocabulary of 256, with a sharing of about 0.6 per task.
    """

    num_tasks: int = 4
    """Number of tasks; each is a tree."""
    num_trials: int = 6
    """Trajectories per task."""
    vocab_size: int = 256
    """Ids lie in [0, vocab_size); the first three are turn markers."""
    num_system_tokens: int = 192
    """Length of the prompt that all tasks share."""
    num_task_tokens: int = 64
    """Length of the task message."""
    num_turns: int = 6
    """Largest number of turns of a trial; the smallest is half of it."""
    num_action_tokens: int = 32
    """Mean length of an action; lengths vary by half of it."""
    num_observation_tokens: int = 48
    """Mean length of an observation; lengths vary by half of it."""
    restart_probability: float = 0.25
    """Probability that a trial starts from the prompt instead of a turn of the previous trial."""
    seed: int = 0
    """Random seed."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.startswith("num_") and (type(value) is not int or value < 1):
                raise ConfigError(f"{field.name} must be an integer >= 1, got {value!r}; raise it")
        if not NUM_MARKERS + _NUM_FOLLOWERS <= self.vocab_size <= MAX_TOKEN_ID:
            least = NUM_MARKERS + _NUM_FOLLOWERS
            raise ConfigError(f"vocab_size must lie in [{least}, {MAX_TOKEN_ID}], got {self.vocab_size}; correct it")
        if not 0.0 <= self.restart_probability <= 1.0:
            raise ConfigError(f"restart_probability lies in [0, 1], got {self.restart_probability}; correct it")


def generate_trajectories(spec: AgentSpec) -> Iterator[Trajectory]:
    """Yield `num_tasks * num_trials` trajectories, task after task, with masks over actions and rewards of 0 or 1.

    Every trial after the first keeps some turns of the previous trial, usually all but the last ones, like a
    depth-first search; a trial may repeat another in full.

    Example: `next(generate_trajectories(AgentSpec()))` starts with 194 tokens that all 24 trajectories share.
    """
    writer = _Writer(spec)
    system = writer.text(spec.num_system_tokens)
    for task in range(spec.num_tasks):
        prompt = np.concatenate([system, writer.text(spec.num_task_tokens)])
        turns: list[_Turn] = []
        for trial in range(spec.num_trials):
            turns = writer.extend(turns[: writer.num_kept_turns(len(turns))])
            yield _trajectory(task, trial, prompt, turns, reward=writer.reward())


def _trajectory(
    task: int, trial: int, prompt: npt.NDArray[np.int32], turns: list[_Turn], *, reward: float
) -> Trajectory:
    parts = [(prompt, False)]
    for action, observation in turns:
        # The harness writes the opening marker of an action, as it writes chat headers.
        parts += [(action[:1], False), (action[1:], True), (observation, False)]
    if len(turns) > 1:
        parts.pop()
    return Trajectory(
        task_id=f"generated-{task}",
        trial=trial,
        tokens=np.concatenate([tokens for tokens, _ in parts]),
        loss_mask=np.concatenate([np.full(tokens.size, trained) for tokens, trained in parts]),
        reward=reward,
    )


class _Writer:
    """Draws lengths, turns and tokens from one generator; each id has `_NUM_FOLLOWERS` possible successors."""

    def __init__(self, spec: AgentSpec) -> None:
        self._spec = spec
        self._random = np.random.default_rng(spec.seed)
        self._shifts = self._random.integers(0, spec.vocab_size - NUM_MARKERS, size=_NUM_FOLLOWERS).tolist()

    def reward(self) -> float:
        return float(self._random.integers(2))

    def text(self, num_tokens: int) -> npt.NDArray[np.int32]:
        return self._enclosed(_OPEN_TEXT, num_tokens)

    def num_kept_turns(self, num_turns: int) -> int:
        if num_turns == 0 or self._random.random() < self._spec.restart_probability:
            return 0
        num_dropped = int(self._random.geometric(0.5))
        return max(num_turns - num_dropped, 0)

    def extend(self, turns: list[_Turn]) -> list[_Turn]:
        spec = self._spec
        least = max(len(turns) + 1, (spec.num_turns + 1) // 2)
        num_turns = int(self._random.integers(least, max(least, spec.num_turns) + 1))
        for _ in range(num_turns - len(turns)):
            action = self._enclosed(_OPEN_ACTION, self._length(spec.num_action_tokens))
            turns = [*turns, (action, self.text(self._length(spec.num_observation_tokens)))]
        return turns

    def _length(self, mean: int) -> int:
        return int(self._random.integers(mean - mean // 2, mean + mean // 2 + 1))

    def _enclosed(self, marker: int, num_tokens: int) -> npt.NDArray[np.int32]:
        num_words = self._spec.vocab_size - NUM_MARKERS
        word = int(self._random.integers(num_words))
        ids = [marker]
        for follower in self._random.integers(_NUM_FOLLOWERS, size=num_tokens).tolist():
            ids.append(word + NUM_MARKERS)
            word = (5 * word + self._shifts[follower]) % num_words
        return np.array([*ids, _CLOSE], dtype=np.int32)
