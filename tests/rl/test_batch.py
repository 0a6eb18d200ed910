"""The batch of an update: its groups, and the alignment of per-branch values with tokens."""

import numpy as np
import pytest

from tests.rl.rollouts import rollout_of
from treering.engine.protocol import Rollout
from treering.rl.batch import make_rl_batch
from treering.rl.collect import Group
from treering.rl.tasks.task import Prompt


def rollout(prompt_id: str, sample: int, reward: float, tokens: list[int]) -> Rollout:
    """Return a rollout whose log-probs encode prompt, sample and position; its second token is an observation."""
    size = len(tokens)
    logprobs = -np.arange(1.0, size + 1)
    return rollout_of(
        tokens,
        prompt_id=prompt_id,
        sample=sample,
        logprobs=logprobs,
        policy_logprobs=logprobs / 2 - sample,
        loss_mask=np.arange(size) != 1,
        reward=reward,
    )


def group(prompt_id: str, prompt: list[int], *rollouts: tuple[float, list[int]]) -> Group:
    made = tuple(rollout(prompt_id, i, reward, tokens) for i, (reward, tokens) in enumerate(rollouts))
    return Group(prompt=Prompt(prompt_id=prompt_id, tokens=np.array(prompt, np.int32)), rollouts=made)


GROUPS = [
    group("equal", [1, 2], (0.5, [3]), (0.5, [4])),
    group("a", [1, 2], (1.0, [3, 4, 5]), (0.0, [3, 4])),
    group("none", [9]),
    group("one", [9], (1.0, [8])),
    group("b", [6], (2.0, [7]), (0.0, [7]), (1.0, [5, 7])),
]


@pytest.mark.parametrize(("layout", "sizes"), [("tree", [5, 4]), ("joined", [9]), ("packed", [5, 4, 2, 2, 3])])
def test_groups_that_differ_in_reward_are_trained_in_either_layout(layout: str, sizes: list[int]) -> None:
    batch = make_rl_batch(GROUPS, estimator="dr_grpo", layout=layout)  # type: ignore[arg-type]
    forests = batch.trees.forests
    branches = [forest.tokens[forest.path(i)].tolist() for forest in forests for i in range(forest.num_branches)]
    assert branches == [[1, 2, 3, 4, 5], [1, 2, 3, 4], [6, 7], [6, 7], [6, 5, 7]]
    assert [forest.num_tokens for forest in forests] == sizes
    assert batch.trees.num_tasks == 2
    assert batch.advantages == [0.5, -0.5, 1.0, -1.0, 0.0]
    assert (batch.num_zero_variance, batch.num_empty_groups) == (2, 1)
    assert [mask.astype(int).tolist() for mask in batch.trees.loss_masks] == [
        [0, 0, 1, 0, 1],
        [0, 0, 1, 0],
        [0, 1],
        [0, 1],
        [0, 1, 0],
    ]


def test_log_probs_follow_zeros_for_the_prompt() -> None:
    batch = make_rl_batch(GROUPS, estimator="grpo", layout="tree")
    assert batch.behaviour_logprobs[0].tolist() == [0, 0, -1, -2, -3]
    assert batch.old_logprobs[1].tolist() == [0, 0, -1.5, -2]
    assert batch.old_logprobs[4].tolist() == [0, -2.5, -3]
