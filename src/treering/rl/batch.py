"""Turn groups of rollouts into a training batch: forests, masks, advantages and log-probs.

Shapes: K branches (rollouts of trained groups, groups in order, then rollouts).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from treering.config.steps import Layout
from treering.data.routed_experts import as_routes
from treering.engine.protocol import Logprobs
from treering.errors import ConfigError
from treering.ranks.group import RankGroup
from treering.rl.advantages import BranchAdvantages, Estimator, branch_advantages, branch_weights
from treering.rl.collect import Group, whose
from treering.train.loop.batches import StepBatch, TrainingTask, make_batch
from treering.train.loop.compute import share_batch
from treering.train.objective import Normalizer
from treering.types import LossMask, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RlBatch:
    """Data of one update.

    Groups with equal rewards are dropped: their advantages are zero, so they add nothing to the gradient. They do not
    count in the denominators either, so the size of an update does not depend on how many prompts are too easy or too
    hard (with `normalizer="constant"` this makes no difference).
    """

    trees: StepBatch
    """Prompt and rollout as one sequence; only sampled tokens are trained."""
    advantages: list[float | NDArray[np.float64]]
    """K numbers, or arrays with an entry per token; weighted so that runs count alike (`branch_weights`)."""
    group_advantages: list[BranchAdvantages]
    """Unweighted advantages of each group of the step, trained or not."""
    old_logprobs: list[Logprobs]
    """K arrays, float64 [T] each: log-probs after temperature only; 0 at tokens that were not sampled."""
    behaviour_logprobs: list[Logprobs]
    """K arrays, float64 [T] each: log-probs of the distribution sampled from; 0 at tokens that were not sampled."""
    num_zero_variance: int
    """Groups whose rewards are all equal."""
    num_empty_groups: int
    """Groups without any rollout."""
    trained: tuple[Group, ...] = ()
    """Groups that the branches belong to."""
    ref_logprobs: list[Logprobs] | None = None
    """K arrays, float64 [T] each: log-probs of the reference; None without a KL in the loss."""


def make_rl_batch(
    groups: Sequence[Group],
    *,
    estimator: Estimator,
    layout: Layout,
    keeps_equal: bool = False,
    normalizer: Normalizer = "token_mean",
) -> RlBatch:
    """Make the batch of a step's groups; with `keeps_equal`, groups with equal rewards are trained too.

    `normalizer` is the loss's, and decides the weights of runs with several branches.

    Example: of groups with rewards [1, 0], [1, 1] and [], the first is trained; one has zero variance, one is empty.
    """
    advantages = [branch_advantages(group, estimator) for group in groups]
    is_zero = [not any(np.any(values) for values in of_group) for of_group in advantages]
    is_trained = [
        not zero or (keeps_equal and len(group.rollouts) > 0) for zero, group in zip(is_zero, groups, strict=True)
    ]
    trained = list(compress(groups, is_trained))
    num_empty = sum(not group.rollouts for group in groups)
    rollouts = [(group.prompt.tokens, rollout) for group in trained for rollout in group.rollouts]
    weights = branch_weights(trained, normalizer)
    of_branches = [value for values in compress(advantages, is_trained) for value in values]
    return RlBatch(
        trees=make_batch([_as_task(group) for group in trained], layout),
        advantages=[
            value * weight if isinstance(value, np.ndarray) else float(value) * weight
            for value, weight in zip(of_branches, weights, strict=True)
        ],
        group_advantages=advantages,
        old_logprobs=[_after_prompt(prompt, rollout.policy_logprobs) for prompt, rollout in rollouts],
        behaviour_logprobs=[_after_prompt(prompt, rollout.logprobs) for prompt, rollout in rollouts],
        num_zero_variance=sum(is_zero) - num_empty,
        num_empty_groups=num_empty,
        trained=tuple(trained),
    )


def share_of(batch: RlBatch, rank_group: RankGroup) -> RlBatch:
    """Return this rank's branches of a step, split by cost; values about groups stay those of the whole step."""
    share = share_batch(batch.trees, rank_group)
    return replace(
        batch,
        trees=share.batch,
        advantages=[batch.advantages[i] for i in share.branches],
        old_logprobs=[batch.old_logprobs[i] for i in share.branches],
        behaviour_logprobs=[batch.behaviour_logprobs[i] for i in share.branches],
    )


def with_penalties(groups: Sequence[Group], penalties: Sequence[float]) -> list[Group]:
    """Return the groups with each rollout's penalty subtracted from its reward; penalties have groups in order.

    A run's reward loses the penalties of all its branches.
    """
    left = iter(penalties)
    return [_penalised(group, np.array([next(left) for _ in group.rollouts])) for group in groups]


def overlong_penalties(groups: Sequence[Group], *, max_tokens: int, buffer: int) -> list[float]:
    """Return DAPO's length penalty of each rollout, groups in order (arXiv 2503.14476, equation 13).

    Raises:
        ConfigError: the rollouts are episodes, whose branches are contexts rather than responses.

    Example: with max_tokens=10, buffer=4, rollouts of 6, 7 and 10 tokens lose 0, 0.25 and 1.
    """
    if any(group.runs is not None for group in groups):
        raise ConfigError(
            f"overlong_buffer needs tasks whose rollout is one response, got {buffer} with episodes; set None, and "
            "let the environment's reward count turns"
        )
    lengths = [rollout.num_tokens for group in groups for rollout in group.rollouts]
    return [max(0, length - (max_tokens - buffer)) / buffer for length in lengths]


def _penalised(group: Group, penalties: NDArray[np.float64]) -> Group:
    of = np.arange(penalties.size) if group.runs is None else np.array(group.runs.of, np.int64)
    sums = np.bincount(of, weights=penalties)[of].tolist()
    rollouts = zip(group.rollouts, sums, strict=True)
    return replace(
        group, rollouts=tuple(replace(each, reward=(each.reward or 0.0) - total) for each, total in rollouts)
    )


def _as_task(group: Group) -> TrainingTask:
    prompt = group.prompt.tokens
    routes = [
        None
        if rollout.routed_experts is None
        else as_routes(rollout.routed_experts, prompt.size + rollout.num_tokens, f"{whose(rollout.key)}routed_experts")
        for rollout in group.rollouts
    ]
    return TrainingTask(
        task_id=group.prompt.prompt_id,
        sequences=tuple(np.concatenate([prompt, rollout.tokens]) for rollout in group.rollouts),
        loss_masks=tuple(np.concatenate([np.zeros(prompt.size, bool), r.loss_mask]) for r in group.rollouts),
        images=(group.prompt.images,) * len(group.rollouts) if group.prompt.images else (),
        routed_experts=tuple(routes),
    )


def _after_prompt(prompt: TokenIds, values: Logprobs | LossMask) -> Logprobs:
    return np.concatenate([np.zeros(prompt.size), values])
