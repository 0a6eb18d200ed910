"""Rollouts of prompts with their rewards, as groups, and the assembly of a step from parts."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from treering.data.trajectory import Turn
from treering.engine.protocol import Engine, Request, Rollout, RolloutKey, Sampling
from treering.errors import ConfigError, InputError, StateError, plural
from treering.rl.rehearsal import with_kept, with_rehearsed
from treering.rl.tasks.task import Prompt, Task, as_score
from treering.rl.user_code import contained, in_words
from treering.types import PromptId, TokenIds

_MESSAGE_LENGTH = 300


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RewardResult:
    """Result of a finished rollout."""

    rollout: Rollout
    """The rollout with its reward."""
    error: str | None = None
    """Why there is no reward, if the task raised."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the task returned with the reward, by name."""
    awaits_group: bool = False
    """Whether `evaluate_group` will give its reward."""


def evaluate_rollout(task: Task, prompt: Prompt, rollout: Rollout) -> RewardResult:
    """Get the task's reward for a finished rollout.

    For a task that rewards groups, the result awaits its group. Anything that the task raises, even `SystemExit`,
    leaves the rollout without a reward; see `contained`.

    Example: a reward that raises ValueError("no number") gives the error "prompt 'q', sample 0: ValueError: no number".
    """
    try:
        with contained():
            if task.rewards_groups or rollout.num_tokens == 0:
                return RewardResult(rollout=rollout, awaits_group=rollout.num_tokens > 0)
            return _rewarded(rollout, task.reward(prompt, rollout))
    except Exception as error:
        return without_reward(rollout, error)


def evaluate_group(task: Task, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[RewardResult]:
    """Get the rewards of a group's finished rollouts, for a task that rewards groups; errors are as for one rollout."""
    try:
        with contained():
            values = list(task.reward_group(prompt, rollouts))
        if len(values) != len(rollouts):
            raise InputError(
                f"a group's rewards must be one for each of its {len(rollouts)} rollouts, got {len(values)}; return "
                "None to skip one"
            )
    except Exception as error:
        return [without_reward(rollout, error) for rollout in rollouts]
    return [_in_group(rollout, value) for rollout, value in zip(rollouts, values, strict=True)]


def without_reward(rollout: Rollout, error: Exception) -> RewardResult:
    """Return the result of a rollout that has no reward because of an error; a long message is cut."""
    text = f"{whose(rollout.key)}{in_words(error)}"
    short = text if len(text) <= _MESSAGE_LENGTH else f"{text[: _MESSAGE_LENGTH - 3]}..."
    return RewardResult(rollout=rollout, error=short)


def whose(key: RolloutKey) -> str:
    """Return the beginning of a rollout's error, such as "prompt 'q', sample 0: "."""
    prompt_id, _, sample = key[:3]
    return f"prompt {prompt_id!r}, sample {sample}: "


def _rewarded(rollout: Rollout, value: object) -> RewardResult:
    score = as_score(value)
    return RewardResult(rollout=replace(rollout, reward=score.reward), numbers=score.numbers)


def _in_group(rollout: Rollout, value: object) -> RewardResult:
    try:
        if isinstance(value, Exception):
            raise value
        return _rewarded(rollout, value)
    except Exception as error:
        return without_reward(rollout, error)


Order = Literal["by_prompt", "by_sample"]
"""Order in which a step's rollouts start. by_prompt: group after group, so that few prompts are in memory at a time.
by_sample: the first of every group, then the second, so that finished rollouts can draft for waiting ones."""

NUM_MESSAGES = 5
"""Number of reward error messages kept."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Runs:
    """Assignment of a group's rollouts to runs, and the rewards of the runs' calls.

    Example: for two runs, the first with two branches, `of` is (0, 0, 1).
    """

    of: tuple[int, ...]
    """Index of each rollout's run, ascending from 0 without gaps."""
    turns: tuple[NDArray[np.int32], ...]
    """Per rollout int32 [R]: index of the run's call that sampled each token it trains, from 0; -1 for other tokens."""
    turn_rewards: tuple[tuple[float, ...], ...]
    """Per run, the rewards of its calls, added to its own reward; () if no call has one."""
    agent: str = ""
    """Agent that made the calls."""
    episodes: tuple[tuple[Turn, ...], ...] = ()
    """Per run, the turns and waits of all its agents; () if another agent's group has them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """Rollouts of one prompt in one step, which are compared with each other.

    For an environment its runs are compared, each with one or several rollouts: its branches.
    """

    prompt: Prompt
    """Prompt of the rollouts; an environment's task has no tokens."""
    rollouts: tuple[Rollout, ...]
    """Rollouts with a reward, in sample order; may be empty."""
    runs: Runs | None = None
    """Runs of an environment; None if each rollout is its own run."""

    def __post_init__(self) -> None:
        for rollout in self.rollouts:
            if rollout.reward is None or rollout.prompt_id != self.prompt.prompt_id:
                raise InputError(
                    f"a group must hold rollouts of its prompt {self.prompt.name} with rewards, got one of "
                    f"{rollout.prompt_id!r} with reward {rollout.reward}; drop it"
                )

    @property
    def rewards(self) -> NDArray[np.float64]:
        """float64 [G], in the order of the rollouts; for an environment one per run."""
        of_rollouts = np.array([rollout.reward for rollout in self.rollouts], np.float64)
        return of_rollouts if self.runs is None else of_rollouts[np.unique(self.runs.of, return_index=True)[1]]

    @property
    def returns(self) -> NDArray[np.float64]:
        """float64 [G], total rewards: for an environment a run's reward plus those of its calls."""
        if self.runs is None:
            return self.rewards
        return self.rewards + np.array([sum(values) for values in self.runs.turn_rewards], np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCounts:
    """Counts of a step's rollouts that are in no group, and of long ones."""

    num_reward_errors: int
    """Rollouts dropped because the task raised or returned no finite number, and failed episodes."""
    num_unscored: int
    """Rollouts dropped because no reward scored them."""
    num_empty: int
    """Rollouts dropped because they have no tokens."""
    num_overlong: int
    """Rollouts that reached their maximum length."""
    num_turns: int
    """Number of rollouts, or for an environment of calls."""
    reward_errors: tuple[str, ...] = ()
    """The first few messages, in order of prompts and samples."""

    def counts(self) -> dict[str, Any]:
        """Return these counts by name, for another record that has them."""
        return {name: getattr(self, name) for name in RolloutCounts.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Collected(RolloutCounts):
    """Groups of a step, with counts."""

    groups: tuple[Group, ...]
    """One per prompt, and for an environment one per task and agent; in the order of the prompts."""
    error_counts: Mapping[str, int]
    """How often each error occurred, without its prompt and sample."""
    numbers: Mapping[str, Sequence[float]]
    """Numbers that the task returned with rewards, by name; in order of prompts and samples, without missing ones."""

    @property
    def num_rollouts(self) -> int:
        """Rollouts in groups, or runs of an environment."""
        return sum(group.rewards.size for group in self.groups)


def collect(
    engine: Engine,
    task: Task,
    prompts: Sequence[Prompt],
    draws: Mapping[PromptId, int],
    *,
    group_size: int,
    sampling: Sampling,
    order: Order = "by_prompt",
    rehearsed: Mapping[RolloutKey, TokenIds] = MappingProxyType({}),
    on_finished: Callable[[Rollout], None] | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Collected:
    """Sample a group for each prompt and reward finished rollouts.

    If the task raises, or its reward is not a finite number, the rollout is dropped and counted.

    Args:
        engine: idle before and after, also after an error.
        task: gives the rewards.
        prompts: distinct prompts of the task.
        draws: how often each prompt has been scheduled before; 0 if it is not listed.
        group_size: rollouts per prompt, samples 0 to group_size - 1.
        sampling: sampling of all rollouts, including the task's stop tokens.
        order: see `Order`; changes speed, never a rollout.
        rehearsed: `Request.rehearsed` by key; changes speed, never a rollout.
        on_finished: called with each finished rollout; its reward is set unless it was dropped or awaits its group.
        on_progress: called with the number of newly finished rollouts, also before each step of the engine.

    Raises:
        ConfigError: a group_size below 1.
        InputError: a duplicate prompt, or requests that the engine refuses.
        StateError: the engine has unfinished requests.

    Example: with group_size=2, prompts a and b give the groups (a0, a1) and (b0, b1), in any order of finishing.
    """
    if engine.num_unfinished > 0:
        raise StateError(
            f"a collection needs an idle engine, got one with {plural(engine.num_unfinished, 'request')}; finish them"
        )
    run = Collection(prompts, draws, group_size=group_size, sampling=sampling)
    requests = with_rehearsed(run.requests(order), rehearsed)
    engine.submit(requests)
    engine.expects_more = False
    try:
        while engine.num_unfinished > 0:
            if on_progress is not None:
                on_progress(0)
            for rollout in engine.step():
                prompt = run.prompt_of(rollout)
                result = evaluate_rollout(task, prompt, with_kept(rollout, rehearsed))
                run.take(result)
                if on_finished is not None:
                    on_finished(result.rollout)
                if on_progress is not None:
                    on_progress(1)
                if group := run.full_group(prompt.prompt_id):
                    for rewarded in evaluate_group(task, prompt, group):
                        run.take(rewarded)
    except BaseException:
        engine.abort([request.key for request in requests])
        raise
    finally:
        engine.expects_more = True
    return run.result()


def join(prompts: Sequence[Prompt], parts: Sequence[Collected]) -> Collected:
    """Join the collections of several engines, each for some of the prompts, into one for all."""
    by_prompt = defaultdict(list)
    for group in (group for part in parts for group in part.groups):
        by_prompt[group.prompt.prompt_id].append(group)
    return added(parts, tuple(group for prompt in prompts for group in by_prompt[prompt.prompt_id]))


def added(parts: Sequence[Collected], groups: tuple[Group, ...]) -> Collected:
    """Return a collection of some groups, with the counts of all parts."""
    return Collected(
        groups=groups,
        num_reward_errors=sum(part.num_reward_errors for part in parts),
        num_unscored=sum(part.num_unscored for part in parts),
        num_empty=sum(part.num_empty for part in parts),
        num_overlong=sum(part.num_overlong for part in parts),
        num_turns=sum(part.num_turns for part in parts),
        reward_errors=tuple(error for part in parts for error in part.reward_errors)[:NUM_MESSAGES],
        error_counts=sum((Counter(part.error_counts) for part in parts), Counter()),
        numbers={
            name: [number for part in parts for number in part.numbers.get(name, ())]
            for name in dict.fromkeys(name for part in parts for name in part.numbers)
        },
    )


class Collection:
    """Collect the rollouts of a step, from any engine and in any order; `take` lowers `num_open` to 0."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        draws: Mapping[PromptId, int],
        *,
        group_size: int,
        sampling: Sampling,
    ) -> None:
        """Prepare the collection; the arguments are those of `collect`."""
        if group_size < 1:
            raise ConfigError(f"group_size is at least 1, got {group_size}; raise it")
        self._prompts = {prompt.prompt_id: prompt for prompt in prompts}
        self._draws = draws
        self._group_size = group_size
        self._sampling = sampling
        self._kept: dict[RolloutKey, Rollout] = {}
        self._errors: dict[RolloutKey, str] = {}
        self._numbers: dict[RolloutKey, Mapping[str, float]] = {}
        self._waiting: defaultdict[PromptId, list[Rollout]] = defaultdict(list)
        self._finished: Counter[PromptId] = Counter()
        self._num_unscored = 0
        self._num_empty = 0
        self._num_overlong = 0
        if len(self._prompts) < len(prompts):
            twice, _ = Counter(prompt.prompt_id for prompt in prompts).most_common(1)[0]
            raise InputError(
                f"the prompts of a step must have distinct ids, got {twice!r} twice; drop one, or rename it"
            )

    @property
    def group_size(self) -> int:
        """Rollouts per prompt."""
        return self._group_size

    @property
    def max_tokens(self) -> int:
        """Most tokens of a rollout."""
        return self._sampling.max_tokens

    @property
    def num_open(self) -> int:
        """Unfinished rollouts."""
        return len(self._prompts) * self._group_size - self._finished.total()

    def requests(self, order: Order = "by_prompt") -> list[Request]:
        """Return every rollout's request, in the given order."""
        pairs = [(prompt_id, sample) for prompt_id in self._prompts for sample in range(self._group_size)]
        if order == "by_sample":
            pairs.sort(key=lambda pair: pair[1])
        return [
            Request(
                prompt_id=prompt_id,
                prompt=self._prompts[prompt_id].tokens,
                sampling=self._sampling,
                draw=self._draws.get(prompt_id, 0),
                sample=sample,
                images=self._prompts[prompt_id].images,
            )
            for prompt_id, sample in pairs
        ]

    def prompt_of(self, rollout: Rollout) -> Prompt:
        """Return the prompt of a rollout."""
        return self._prompts[rollout.prompt_id]

    def take(self, result: RewardResult) -> None:
        """Take the result of a rollout."""
        rollout = result.rollout
        if result.awaits_group:
            self._waiting[rollout.prompt_id].append(rollout)
            return
        self._finished[rollout.prompt_id] += 1
        self._num_empty += rollout.num_tokens == 0
        self._num_overlong += rollout.finish_reason == "length"
        self._numbers[rollout.key] = result.numbers
        if result.error is not None:
            self._errors[rollout.key] = result.error
        elif rollout.reward is not None:
            self._kept[rollout.key] = rollout
        else:
            self._num_unscored += rollout.num_tokens > 0

    def full_group(self, prompt_id: PromptId) -> tuple[Rollout, ...]:
        """Return a prompt's rollouts that await their group once all of the group are sampled, before that ().

        The rollouts are returned once; `take` then gets their results.
        """
        waiting = self._waiting[prompt_id]
        if len(waiting) + self._finished[prompt_id] < self._group_size:
            return ()
        del self._waiting[prompt_id]
        return tuple(sorted(waiting, key=lambda rollout: rollout.sample))

    def result(self) -> Collected:
        """Return the groups, in order of prompts and samples."""
        errors = {key: self._errors[key] for key in self._in_order(self._errors)}
        kept: dict[PromptId, list[Rollout]] = {prompt_id: [] for prompt_id in self._prompts}
        for key in self._in_order(self._kept):
            kept[key[0]].append(self._kept[key])
        numbers: dict[str, list[float]] = {}
        for key in self._in_order(self._numbers):
            for name, number in self._numbers[key].items():
                numbers.setdefault(name, []).append(number)
        return Collected(
            groups=tuple(Group(prompt=prompt, rollouts=tuple(kept[i])) for i, prompt in self._prompts.items()),
            num_reward_errors=len(errors),
            num_unscored=self._num_unscored,
            num_empty=self._num_empty,
            num_overlong=self._num_overlong,
            num_turns=self._finished.total(),
            # With the location of the prompt, because its id may be a hash.
            reward_errors=tuple(
                error.replace(f"prompt {key[0]!r}, ", f"prompt {self._prompts[key[0]].name}, ", 1)
                for key, error in errors.items()
            )[:NUM_MESSAGES],
            error_counts=Counter(error.removeprefix(whose(key)) for key, error in errors.items()),
            numbers=numbers,
        )

    def _in_order(self, by_key: Mapping[RolloutKey, object]) -> list[RolloutKey]:
        rank = {prompt_id: i for i, prompt_id in enumerate(self._prompts)}
        return sorted(by_key, key=lambda key: (rank[key[0]], key[2]))
