"""Runs a step's episodes at the same time and turns their calls into the groups that are trained.

The results of episodes that read no clock depend on tasks and samples alone, never on which ends first.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import numpy as np
from numpy.typing import NDArray

from treering.engine.host import EngineHost
from treering.engine.protocol import Engine
from treering.engine.request import Sampling
from treering.engine.rollout import Rollout, RolloutKey
from treering.errors import StateError
from treering.rl.collect import NUM_MESSAGES, Collected, Group, Runs
from treering.rl.environments.calls import Branch, branches_of
from treering.rl.environments.environment import Outcome, as_outcome
from treering.rl.environments.episode_loop import EpisodeLoop
from treering.rl.environments.policy import CallLimits, Policy, Session
from treering.rl.environments.task import EnvironmentTask
from treering.rl.tasks.task import Prompt
from treering.rl.turns import whose
from treering.rl.user_code import in_words, place_of_frame
from treering.types import PromptId

_TICK_S = 0.1
"""How often the waiting process looks whether it is interrupted, or an episode blocks the others."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seat:
    """What one agent of a run is trained on.

    Example: of a run with two branches, `rollouts` has two entries, both with the reward of the run.
    """

    agent: str
    rollouts: tuple[Rollout, ...]
    """Its branches, whole contexts included."""
    turns: tuple[NDArray[np.int32], ...]
    """See `Runs.turns`."""
    turn_rewards: tuple[float, ...]
    """See `Runs.turn_rewards`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """A finished episode: the seats that it trains, or why it failed.

    Example: a run that raised has no seats and an `error`.
    """

    key: RolloutKey
    seats: tuple[Seat, ...] = ()
    num_calls: int = 0
    num_cut: int = 0
    """Calls that reached their longest turn."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None


def collect_episodes(
    engine: Engine,
    task: EnvironmentTask,
    prompts: Sequence[Prompt],
    draws: Mapping[PromptId, int],
    *,
    group_size: int,
    sampling: Sampling,
    num_episodes: int | None = None,
    on_finished: Callable[[Rollout], None] | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> Collected:
    """Runs a group of episodes for each task and returns what they sampled as groups, one per task and agent.

    An episode that raises, exits or takes longer than the time limit is left out and counted by its cause.

    Args:
        engine: idle before and after, also after an error.
        task: the environment.
        prompts: distinct ones of the task.
        draws: how often each task has been scheduled before; 0 if it is not listed.
        group_size: episodes per task, samples 0 to group_size - 1.
        sampling: of every call; `max_tokens` bounds a context with its turn.
        num_episodes: of the whole step, of which some may run elsewhere; None: they are all here.
        on_finished: called in the engine's thread with the branches of each episode that is kept.
        on_progress: called with the number of episodes that have ended since, at least every tenth of a second.

    Raises:
        StateError: too many episodes failed, an episode blocks the others, or the engine is not idle.

    Example: two tasks in groups of 4 whose episodes play two seats give four groups of 4 runs.
    """
    step = _Step(task, sampling, group_size, num_episodes or group_size * len(prompts))
    with EpisodeLoop() as loop, EngineHost(engine, settle=loop.settle) as host:
        try:
            runs = step.run(loop, host, prompts, draws, on_finished, on_progress)
        finally:
            # Before the engine's, so that open calls leave it.
            loop.close()
    if host.error is not None:
        raise host.error
    return _collected(prompts, runs, task)


class _Step:
    """The episodes of a step."""

    def __init__(self, task: EnvironmentTask, sampling: Sampling, group_size: int, num_episodes: int) -> None:
        self._task, self._options = task, task.options
        self._sampling = sampling
        self._group_size, self._num_episodes = group_size, num_episodes
        self._ended: SimpleQueue[Run] = SimpleQueue()

    def run(
        self,
        loop: EpisodeLoop,
        host: EngineHost,
        prompts: Sequence[Prompt],
        draws: Mapping[PromptId, int],
        on_finished: Callable[[Rollout], None] | None,
        on_progress: Callable[[int], None] | None,
    ) -> list[Run]:
        keys = [
            (prompt.prompt_id, draws.get(prompt.prompt_id, 0), i) for prompt in prompts for i in range(self._group_size)
        ]
        episodes = loop.start(self._all(host, keys, on_finished))
        runs: list[Run] = []
        while len(runs) < len(keys):
            ended = self._next()
            runs += ended
            if not ended:
                self._check_running(loop, episodes)
            if host.error is not None:
                raise host.error
            if on_progress is not None:
                on_progress(len(ended))
            errors = Counter(run.error.removeprefix(whose(run.key)) for run in runs if run.error is not None)
            check_failures(errors, self._num_episodes, self._options.max_failed)
        return runs

    def _next(self) -> list[Run]:
        """The next run that ends, if one does soon."""
        try:
            return [self._ended.get(timeout=_TICK_S)]
        except Empty:
            return []

    def _check_running(self, loop: EpisodeLoop, episodes: "Future[None]") -> None:
        """Raises what ended the episodes, or that one blocks the others."""
        if episodes.done() and self._ended.empty():
            episodes.result()
        limit = self._options.episode_timeout_s
        if loop.busy_s() > limit:
            frame = loop.frame()
            place = None if frame is None else place_of_frame(frame)
            raise StateError(
                f"episodes share one event loop, and one has blocked it for {limit:g} s"
                f"{'' if place is None else f' at {place}'}; await what waits there, or call it by asyncio.to_thread"
            )

    async def _all(
        self, host: EngineHost, keys: Sequence[RolloutKey], on_finished: Callable[[Rollout], None] | None
    ) -> None:
        slots = asyncio.Semaphore(self._options.limit)

        async def one(key: RolloutKey) -> None:
            async with slots:
                run = await self._episode(host, key)
            for rollout in (rollout for seat in run.seats for rollout in seat.rollouts):
                if on_finished is not None:
                    host.run(lambda rollout=rollout: on_finished(rollout))  # type: ignore[misc]
            self._ended.put(run)

        await asyncio.gather(*(one(key) for key in keys))

    async def _episode(self, host: EngineHost, key: RolloutKey) -> Run:
        prompt_id, draw, sample = key[:3]
        session = Session(
            host=host,
            prompt_id=prompt_id,
            draw=draw,
            sample=sample,
            sampling=self._sampling,
            limits=CallLimits(max_context=self._sampling.max_tokens, max_turn_tokens=self._options.max_turn_tokens),
            chat=self._task.chat,
        )
        running = asyncio.ensure_future(self._outcome(session))
        done, _ = await asyncio.wait({running}, timeout=self._options.episode_timeout_s)
        session.close()
        if not done:
            running.cancel()
            limit = f"no end within {self._options.episode_timeout_s:g} s (task.episode_timeout)"
            return Run(key=key, error=f"{whose(key)}{limit}")
        found = running.result()
        error = found if isinstance(found, str) else _unknown_names(session, found)
        if isinstance(found, str) or error is not None:
            return Run(key=key, error=f"{whose(key)}{error}")
        return self._run(session, found)

    async def _outcome(self, session: Session) -> Outcome | str:
        """What the user's coroutine returns, or its error in words."""
        process = os.getpid()
        task = self._task.tasks[session.prompt_id]
        try:
            return as_outcome(await self._task.environment.run(task, Policy(session)))
        except asyncio.CancelledError:
            return "CancelledError: the episode cancelled itself"
        except BaseException as error:
            return in_words(error)
        finally:
            if os.getpid() != process:
                # A fork came back from the episode; only the original continues the run.
                os._exit(0)

    def _run(self, session: Session, outcome: Outcome) -> Run:
        calls = [session.calls[number] for number in sorted(session.calls)]
        agents = dict.fromkeys(call.agent for call in calls if session.trainable[call.agent])
        seats = [self._seat(session, agent, outcome) for agent in agents]
        numbers = {
            "calls": float(len(calls)),
            "branches": float(sum(len(seat.rollouts) for seat in seats)),
            **{name: float(value) for name, value in outcome.numbers.items()},
        }
        return Run(
            key=(session.prompt_id, session.draw, session.sample),
            seats=tuple(seats),
            num_calls=len(calls),
            num_cut=sum(call.rollout.finish_reason == "length" for call in calls),
            numbers=numbers,
        )

    def _seat(self, session: Session, agent: str, outcome: Outcome) -> Seat:
        calls = [session.calls[number] for number in sorted(session.calls) if session.calls[number].agent == agent]
        branches = branches_of(calls, self._options.shared)
        reward = float(outcome.rewards.get(agent, outcome.reward))
        worth = tuple(float(outcome.turn_rewards.get(call.number, 0.0)) for call in calls)
        return Seat(
            agent=agent,
            rollouts=tuple(_rollout(session, branch, reward) for branch in branches),
            turns=tuple(branch.turns for branch in branches),
            turn_rewards=worth if any(worth) else (),
        )


def _unknown_names(session: Session, outcome: Outcome) -> str | None:
    """What an outcome rewards and the run does not have."""
    agents = [name for name in outcome.rewards if name not in session.trainable]
    calls = [number for number in outcome.turn_rewards if number not in session.calls]
    if agents:
        return f"InputError: rewards are of agents of the run, which has no {agents[0]!r}; ask policy.agent for it"
    if calls:
        return f"InputError: turn_rewards are of calls of the run, which has no call {calls[0]!r}; take Reply.call"
    return None


def _rollout(session: Session, branch: Branch, reward: float) -> Rollout:
    return Rollout(
        prompt_id=session.prompt_id,
        draw=session.draw,
        sample=session.sample,
        tokens=branch.tokens,
        logprobs=branch.logprobs,
        policy_logprobs=branch.policy_logprobs,
        loss_mask=branch.loss_mask,
        versions=branch.versions,
        finish_reason="stop",
        reward=reward,
    )


def check_failures(error_counts: Mapping[str, int], num_episodes: int, max_failed: float) -> None:
    """Stops a run of which too many episodes failed.

    Args:
        error_counts: how often each cause occurred in a step.
        num_episodes: of the step.
        max_failed: share of them that may fail.

    Raises:
        StateError: more did; it names the commonest cause.

    Example: with three of four failed and `max_failed` 0.5 it raises.
    """
    num_failed = sum(error_counts.values())
    if num_failed <= max_failed * num_episodes:
        return
    cause, count = Counter(error_counts).most_common(1)[0]
    raise StateError(
        f"at most {max_failed:.0%} of a step's episodes may fail (task.max_failed), and {num_failed} of "
        f"{num_episodes} did, {count} with {cause}; correct the environment, or raise it"
    )


def _collected(prompts: Sequence[Prompt], runs: Sequence[Run], task: EnvironmentTask) -> Collected:
    rank = {prompt.prompt_id: i for i, prompt in enumerate(prompts)}
    runs = sorted(runs, key=lambda run: (rank[run.key[0]], run.key[2]))
    failed = {run.key: run.error for run in runs if run.error is not None}
    kept = [run for run in runs if run.error is None]
    names = dict.fromkeys(name for run in kept for name in run.numbers)
    return Collected(
        groups=tuple(group for prompt in prompts for group in _groups(prompt, kept, task)),
        num_reward_errors=len(failed),
        num_unscored=0,
        num_empty=sum(not run.seats for run in kept),
        num_overlong=sum(run.num_cut > 0 for run in kept),
        num_turns=sum(run.num_calls for run in kept),
        reward_errors=tuple(failed.values())[:NUM_MESSAGES],
        error_counts=Counter(error.removeprefix(whose(key)) for key, error in failed.items()),
        numbers={name: [run.numbers[name] for run in kept if name in run.numbers] for name in names},
    )


def _groups(prompt: Prompt, runs: Sequence[Run], task: EnvironmentTask) -> list[Group]:
    """One per agent; one without rollouts if no run of the task trains anything."""
    own = [run for run in runs if run.key[0] == prompt.prompt_id]
    agents = dict.fromkeys(seat.agent for run in own for seat in run.seats)
    seats = [[seat for run in own for seat in run.seats if seat.agent == agent] for agent in agents]
    return [_group(prompt, of_agent, task) for of_agent in seats] or [Group(prompt=prompt, rollouts=())]


def _group(prompt: Prompt, seats: Sequence[Seat], task: EnvironmentTask) -> Group:
    return Group(
        prompt=prompt,
        rollouts=tuple(rollout for seat in seats for rollout in seat.rollouts),
        runs=Runs(
            of=tuple(number for number, seat in enumerate(seats) for _ in seat.rollouts),
            turns=tuple(turns for seat in seats for turns in seat.turns),
            turn_rewards=tuple(seat.turn_rewards for seat in seats),
            weights=task.options.weights,
        ),
    )
