"""The log of calls becomes trajectories in which every sampled token is trained exactly once."""

from collections import Counter

import numpy as np
import pytest

from tests.rl.rollouts import rollout_of
from treering.rl.environments.policy_calls import Branch, Call, branches_of


def call_of(number: int, context: list[int], tokens: list[int], version: int = 0) -> Call:
    logprobs = -np.arange(1.0, len(tokens) + 1) - number
    rollout = rollout_of(
        tokens, prompt_id="q", logprobs=logprobs, policy_logprobs=2 * logprobs, versions=[version] * len(tokens)
    )
    return Call(number=number, agent="policy", context=np.array(context, np.int32), rollout=rollout)


def shown(branches: list[Branch]) -> list[tuple[list[int], list[int]]]:
    return [(branch.tokens.tolist(), branch.turns.tolist()) for branch in branches]


def test_a_chat_is_one_branch_with_the_log_probs_and_versions_of_its_calls() -> None:
    (branch,) = branches_of([call_of(0, [5, 6], [7, 8], version=3), call_of(1, [5, 6, 7, 8, 1], [9], version=4)])
    assert shown([branch]) == [([5, 6, 7, 8, 1, 9], [-1, -1, 0, 0, -1, 1])]
    assert branch.logprobs.tolist() == [0, 0, -1, -2, 0, -2]
    assert branch.policy_logprobs.tolist() == [0, 0, -2, -4, 0, -4]
    assert branch.versions.tolist() == [3, 3, 3, 3, 4, 4]
    assert branch.loss_mask.tolist() == [False, False, True, True, False, True]


def test_a_fork_trains_the_common_turn_once_or_in_each_branch() -> None:
    calls = [call_of(0, [5], [6]), call_of(1, [5, 6, 1], [7]), call_of(2, [5, 6, 2], [8])]
    assert shown(branches_of(calls)) == [([5, 6, 1, 7], [-1, 0, -1, 1]), ([5, 6, 2, 8], [-1, -1, -1, 2])]


@pytest.mark.parametrize("seed", range(8))
def test_every_call_is_a_path_and_each_of_its_tokens_is_trained_once(seed: int) -> None:
    """Random logs over two token ids, so that contexts, samples and beginnings often coincide."""
    rng = np.random.default_rng(seed)
    calls: list[Call] = []
    for number in range(30):
        context = calls[rng.integers(len(calls))].path.tolist() if calls and rng.random() < 0.8 else [0]
        context = context[: rng.integers(1, len(context) + 1)] + rng.integers(0, 2, rng.integers(0, 3)).tolist()
        calls.append(call_of(number, context, rng.integers(0, 2, rng.integers(1, 4)).tolist()))
    trained: Counter[tuple[int, int]] = Counter()
    for branch in branches_of([calls[i] for i in rng.permutation(30)]):
        for index, turn in enumerate(branch.turns.tolist()):
            if turn < 0:
                continue
            call = calls[turn]
            offset = index - call.context.size
            assert branch.tokens[: index + 1].tolist() == call.path[: index + 1].tolist()
            assert branch.logprobs[index] == call.rollout.logprobs[offset]
            trained[turn, offset] += 1
    assert trained == {(call.number, i): 1 for call in calls for i in range(call.rollout.num_tokens)}
