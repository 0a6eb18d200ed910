"""Runs of environments in the loop: law 8, advantages by run, and weights that do not depend on branches."""

import numpy as np
import pytest

import treering
from tests.models import build_float64
from tests.rl.environments.worlds import VOCAB, WORLDS, collect, engine_of, task_of
from tests.rl.rollouts import rollout_of
from treering.config.rl_options import RlOptions
from treering.engine.protocol import Sampling
from treering.rl.advantages import branch_advantages, branch_weights
from treering.rl.batch import make_rl_batch
from treering.rl.collect import Group, Runs
from treering.rl.tasks.task import Prompt
from treering.rl.trainer import make_objective, weighting_of
from treering.train.entries import entry_counts, entry_weights
from treering.train.objective import Weighting
from treering.tree.forest import Forest


@pytest.mark.parametrize("name", ["Rerendered", "SubAgents", "TwoSeats"])
def test_the_gradient_of_a_tree_of_runs_is_that_of_their_branches_one_by_one(name: str) -> None:
    model = build_float64("qwen3", vocab_size=VOCAB).eval()
    groups = collect(engine_of(model), task_of(WORLDS[name]()), num_tasks=2, group_size=4).groups
    found = []
    for layout in ("tree", "packed"):
        options = RlOptions(prompts_per_step=2, group_size=4, sampling=Sampling(max_tokens=9), layout=layout)
        batch = make_rl_batch(groups, estimator="grpo", layout=layout, normalizer=weighting_of(options).normalizer)
        model.zero_grad()
        treering.backward(model, batch.trees.forests, make_objective(options, batch))
        found.append({key: weight.grad.clone() for key, weight in model.named_parameters()})
    tree, packed = found
    assert sum(float(grad.norm()) for grad in packed.values()) > 0
    for key, expected in packed.items():
        assert float((tree[key] - expected).norm()) <= 1e-10 * float(expected.norm()) + 1e-14


def group_of(
    rewards: list[float], of: tuple[int, ...], turn_rewards: tuple[tuple[float, ...], ...] = (), **fields: object
) -> Group:
    """Return branches of three tokens, of which the k-th has k + 1 more that are trained."""
    branches, turns = [], []
    for number, run in enumerate(of):
        size = number + 1
        mask = np.array([False] * 3 + [True] * size)
        tokens = np.arange(3 + size, dtype=np.int32) + 10 * number * (np.arange(3 + size) > 2)
        branches.append(rollout_of(tokens.astype(np.int32), sample=run, reward=rewards[run], loss_mask=mask))
        turns.append(np.where(mask, number - of.index(run), -1).astype(np.int32))
    runs = Runs(of=of, turns=tuple(turns), turn_rewards=turn_rewards or ((),) * len(rewards), **fields)
    return Group(prompt=Prompt(prompt_id="p", tokens=np.array([1], np.int32)), rollouts=tuple(branches), runs=runs)


def test_runs_are_compared_however_many_branches_they_have() -> None:
    group = group_of([1.0, 0.0], (0, 0, 0, 1))
    assert group.rewards.tolist() == [1.0, 0.0]
    assert list(branch_advantages(group, "dr_grpo")) == [0.5, 0.5, 0.5, -0.5]


def test_a_call_is_worth_what_its_run_earns_from_it_on() -> None:
    group = group_of([0.0, 1.0], (0, 0, 1), turn_rewards=((1.0, 4.0), ()))
    first, second, other = branch_advantages(group, "dr_grpo")
    # The first calls have values 5 and 1, the second ones 4 and, where there is none, 1.
    assert first.tolist() == [0, 0, 0, 2]
    assert second.tolist() == [0, 0, 0, 1.5, 1.5]
    assert other.tolist() == [0, 0, 0, -2, -2, -2]


def test_a_run_without_rewards_of_calls_may_have_more_calls_than_those_with_some() -> None:
    group = group_of([0.0, 1.0], (0, 1, 1), turn_rewards=((1.0,), ()))
    first, other, later = branch_advantages(group, "dr_grpo")
    # The first calls have values 1 and 1, the second ones, where there is none, 0, and 1.
    assert not first.any()
    assert not other.any()
    assert later.tolist() == [0, 0, 0, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("normalizer", ["sequence_mean", "sequence_sum", "token_mean"])
def test_a_mean_over_sequences_is_one_over_runs(normalizer: str) -> None:
    """Each run's trained tokens have the weights that they would have in one sequence."""
    groups = [group_of([1.0, 0.0], (0, 0, 1)), group_of([2.0, 0.0], (0, 1, 1, 1))]
    batch = make_rl_batch(groups, estimator="dr_grpo", layout="packed", normalizer=normalizer)
    found = per_token(batch.advantages, batch.trees.loss_masks, normalizer)
    # One sequence per run, with all tokens that it trains.
    sizes, values = [], []
    for group in groups:
        runs = group.runs
        assert runs is not None
        trained = np.array([int(rollout.loss_mask.sum()) for rollout in group.rollouts])
        sizes += np.bincount(runs.of, weights=trained).astype(int).tolist()
        values += (group.rewards - group.rewards.mean()).tolist()
    expected = per_token(values, [np.array([False] + [True] * size) for size in sizes], normalizer)
    totals = [sum(found[0:2]), found[2], found[3], sum(found[4:7])]
    np.testing.assert_allclose(totals, expected, atol=1e-12, rtol=0)


def per_token(advantages: list[float], masks: list[np.ndarray], normalizer: str) -> list[float]:
    """Return the sum over each sequence's tokens of weight times advantage."""
    forests = [Forest.from_sequences([np.arange(mask.size)]) for mask in masks]
    lengths = np.array([mask.size for mask in masks])
    weights = entry_weights(
        entry_counts(forests, masks, "sum"),
        branch_length=lengths,
        branch_tree=np.arange(len(masks)),
        weighting=Weighting(normalizer=normalizer),
        sum_over_ranks=lambda values: values,
    )
    sums = [part.sum() for part in np.split(weights, np.cumsum(lengths)[:-1])]
    return [float(total * advantage) for total, advantage in zip(sums, advantages, strict=True)]


def test_branches_of_a_run_have_the_shares_of_their_trained_tokens() -> None:
    # The branches of the first run train 1 and 2 tokens.
    by_run = branch_weights([group_of([1.0, 0.0], (0, 0, 1))], "sequence_mean")
    assert by_run == pytest.approx([1 / 3 * 1.5, 2 / 3 * 1.5, 1.5])
