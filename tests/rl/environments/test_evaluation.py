"""Episodes of held-out tasks are those of training with the same keys; a KL in the reward counts each sampled token."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from tests.models import build_float64, flat_logprobs
from tests.rl.environments.worlds import TURN_END, VOCAB, WORLDS, World, collect, engine_of, model_of, task_of, user
from treering.config.optim import OptimOptions
from treering.config.rl_options import RlOptions
from treering.engine.protocol import Sampling
from treering.errors import StateError
from treering.ranks.group import RankGroup
from treering.rl.collect import Collected
from treering.rl.environments.environment import EnvTask, Outcome
from treering.rl.environments.policy_calls import Policy
from treering.rl.evaluation import EvalOptions, HeldOutRewards
from treering.rl.sampler import Sampler
from treering.rl.step_report import as_trajectories, rollout_report
from treering.rl.trainer import Trainer

SAMPLING = Sampling(max_tokens=500, stop_tokens=(TURN_END,))


@pytest.mark.parametrize("name", ["Rerendered", "TwoSeats"])
def test_an_evaluation_has_the_episodes_of_training_with_the_same_keys(name: str) -> None:
    model, task = model_of(), task_of(WORLDS[name]())
    expected = collect(engine_of(model), task, num_tasks=2, group_size=4)
    held = task.subset(task.prompts[:2])
    report = HeldOutRewards(held, lambda: engine_of(model), EvalOptions(sampling=SAMPLING, num_samples=4))()
    rewards = np.concatenate([group.rewards for group in expected.groups])
    assert len(expected.groups) == (4 if name == "TwoSeats" else 2)
    assert report.reward == pytest.approx(float(rewards.mean()))
    assert report.pass_at[1] == pytest.approx(float((rewards >= 1).mean()))
    num_tokens = sum(rollout.num_tokens for group in expected.groups for rollout in group.rollouts)
    assert report.length_mean == pytest.approx(num_tokens / rewards.size)


class Paid(World):
    """Environment that also rewards a call."""

    async def run(self, task: EnvTask, policy: Policy) -> Outcome:
        reply = await policy.chat([user(f"task {task.data}")])
        return Outcome(reward=0.5, turn_rewards={reply.call: len(reply.text) - 4.0})


def test_what_its_calls_earn_belongs_to_the_reward_of_a_run_in_reports_logs_and_evaluations() -> None:
    model, task = model_of(), task_of(Paid())
    collected = collect(engine_of(model), task, num_tasks=2, group_size=4)
    turn_rewards = [values for group in collected.groups for values in group.runs.turn_rewards]  # type: ignore[union-attr]
    earned = [0.5 + sum(values) for values in turn_rewards]
    assert len(set(earned)) > 1
    report = rollout_report(collected, num_zero_variance=0, num_empty_groups=0)
    assert report.reward_mean == pytest.approx(np.mean(earned))
    assert report.reward_std == pytest.approx(np.std(earned))
    assert [each.reward for each in as_trajectories(collected.groups, epoch=0, step=1)] == earned
    options = EvalOptions(sampling=SAMPLING, num_samples=4, pass_reward=0.5)
    held = HeldOutRewards(task.subset(task.prompts[:2]), lambda: engine_of(model), options)()
    assert held.reward == pytest.approx(np.mean(earned))
    assert held.pass_at[1] == pytest.approx(np.mean(np.array(earned) >= 0.5))


class OneOf:
    """One rank's view of a group of two, once it knows the other's facts."""

    size = 2

    def __init__(self, rank: int, others: Any = None) -> None:
        self.rank, self.others = rank, others

    def gather(self, own: Any) -> list[Any]:
        self.own = own
        return [own if self.others is None else self.others, own]


def step_of(group: Any, **options: Any) -> Collected:
    task = task_of(WORLDS["TwoSeats"](), **options)
    chosen = RlOptions(prompts_per_step=3, group_size=2, sampling=SAMPLING)
    return Sampler(task, chosen, None, group).collect(engine_of(model_of()), task.prompts[:3], {})


def test_ranks_run_the_episodes_of_one_process() -> None:
    whole, first = step_of(RankGroup()), OneOf(0)
    step_of(first)
    both = step_of(OneOf(1, first.own))
    assert [group.prompt.prompt_id for group in both.groups] == ["t0", "t0", "t1", "t1", "t2", "t2"]
    for mine, theirs in zip(both.groups, whole.groups, strict=True):
        assert mine.rewards.tolist() == theirs.rewards.tolist()
        assert [r.tokens.tolist() for r in mine.rollouts] == [r.tokens.tolist() for r in theirs.rollouts]


def test_failed_episodes_of_a_rank_are_a_share_of_the_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run = WORLDS["TwoSeats"].run

    async def failing(self: Any, task: Any, policy: Any) -> Any:
        if task.id == "t1":
            raise ValueError("no file")
        return await run(self, task, policy)

    monkeypatch.setattr(WORLDS["TwoSeats"], "run", failing)
    first = OneOf(0)
    step_of(first, max_failed=0.4)
    # Only the second rank has the failing task.
    assert step_of(OneOf(1, first.own), max_failed=0.4).num_reward_errors == 2
    with pytest.raises(StateError, match=r"ValueError: no file \(2 of 6 episodes; 2 failed"):
        step_of(OneOf(1, first.own), max_failed=0.3)


class Forking(World):
    """Environment with a turn that two others continue."""

    async def run(self, task: EnvTask, policy: Policy) -> float:
        chat = [user(f"task {task.data}")]
        first = await policy.chat(chat)
        chat += [first.message]
        others = await asyncio.gather(*(policy.chat([*chat, user(text)]) for text in ("left", "right")))
        return self.reward([first.text, *(other.text for other in others)])


@pytest.mark.parametrize("world", [WORLDS["Linear"], Forking])
def test_a_kl_in_the_reward_counts_each_sampled_token_of_a_run_once(world: type[World]) -> None:
    """Compares with log-probs of every call, run separately by the stock forward."""
    policy, before = model_of(), build_float64("qwen3", vocab_size=VOCAB, seed=4).eval()
    collected = collect(engine_of(policy), task_of(world()), num_tasks=2, group_size=3)
    options = RlOptions(
        prompts_per_step=2, group_size=3, sampling=SAMPLING, estimator="dr_grpo", objective="dr_grpo",
        normalizer=9.0,
        kl=0.1, kl_in="reward",
    )  # fmt: skip
    trainer = Trainer(policy, OptimOptions(learning_rate=1e-3), options, reference=lambda: before)
    trained = trainer.train(1, collected.groups)
    for group, advantages in zip(collected.groups, trained.group_advantages, strict=True):
        assert group.runs is not None
        differences: dict[tuple[int, int], float] = {}
        for rollout, run, turns in zip(group.rollouts, group.runs.of, group.runs.turns, strict=True):
            with torch.no_grad():
                logprobs, _ = flat_logprobs(before, rollout.tokens.tolist())
            terms = rollout.policy_logprobs - np.concatenate([[0.0], logprobs.numpy()])
            # A call that is on several branches has the same number on each.
            differences |= {(run, int(turn)): float(terms[turns == turn].sum()) for turn in set(turns[turns >= 0])}
        sums = [sum(v for (of, _), v in differences.items() if of == run) for run in sorted(set(group.runs.of))]
        worth = group.rewards - 0.1 * np.array(sums)
        expected = (worth - worth.mean())[np.array(group.runs.of)]
        np.testing.assert_allclose(np.array(advantages), expected, atol=1e-9, rtol=0)
