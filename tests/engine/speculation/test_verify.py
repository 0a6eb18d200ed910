"""Drafts change how many tokens a step appends, and nothing else (law 5)."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.engine.sampling.sampling_cases import (
    NUM_ROLLOUTS,
    Drawn,
    Rule,
    assert_distribution,
    expected_probabilities,
    rollout_keys,
    verified,
)
from treering.arrays import Int64Array

# Next-token logits of a toy language of three tokens; rollouts start after token 0.
CHAIN = np.array([[1.0, 0.2, -0.5], [-0.4, 0.9, 0.3], [0.0, 0.0, 1.2]])
VOCAB = 3


def roll(drafts_of: Callable[[Int64Array, np.random.Generator], Int64Array] | None, rule: Rule, num: int) -> Drawn:
    """Return the first three tokens of rollouts of the toy language and their log-probs, with or without two drafts."""
    keys, rng = rollout_keys(num), np.random.default_rng(5)
    tokens, last = np.full((num, 6), -1), np.zeros(num, np.int64)
    logprobs, policy_logprobs = np.zeros((2, num, 6))
    done = np.zeros(num, np.int64)
    while done.min() < 3:
        rows = np.flatnonzero(done < 3)
        drafts = np.zeros((rows.size, 0), np.int64) if drafts_of is None else drafts_of(last[rows], rng)
        logits = CHAIN[np.column_stack([last[rows], drafts])].reshape(-1, VOCAB)
        step = verified(logits, drafts.astype(np.int32), keys[rows], 100 + done[rows], rule)
        assert step.code == -1
        for j in range(drafts.shape[1] + 1):
            at = rows[step.num > j]
            tokens[at, done[at] + j] = step.tokens[step.num > j, j]
            logprobs[at, done[at] + j] = step.logprobs[step.num > j, j]
            policy_logprobs[at, done[at] + j] = step.policy_logprobs[step.num > j, j]
        last[rows] = step.tokens[np.arange(rows.size), step.num - 1]
        done[rows] += step.num
    return Drawn(tokens[:, :3], logprobs[:, :3], policy_logprobs[:, :3])


def likeliest(last: Int64Array, rng: np.random.Generator) -> Int64Array:
    first = CHAIN[last].argmax(1)
    return np.column_stack([first, CHAIN[first].argmax(1)])


def unlikeliest(last: Int64Array, rng: np.random.Generator) -> Int64Array:
    first = CHAIN[last].argmin(1)
    return np.column_stack([first, CHAIN[first].argmin(1)])


def random_drafts(last: Int64Array, rng: np.random.Generator) -> Int64Array:
    return rng.integers(0, VOCAB, (last.size, 2))


CHAIN_RULES = [Rule(), Rule(temperature=0.6), Rule(top_k=2), Rule(temperature=1.4, top_p=0.8), Rule(min_p=0.5)]


@pytest.mark.parametrize("rule", CHAIN_RULES, ids=str)
@pytest.mark.parametrize("drafts_of", [None, likeliest, unlikeliest, random_drafts])
def test_rollouts_have_the_joint_distribution_of_the_language_whatever_is_drafted(
    rule: Rule, drafts_of: Callable[[Int64Array, np.random.Generator], Int64Array] | None
) -> None:
    step = np.stack([expected_probabilities(row, rule) for row in CHAIN])
    joint = (step[0][:, None, None] * step[:, :, None] * step[None, :, :]).ravel()
    outcomes = roll(drafts_of, rule, NUM_ROLLOUTS).tokens @ np.array([9, 3, 1])
    assert_distribution(outcomes, joint)


@pytest.mark.parametrize("rule", CHAIN_RULES, ids=str)
@pytest.mark.parametrize("drafts_of", [likeliest, unlikeliest, random_drafts])
def test_drafts_leave_tokens_and_logprobs_bitwise_unchanged(
    rule: Rule, drafts_of: Callable[[Int64Array, np.random.Generator], Int64Array]
) -> None:
    plain, drafted = roll(None, rule, 500), roll(drafts_of, rule, 500)
    np.testing.assert_array_equal(drafted.tokens, plain.tokens)
    np.testing.assert_array_equal(drafted.logprobs, plain.logprobs)
    np.testing.assert_array_equal(drafted.policy_logprobs, plain.policy_logprobs)


@pytest.mark.parametrize(
    ("drawn", "tokens", "path"),
    [
        ([2, 0, 0, 0, 1], [2, 1], [3, -1]),
        ([1, 2, 0, 0, 0], [1, 2, 0], [0, 1, -1]),
        ([1, 0, 0, 2, 0], [1, 0, 2], [0, 2, -1]),
        ([0, 1, 1, 1, 1], [0], [-1]),
    ],
)
def test_a_tree_is_walked_along_the_sampled_tokens_only(drawn: list[int], tokens: list[int], path: list[int]) -> None:
    """Draft 1 with the children 2 and 0, and draft 2. Logits row 0 follows the context, row 1 + j draft j."""
    logits = 1e6 * np.eye(VOCAB)[drawn]
    on_path = [0, *(1 + number for number in path if number >= 0)]
    off_path = [row for row in range(5) if row not in on_path]
    logits[off_path] = np.nan
    drafts, parents = np.array([[1, 2, 0, 2]], np.int32), np.array([[-1, 0, 0, -1]], np.int32)
    done = verified(logits, drafts, np.array([5]), np.array([0]), Rule(), parents)
    assert (done.code, done.num.tolist()) == (-1, [len(tokens)])
    assert done.tokens[0, : len(tokens)].tolist() == tokens
    assert done.path[0, : len(path)].tolist() == path


@pytest.mark.parametrize("rule", CHAIN_RULES, ids=str)
def test_every_branch_samples_with_the_noise_of_its_depth(rule: Rule) -> None:
    """Draft all three tokens, and all three again after each, so that two are always accepted."""
    num = 200
    keys, drafts = rollout_keys(num), np.tile(np.array([0, 1, 2] * 4, np.int32), (num, 1))
    parents = np.tile(np.array([-1, -1, -1, 0, 0, 0, 1, 1, 1, 2, 2, 2], np.int32), (num, 1))
    logits = np.tile(CHAIN[[0, *drafts[0]]], (num, 1))
    done = verified(logits, drafts, keys, np.full(num, 100), rule, parents)
    plain = roll(None, rule, num)
    assert done.num.tolist() == [3] * num
    np.testing.assert_array_equal(done.tokens[:, :3], plain.tokens)
    np.testing.assert_array_equal(done.logprobs[:, :3], plain.logprobs)
