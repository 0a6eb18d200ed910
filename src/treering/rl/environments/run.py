"""A finished episode: what its calls train, by agent, and what they were worth."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from treering.data.episode import Turn
from treering.engine.rollout import Rollout, RolloutKey
from treering.rl.environments.calls import Branch, SharedTurns, branches_of
from treering.rl.environments.environment import Outcome
from treering.rl.environments.policy import Session


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
    num_sampled: int = 0
    """Tokens of all calls."""
    turns: tuple[Turn, ...] = ()
    """What all agents sampled, and the waiting between."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None

    @property
    def rollouts(self) -> list[Rollout]:
        """The branches of all seats."""
        return [rollout for seat in self.seats for rollout in seat.rollouts]


def finished_run(session: Session, outcome: Outcome, shared: SharedTurns) -> Run:
    """The run of an episode that has ended.

    Args:
        session: its calls.
        outcome: what its coroutine returned, of agents and calls that it has (`unknown_names`).
        shared: see `SharedTurns`.

    Example: a run of three calls in one chat has one seat with one branch.
    """
    calls = [session.calls[number] for number in sorted(session.calls)]
    agents = dict.fromkeys(call.agent for call in calls if session.trainable[call.agent])
    seats = [_seat(session, agent, outcome, shared) for agent in agents]
    turns = session.clock.turns()
    wait_s = sum(turn.wait_s for turn in turns)
    numbers = {
        "calls": float(len(calls)),
        "branches": float(sum(len(seat.rollouts) for seat in seats)),
        **({"wait_s": wait_s} if wait_s else {}),
        **{name: float(value) for name, value in outcome.numbers.items()},
    }
    return Run(
        key=(session.prompt_id, session.draw, session.sample),
        seats=tuple(seats),
        num_calls=len(calls),
        num_cut=sum(call.rollout.finish_reason == "length" for call in calls),
        num_sampled=sum(call.rollout.num_tokens for call in calls),
        turns=turns,
        numbers=numbers,
    )


def unknown_names(session: Session, outcome: Outcome) -> str | None:
    """What an outcome rewards and the run does not have, as an error in words; None if there is nothing.

    Example: `turn_rewards={7: 1.0}` after two calls gives a text that names call 7.
    """
    agents = [name for name in outcome.rewards if name not in session.trainable]
    calls = [number for number in outcome.turn_rewards if number not in session.calls]
    if agents:
        return f"InputError: rewards are of agents of the run, which has no {agents[0]!r}; ask policy.agent for it"
    if calls:
        return f"InputError: turn_rewards are of calls of the run, which has no call {calls[0]!r}; take Reply.call"
    return None


def _seat(session: Session, agent: str, outcome: Outcome, shared: SharedTurns) -> Seat:
    calls = [session.calls[number] for number in sorted(session.calls) if session.calls[number].agent == agent]
    branches = branches_of(calls, shared)
    reward = float(outcome.rewards.get(agent, outcome.reward))
    worth = tuple(float(outcome.turn_rewards.get(call.number, 0.0)) for call in calls)
    return Seat(
        agent=agent,
        rollouts=tuple(_rollout(session, branch, reward) for branch in branches),
        turns=tuple(branch.turns for branch in branches),
        turn_rewards=worth if any(worth) else (),
    )


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
