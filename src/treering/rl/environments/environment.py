"""Base class of user environments, tasks with a coroutine that runs an episode, and their place in the loop."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from treering.config.rl_task import EpisodeOptions as EpisodeOptions
from treering.engine.protocol import Rollout
from treering.errors import ConfigError, InputError, UnsupportedError
from treering.rl.environments.chat import ChatTokens
from treering.rl.environments.policy_calls import Policy
from treering.rl.tasks.task import Prompt, RewardValue, Task, checked_reward
from treering.rl.tasks.text_tokens import find_stop_tokens
from treering.rl.user_code import contained, in_words, load_own
from treering.types import PromptId


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvTask:
    """A task of an environment; runs of the same task are compared with each other.

    Example: `EnvTask(id="17+5", data={"answer": 22})`
    """

    id: PromptId
    """Stable across epochs and machines."""
    data: Any = None
    """Any value that the environment needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an episode ended.

    Example: `Outcome(reward=1.0, turn_rewards={reply.call: -0.1})` makes this call and those before it worth 0.1 less.
    """

    reward: float
    """Reward of the run, for every agent that `rewards` does not name."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards of agents, by name."""
    turn_rewards: Mapping[int, float] = field(default_factory=dict)
    """Rewards of single calls, by `Reply.call`: a call is worth the run's reward plus those of this and later calls of
    its agent. The run's reward plus those of all the agent's calls is logged and evaluated."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Numbers by name, logged as means over runs."""

    def __post_init__(self) -> None:
        for values in ({"": self.reward}, self.rewards, self.turn_rewards, self.numbers):
            for value in values.values():
                checked_reward(value)


class Environment(ABC):
    """Tasks with a coroutine that runs an episode; several chats give branches, `Policy.agent` gives more agents.

    Episodes run concurrently in one event loop: await slow operations, and call blocking code by `asyncio.to_thread`.

    Example:
        >>> class Sums(Environment):
        ...     tasks = [EnvTask(id="2+2", data=4)]
        ...
        ...     async def run(self, task, policy):
        ...         reply = await policy.chat([{"role": "user", "content": f"{task.id}="}])
        ...         return float(reply.text.strip() == str(task.data))
    """

    tasks: Sequence[EnvTask]
    """Tasks in a fixed order, with distinct ids."""

    @abstractmethod
    async def run(self, task: EnvTask, policy: Policy) -> float | Outcome:
        """Run an episode; an exception drops the run, which is counted."""

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """End everything that the environment started; called once, after the last episode."""


def as_outcome(value: object) -> Outcome:
    """Validate the value that an episode returned.

    Raises:
        InputError: the value is neither a finite number nor an outcome.

    Example: `as_outcome(1)` is `Outcome(reward=1.0)`.
    """
    if isinstance(value, Outcome):
        return value
    if value is None:
        raise InputError("an episode must return its reward, a number or an Outcome, got None; return one")
    return Outcome(reward=checked_reward(value))


def find_environment(name: str, folders: Sequence[Path] = (Path(),)) -> Environment:
    """Return the environment of "file.py:Name" or "package.module:Name".

    Name is an `Environment` class, or another callable without arguments that returns one. Files and modules are looked
    up like those of rewards.

    Raises:
        ConfigError: the file, module or name does not exist, or its code raises (with its file and line).

    Example: `find_environment("calculator.py:Calculator", [Path("examples/environments")])`.
    """
    module, _, attribute = name.rpartition(":")
    if not (module and attribute):
        raise ConfigError(f"task.env must be file.py:Name or package.module:Name, got {name!r}; add the missing part")
    make = getattr(load_own("environment", name, folders), attribute, None)
    if not callable(make):
        raise ConfigError(f"task.env must name a class, and {module} has none named {attribute!r}; check the spelling")
    try:
        with contained():
            found = make()
    except Exception as error:
        raise ConfigError(
            f"the environment {name!r} is made without arguments, and that raises {in_words(error)}; correct it"
        ) from error
    if not isinstance(found, Environment) and not inspect.iscoroutinefunction(getattr(found, "run", None)):
        raise ConfigError(
            f"an environment needs tasks and a coroutine run(task, policy), and {name!r} is a "
            f"{type(found).__qualname__}; derive it from treering.rl.environments.Environment, or wrap it in "
            "ToolEnvironment or StepEnvironment"
        )
    return found  # type: ignore[no-any-return]


class TaskPrompt(Prompt):
    """Task of an environment as a prompt; it has no tokens, because each call brings its own context."""

    __slots__ = ()

    def __post_init__(self) -> None:
        if type(self.prompt_id) not in (str, int) or self.prompt_id == "":
            raise InputError(f"a task's id must be nonempty text or an integer, got {self.prompt_id!r}; name it")


class EnvironmentTask(Task):
    """An environment with everything needed to run its episodes."""

    def __init__(
        self,
        environment: Environment,
        chat: ChatTokens,
        options: EpisodeOptions,
        *,
        stop_tokens: Sequence[int] | None = None,
    ) -> None:
        """Read the tasks.

        Args:
            environment: gives the tasks and runs their episodes.
            chat: renders its chats as tokens.
            options: how episodes run.
            stop_tokens: tokens that end a turn; None takes those of the tokenizer and the chat form.

        Raises:
            InputError: there is no task, or one is not an `EnvTask`.
        """
        self.environment, self.chat, self.options = environment, chat, options
        if stop_tokens is None:
            stop_tokens = [stop.token_id for stop in find_stop_tokens(chat.text, chat.renderer)]
        self._stop_tokens = tuple(stop_tokens)
        tasks, kind = list(getattr(environment, "tasks", ())), type(environment).__qualname__
        if not tasks:
            raise InputError(f"an environment needs tasks, and {kind}.tasks is empty; add some")
        wrong = next((task for task in tasks if not isinstance(task, EnvTask)), None)
        if wrong is not None:
            raise InputError(
                f"the tasks of an environment must be EnvTask records, got {wrong!r:.60}; write EnvTask(id=..., "
                "data=...)"
            )
        self.tasks = {task.id: task for task in tasks}
        self._prompts = tuple(
            TaskPrompt(prompt_id=task.id, tokens=np.zeros(0, np.int32), columns={"data": task.data}) for task in tasks
        )

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the tokenizer."""
        return self.chat.text.vocab_size

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Tokens that end a turn."""
        return self._stop_tokens

    @property
    def reward_name(self) -> str:
        """Name of the coroutine in errors."""
        return f"{type(self.environment).__qualname__}.run"

    def reward(self, prompt: Prompt, rollout: Rollout) -> RewardValue:
        """Refuse to reward a rollout: episodes return their own rewards."""
        raise UnsupportedError(
            "the episodes of an environment return their rewards; collect them with collect_episodes"
        )
