"""Samples the groups of a step with an engine, turn by turn, and rewards them.

Results depend on prompts and samples, never on the order in which rollouts finish.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from treering.engine.protocol import Engine
from treering.engine.request import Request, Sampling
from treering.engine.rollout import Rollout, RolloutKey
from treering.errors import ConfigError, InputError, StateError
from treering.rl.tasks.task import Prompt, Task
from treering.rl.turns import RewardResult, evaluate_turn
from treering.types import PromptId

Order = Literal["by_prompt", "by_sample"]
"""In which order a step's rollouts start. by_prompt: group after group, so that few prompts are in memory at one time.
by_sample: the first of every group, then the second, so that those that finish can draft for those that wait."""

NUM_MESSAGES = 5
"""Messages of reward errors that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """The rollouts of one prompt in one step."""

    prompt: Prompt
    """What they continue."""
    rollouts: tuple[Rollout, ...]
    """Those with a reward, in the order of their samples; () where none is left."""

    def __post_init__(self) -> None:
        for rollout in self.rollouts:
            if rollout.reward is None or rollout.prompt_id != self.prompt.prompt_id:
                raise InputError(
                    f"a group holds rollouts of its prompt {self.prompt.prompt_id!r} with rewards, got one of "
                    f"{rollout.prompt_id!r} with reward {rollout.reward}; leave it out"
                )

    @property
    def rewards(self) -> NDArray[np.float64]:
        """float64 [G], in the order of the rollouts."""
        return np.array([rollout.reward for rollout in self.rollouts], np.float64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Collected:
    """The groups of a step, and what happened on the way.

    Example: 2 prompts in groups of 4 where one reward raised are groups of 4 and 3 with `num_reward_errors` 1.
    """

    groups: tuple[Group, ...]
    """One per prompt, in the order of the prompts."""
    num_reward_errors: int
    """Rollouts left out because the task raised on them or gave no finite number."""
    num_empty: int
    """Rollouts left out because they have no tokens."""
    num_overlong: int
    """Rollouts that ran out of room."""
    num_turns: int
    """Turns that the policy took, all rollouts together."""
    reward_errors: tuple[str, ...]
    """The first few messages, in the order of prompts and samples."""

    @property
    def num_rollouts(self) -> int:
        """Rollouts in groups."""
        return sum(len(group.rollouts) for group in self.groups)


def collect(
    engine: Engine,
    task: Task,
    prompts: Sequence[Prompt],
    draws: Mapping[PromptId, int],
    *,
    group_size: int,
    sampling: Sampling,
    max_turns: int = 1,
    order: Order = "by_prompt",
    on_finished: Callable[[Rollout], None] | None = None,
) -> Collected:
    """Samples a group for each prompt, lets the task answer between turns, and rewards rollouts as they finish.

    A turn that ended by itself goes on behind what `task.observe` says, until that is None, `max_turns` is reached or
    no room is left for another token: then the rollout ends before the observation, with finish reason "length".
    Where the task raises, or its reward is no finite number, the rollout is left out and counted.

    Args:
        engine: an idle one; idle again afterwards, also after an error.
        task: observations and rewards.
        prompts: distinct ones of the task.
        draws: how many times each prompt has been scheduled before; 0 where it is not listed.
        group_size: rollouts per prompt, samples 0 to group_size - 1.
        sampling: of all turns; `max_tokens` bounds a whole rollout. The task's stop tokens belong in it.
        max_turns: turns of the policy at most.
        order: see `Order`; changes speed, never a rollout.
        on_finished: called with each rollout at its end, its reward set unless it is left out.

    Raises:
        ConfigError: a group_size or max_turns below 1.
        InputError: a prompt twice, or requests that the engine refuses.
        StateError: an engine that has requests already.

    Example: with group_size=2 and max_turns=1, prompts a and b give the groups (a0, a1) and (b0, b1), however they
    finish.
    """
    if engine.num_unfinished > 0:
        raise StateError(
            f"a collection needs an idle engine, and this one has {engine.num_unfinished} requests; finish them"
        )
    run = Collection(prompts, draws, group_size=group_size, sampling=sampling, max_turns=max_turns)
    requests = run.requests(order)
    engine.submit(requests)
    try:
        while engine.num_unfinished > 0:
            for rollout in engine.step():
                is_last_turn, prompt = run.note_turn(rollout), run.prompt_of(rollout)
                result = evaluate_turn(task, prompt, rollout, is_last_turn=is_last_turn, max_tokens=sampling.max_tokens)
                following = run.take(result)
                if following is not None:
                    engine.submit([following])
                elif on_finished is not None:
                    on_finished(result.rollout)
    except BaseException:
        engine.abort([request.key for request in requests])
        raise
    return run.result()


class Collection:
    """The rollouts of a step as they come in, from whichever engine and in whichever order.

    Example: with 2 prompts in groups of 4 it has 8 requests, and `num_open` falls from 8 to 0 as verdicts are taken.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        draws: Mapping[PromptId, int],
        *,
        group_size: int,
        sampling: Sampling,
        max_turns: int,
    ) -> None:
        """See `collect`, whose rules these are."""
        if group_size < 1 or max_turns < 1:
            raise ConfigError(f"group_size and max_turns are at least 1, got {group_size} and {max_turns}; raise them")
        self._prompts = {prompt.prompt_id: prompt for prompt in prompts}
        self._draws = draws
        self._group_size = group_size
        self._sampling = sampling
        self._max_turns = max_turns
        self._turns: Counter[RolloutKey] = Counter()
        self._kept: dict[RolloutKey, Rollout] = {}
        self._errors: dict[RolloutKey, str] = {}
        self._num_empty = 0
        self._num_overlong = 0
        self._num_finished = 0
        if len(self._prompts) < len(prompts):
            twice, _ = Counter(prompt.prompt_id for prompt in prompts).most_common(1)[0]
            raise InputError(f"the prompts of a step have distinct ids, got {twice!r} twice; drop one, or rename it")

    @property
    def group_size(self) -> int:
        """Rollouts of a prompt."""
        return self._group_size

    @property
    def max_tokens(self) -> int:
        """Tokens of a rollout at most."""
        return self._sampling.max_tokens

    @property
    def num_open(self) -> int:
        """Rollouts that are not over."""
        return len(self._prompts) * self._group_size - self._num_finished

    def requests(self, order: Order = "by_prompt") -> list[Request]:
        """The first turn of every rollout."""
        pairs = [(prompt_id, sample) for prompt_id in self._prompts for sample in range(self._group_size)]
        if order == "by_sample":
            pairs.sort(key=lambda pair: pair[1])
        return [self._request((prompt_id, self._draws.get(prompt_id, 0), sample)) for prompt_id, sample in pairs]

    def prompt_of(self, rollout: Rollout) -> Prompt:
        """What a rollout continues."""
        return self._prompts[rollout.prompt_id]

    def note_turn(self, rollout: Rollout) -> bool:
        """Counts a turn that an engine has ended, once each; whether it was the last one that the rollout may have."""
        self._turns[rollout.key] += 1
        return self._turns[rollout.key] == self._max_turns

    def take(self, result: RewardResult) -> Request | None:
        """Takes the verdict on a turn; returns the request of the next one, or None where the rollout is over."""
        rollout = result.rollout
        if result.goes_on:
            return self._request(rollout.key, so_far=rollout)
        self._num_finished += 1
        self._num_empty += rollout.num_tokens == 0
        self._num_overlong += rollout.finish_reason == "length"
        if result.error is not None:
            self._errors[rollout.key] = result.error
        if rollout.reward is not None:
            self._kept[rollout.key] = rollout
        return None

    def result(self) -> Collected:
        """The groups, in the order of prompts and samples."""
        errors = [self._errors[key] for key in self._in_order(self._errors)]
        kept: dict[PromptId, list[Rollout]] = {prompt_id: [] for prompt_id in self._prompts}
        for key in self._in_order(self._kept):
            kept[key[0]].append(self._kept[key])
        return Collected(
            groups=tuple(Group(prompt=prompt, rollouts=tuple(kept[i])) for i, prompt in self._prompts.items()),
            num_reward_errors=len(errors),
            num_empty=self._num_empty,
            num_overlong=self._num_overlong,
            num_turns=self._turns.total(),
            reward_errors=tuple(errors[:NUM_MESSAGES]),
        )

    def _in_order(self, by_key: Mapping[RolloutKey, object]) -> list[RolloutKey]:
        rank = {prompt_id: i for i, prompt_id in enumerate(self._prompts)}
        return sorted(by_key, key=lambda key: (rank[key[0]], key[2]))

    def _request(self, key: RolloutKey, so_far: Rollout | None = None) -> Request:
        prompt_id, draw, sample = key
        return Request(
            prompt_id=prompt_id,
            prompt=self._prompts[prompt_id].tokens,
            sampling=self._sampling,
            draw=draw,
            sample=sample,
            so_far=so_far,
        )
