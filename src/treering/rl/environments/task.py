"""An environment as the loop's task: its tasks are prompts without tokens, and it collects its own runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from treering.engine.rollout import Rollout
from treering.errors import ConfigError, InputError, UnsupportedError
from treering.rl.collect import RunWeights
from treering.rl.environments.calls import SharedTurns
from treering.rl.environments.chat import ChatTokens
from treering.rl.environments.environment import Environment, EnvTask
from treering.rl.tasks.score import RewardValue
from treering.rl.tasks.task import Prompt, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeOptions:
    """How episodes run.

    Example: `EpisodeOptions(max_rows=16)` has 32 episodes in flight.
    """

    max_rows: int
    """Rollouts that the engine runs at one time."""
    episodes_in_flight: int | Literal["auto"] = "auto"
    """Episodes that run at one time. auto: twice the rows, so that others sample while some wait."""
    episode_order: Literal["longest_first", "in_order"] = "longest_first"
    """Which start first. longest_first: those that are expected to take longest, by earlier epochs. in_order: as they
    are given."""
    episode_timeout_s: float = 600.0
    """Seconds after which an episode is left out."""
    max_turn_tokens: int = 512
    """Tokens of a turn, at most."""
    max_failed: float = 0.5
    """Share of a step's episodes that may fail; above it the run stops."""
    shared: SharedTurns = "once"
    """See `SharedTurns`."""
    weights: RunWeights = "runs"
    """See `RunWeights`."""

    def __post_init__(self) -> None:
        counts = {"max_rows": self.max_rows, "max_turn_tokens": self.max_turn_tokens, "episodes_in_flight": self.limit}
        for name, value in counts.items():
            if value < 1:
                raise ConfigError(f"{name} is at least 1, got {value}; raise it")
        if not self.episode_timeout_s > 0 or not 0 <= self.max_failed <= 1:
            raise ConfigError(
                f"episode_timeout is above 0 and max_failed lies in [0, 1], got {self.episode_timeout_s} and "
                f"{self.max_failed}; correct them"
            )

    @property
    def limit(self) -> int:
        """Episodes in flight."""
        return 2 * self.max_rows if self.episodes_in_flight == "auto" else self.episodes_in_flight


class TaskPrompt(Prompt):
    """An environment's task as a prompt; it has no tokens, because each call brings its own context."""

    __slots__ = ()

    def __post_init__(self) -> None:
        if type(self.prompt_id) not in (str, int) or self.prompt_id == "":
            raise InputError(f"a task's id is text with a character or an integer, got {self.prompt_id!r}; name it")


class EnvironmentTask(Task):
    """An environment with what it takes to run its episodes.

    Example: `EnvironmentTask(Sums(), ChatTokens(folder), EpisodeOptions(max_rows=8)).prompts[0].prompt_id` is "2+2".
    """

    def __init__(
        self,
        environment: Environment,
        chat: ChatTokens,
        options: EpisodeOptions,
        *,
        stop_tokens: Sequence[int] | None = None,
    ) -> None:
        """Reads the tasks.

        Args:
            environment: has the tasks, and runs episodes of them.
            chat: tokens of its chats.
            options: how episodes run.
            stop_tokens: what ends a turn; None is what the tokenizer says.

        Raises:
            InputError: no task, or one that is no `EnvTask`.
        """
        self.environment, self.chat, self.options = environment, chat, options
        self._stop_tokens = tuple(chat.text.end_tokens if stop_tokens is None else stop_tokens)
        tasks = _checked_tasks(environment)
        self.tasks = {task.id: task for task in tasks}
        self._prompts = tuple(
            TaskPrompt(prompt_id=task.id, tokens=np.zeros(0, np.int32), columns={"data": task.data}) for task in tasks
        )

    @property
    def vocab_size(self) -> int:
        """That of the tokenizer."""
        return self.chat.text.vocab_size

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Tokens that end a turn."""
        return self._stop_tokens

    @property
    def reward_name(self) -> str:
        """The coroutine in errors."""
        return f"{type(self.environment).__qualname__}.run"

    def reward(self, prompt: Prompt, rollout: Rollout) -> RewardValue:
        """Episodes give their rewards themselves.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError("the episodes of an environment give their rewards; collect them with collect_episodes")


def _checked_tasks(environment: Environment) -> list[EnvTask]:
    tasks = list(getattr(environment, "tasks", ()))
    if not tasks:
        raise InputError(f"an environment has tasks, and {type(environment).__qualname__}.tasks is empty; add some")
    wrong = next((task for task in tasks if not isinstance(task, EnvTask)), None)
    if wrong is not None:
        raise InputError(
            f"the tasks of an environment are EnvTask records, got {wrong!r:.60}; write EnvTask(id=..., data=...)"
        )
    return tasks
