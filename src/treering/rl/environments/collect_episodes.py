"""Episodes of a step and the groups of their calls: run here, or collected from other processes.

Results depend on tasks and samples, never on the order in which episodes end.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treering.data.trajectory import Turn
from treering.engine.protocol import Engine, Rollout, RolloutKey, Sampling
from treering.errors import StateError
from treering.rl.collect import NUM_MESSAGES, Collected, Group, Runs, whose
from treering.rl.environments.environment import EnvironmentTask
from treering.rl.environments.episodes import Episode, Episodes, Run
from treering.rl.tasks.task import Prompt
from treering.schedule.placement import longest_first
from treering.schedule.predict import LengthPredictor, WaitPredictor
from treering.schedule.turns import Turns
from treering.types import PromptId


class EpisodeForecast:
    """Forecast of the tokens, turns and waits of each task's next episodes, from its latest ones.

    If no episode has waited, the order depends on no clock and repeats bitwise.

    Example: of two tasks with the same tokens, the one whose episodes waited for a tool starts first.
    """

    def __init__(self) -> None:
        self._lengths = LengthPredictor(guess=1.0)
        self._waits = WaitPredictor()
        self._token_s = 0.0

    def order(self, prompts: Sequence[PromptId], group_size: int) -> list[int]:
        """Return the indices of a step's episodes (tasks in order, then samples) in the order in which to start them.

        If nothing is known of any task, the order is unchanged.
        """
        if not any(prompt in self._waits for prompt in prompts):
            return list(range(len(prompts) * group_size))
        spans, (_, wait_s) = self._lengths.predict(prompts, group_size), self._waits.predict(prompts, group_size)
        if self._waits.has_waits:
            spans = spans * self._token_s + wait_s
        order: NDArray[np.int64] = longest_first(spans, np.repeat(np.arange(len(prompts)), group_size))
        return order.tolist()  # type: ignore[no-any-return]

    def note_pace(self, token_s: float) -> None:
        """Note the seconds per token of a running call in the latest step."""
        self._token_s = token_s

    def observe(self, groups: Sequence[Group]) -> None:
        """Learn from the groups of a step."""
        found: dict[PromptId, list[tuple[Turn, ...]]] = {}
        for group in groups:
            episodes = () if group.runs is None else group.runs.episodes
            found.setdefault(group.prompt.prompt_id, []).extend(turns for turns in episodes if turns)
        for prompt_id, own in found.items():
            if own:
                turns = Turns.of(own)
                self._lengths.observe(prompt_id, np.maximum(turns.lengths, 1))
                self._waits.observe(prompt_id, turns)

    def state(self) -> dict[str, Any]:
        """Return the checkpoint state, as lists, numbers and strings."""
        return {"lengths": self._lengths.state(), "waits": self._waits.state(), "token_s": self._token_s}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        self._lengths.load_state(state["lengths"])
        self._waits.load_state(state["waits"])
        self._token_s = state["token_s"]


_TICK_S = 0.1
"""Seconds between checks whether the process is interrupted or an episode blocks the others."""


def collect_episodes(
    engine: Engine,
    task: EnvironmentTask,
    prompts: Sequence[Prompt],
    draws: Mapping[PromptId, int],
    *,
    group_size: int,
    sampling: Sampling,
    num_episodes: int | None = None,
    forecast: EpisodeForecast | None = None,
    on_finished: Callable[[Rollout], None] | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Collected:
    """Run a group of episodes for each task and return their rollouts as groups, one per task and agent.

    An episode that raises, exits or exceeds the time limit is dropped and counted by its cause.

    Args:
        engine: idle before and after, also after an error.
        task: the environment.
        prompts: distinct prompts of the task.
        draws: how often each task has been scheduled before; 0 if it is not listed.
        group_size: episodes per task, samples 0 to group_size - 1.
        sampling: sampling of every call; `max_tokens` bounds a context with its turn.
        num_episodes: episodes of the whole step, if some run elsewhere; None if all run here.
        forecast: decides which episodes start first, and learns how long a token takes; None starts them in order.
        on_finished: called in the engine's thread with the branches of each kept episode.
        on_progress: called with the number of newly ended episodes, at least every tenth of a second.

    Raises:
        StateError: too many episodes failed, an episode blocks the others, or the engine is not idle.

    Example: two tasks in groups of 4 whose episodes play two agents give four groups of 4 runs.
    """
    step = EpisodeCollection(task, prompts, draws, group_size=group_size, sampling=sampling, num_episodes=num_episodes)
    before, requests = engine.stats, step.requests()
    if forecast is not None and task.options.episode_order == "longest_first":
        requests = [requests[i] for i in forecast.order([prompt.prompt_id for prompt in prompts], group_size)]
    with Episodes(engine, task, on_finished=on_finished) as episodes:
        episodes.start(requests)
        while step.num_open:
            ended = episodes.take(_TICK_S)
            for run in ended:
                step.take(run)
            if on_progress is not None:
                on_progress(len(ended))
    if forecast is not None:
        stats = engine.stats.since(before)
        forecast.note_pace(episodes.busy_s * stats.num_rows / max(stats.num_forwards * stats.num_sampled, 1))
    return step.result()


class EpisodeCollection:
    """Collect the runs of a step, from any process and in any order; `num_open` falls to 0 as `take` gets runs."""

    def __init__(
        self,
        task: EnvironmentTask,
        prompts: Sequence[Prompt],
        draws: Mapping[PromptId, int],
        *,
        group_size: int,
        sampling: Sampling,
        num_episodes: int | None = None,
    ) -> None:
        """Prepare the collection; the arguments are those of `collect_episodes`."""
        self._task, self._prompts, self._draws = task, prompts, draws
        self._group_size, self._sampling = group_size, sampling
        self._num_episodes = num_episodes or group_size * len(prompts)
        self._runs: dict[RolloutKey, Run] = {}

    @property
    def group_size(self) -> int:
        """Episodes per task."""
        return self._group_size

    @property
    def max_tokens(self) -> int:
        """Most tokens of a context with its turn."""
        return self._sampling.max_tokens

    @property
    def num_open(self) -> int:
        """Episodes that have not ended."""
        return self._group_size * len(self._prompts) - len(self._runs)

    def requests(self) -> list[Episode]:
        """Return every episode, group after group."""
        return [
            Episode(
                prompt_id=prompt.prompt_id,
                draw=self._draws.get(prompt.prompt_id, 0),
                sample=sample,
                sampling=self._sampling,
            )
            for prompt in self._prompts
            for sample in range(self._group_size)
        ]

    def take(self, run: Run) -> None:
        """Take a run."""
        self._runs[run.key] = run
        if run.error is not None:
            errors = Counter(error.removeprefix(whose(key)) for key, error in _failed(self._runs.values()).items())
            check_failures(errors, self._num_episodes, self._task.options.max_failed)

    def turns(self) -> Turns:
        """Return the turns of all runs, in the order of the requests; a failed run is a turn of one token."""
        runs = [self._runs[request.key] for request in self.requests()]
        return Turns.of([run.turns or (Turn(1, 0.0),) for run in runs])

    def result(self) -> Collected:
        """Return the groups, in order of tasks and agents."""
        rank = {prompt.prompt_id: i for i, prompt in enumerate(self._prompts)}
        runs = sorted(self._runs.values(), key=lambda run: (rank[run.key[0]], run.key[2]))
        failed = _failed(runs)
        kept = [run for run in runs if run.error is None]
        names = dict.fromkeys(name for run in kept for name in run.numbers)
        return Collected(
            groups=tuple(group for prompt in self._prompts for group in _groups(prompt, kept)),
            num_reward_errors=len(failed),
            num_unscored=0,
            num_empty=sum(not run.seats for run in kept),
            num_overlong=sum(run.num_cut > 0 for run in kept),
            num_turns=sum(run.num_calls for run in kept),
            reward_errors=tuple(failed.values())[:NUM_MESSAGES],
            error_counts=Counter(error.removeprefix(whose(key)) for key, error in failed.items()),
            numbers={name: [run.numbers[name] for run in kept if name in run.numbers] for name in names},
        )


def check_failures(error_counts: Mapping[str, int], num_episodes: int, max_failed: float) -> None:
    """Stop a run in which more than a share of a step's episodes failed.

    Raises:
        StateError: more failed; the message names the commonest cause.
    """
    num_failed = sum(error_counts.values())
    # Compare quotients, because the setting is rounded like one: 0.29 * 100 is less than 29.
    if num_failed / num_episodes <= max_failed:
        return
    cause, count = Counter(error_counts).most_common(1)[0]
    raise StateError(
        f"{cause} ({count} of {num_episodes} episodes; {num_failed} failed, and task.max_failed allows "
        f"{max_failed:.0%})"
    )


def _failed(runs: Iterable[Run]) -> dict[RolloutKey, str]:
    return {run.key: run.error for run in runs if run.error is not None}


def _groups(prompt: Prompt, runs: Sequence[Run]) -> list[Group]:
    """Return one group per agent, or an empty one if no run of the task trains anything."""
    own = [run for run in runs if run.key[0] == prompt.prompt_id]
    agents = dict.fromkeys(seat.agent for run in own for seat in run.seats)
    return [_group(prompt, agent, own) for agent in agents] or [Group(prompt=prompt, rollouts=())]


def _group(prompt: Prompt, agent: str, runs: Sequence[Run]) -> Group:
    found = [(run, seat) for run in runs for seat in run.seats if seat.agent == agent]
    seats = [seat for _, seat in found]
    return Group(
        prompt=prompt,
        rollouts=tuple(rollout for seat in seats for rollout in seat.rollouts),
        runs=Runs(
            of=tuple(number for number, seat in enumerate(seats) for _ in seat.rollouts),
            turns=tuple(turns for seat in seats for turns in seat.turns),
            turn_rewards=tuple(seat.turn_rewards for seat in seats),
            agent=agent,
            episodes=tuple(run.turns if seat is run.seats[0] else () for run, seat in found),
        ),
    )
