"""Shared parts of the sampling tests: the distribution by definition, every sampler, and comparisons."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from treering.arrays import Int32Array, Int64Array
from treering.engine.sampling.noise import row_key
from treering.engine.sampling.sample_cpu import verify
from treering.engine.sampling.torch_sampling import Repetitions, sample

Floats = NDArray[np.floating]

NUM_ROLLOUTS = 30_000
# For truly random noise each statistical bound fails with probability 1e-6; the noise is fixed, so tests never flake.
LOG_ODDS = math.log(1e6)


@dataclass(frozen=True)
class Rule:
    """Sampling parameters of all rows of a batch."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    penalty: float = 1.0
    context: tuple[int, ...] = ()
    """Tokens of every row's context, to which the penalty applies."""

    @property
    def log_min_p(self) -> float:
        return math.log(self.min_p) if self.min_p else -math.inf


@dataclass(frozen=True)
class Drawn:
    """One sampled token per row."""

    tokens: Int64Array
    logprobs: Floats
    policy_logprobs: Floats


@dataclass(frozen=True)
class Verified:
    code: int
    tokens: Int32Array
    logprobs: Floats
    policy_logprobs: Floats
    num: Int64Array
    path: Int32Array


def expected_probabilities(logits: Floats, rule: Rule) -> Floats:
    """Compute the distribution of one row from a sorted list and exact sums."""
    logits = penalised(logits, rule)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: rule.top_k or None]
    weights = {i: math.exp((float(logits[i]) - float(max(logits))) / rule.temperature) for i in order}
    total = math.fsum(weights.values())
    kept: list[int] = []
    for i in order:
        # Rounding may push a mass that equals top_p in real numbers below it; see MASS_SLACK.
        if kept and rule.top_p < 1 and math.fsum(weights[j] for j in kept) / total >= rule.top_p - 1e-12:
            break
        kept.append(i)
    kept = [i for i in kept if (float(logits[i]) - float(max(logits))) / rule.temperature >= rule.log_min_p]
    mass = math.fsum(weights[i] for i in kept)
    return np.array([weights[i] / mass if i in kept else 0.0 for i in range(len(logits))])


def penalised(logits: Floats, rule: Rule) -> list[float]:
    """Penalise as Hugging Face does: divide a repeated token's logit if positive, multiply it if negative."""
    return [
        float(logit) if i not in rule.context else float(logit) * (rule.penalty if logit < 0 else 1 / rule.penalty)
        for i, logit in enumerate(logits)
    ]


def draw_torch(logits: Floats, keys: Int64Array, positions: Int64Array, rule: Rule) -> Drawn:
    num = len(keys)
    sampled = sample(
        torch.from_numpy(logits),
        keys=torch.from_numpy(keys),
        positions=torch.from_numpy(positions),
        temperature=torch.full((num,), rule.temperature, dtype=torch.float64),
        top_k=torch.full((num,), rule.top_k, dtype=torch.int64),
        top_p=torch.full((num,), rule.top_p, dtype=torch.float64),
        log_min_p=torch.full((num,), rule.log_min_p, dtype=torch.float64),
        repetitions=repetitions_of(rule, num),
    )
    return Drawn(sampled.tokens.numpy(), sampled.logprobs.numpy(), sampled.policy_logprobs.numpy())


def repetitions_of(rule: Rule, num: int) -> Repetitions | None:
    if rule.penalty == 1 or not rule.context:
        return None
    rows = torch.arange(num).repeat_interleave(len(rule.context))
    return Repetitions(
        rows, torch.tensor(rule.context).repeat(num), torch.full((rows.numel(),), rule.penalty, dtype=torch.float64)
    )


def _contexts(rule: Rule, positions: Int64Array) -> Int32Array:
    length = int(positions.max()) + 1 if rule.penalty != 1 else 1
    return np.tile(np.resize(np.array(rule.context or (0,), np.int32), length), (positions.size, 1))


def draw_numba(logits: Floats, keys: Int64Array, positions: Int64Array, rule: Rule) -> Drawn:
    done = verified(logits, np.zeros((len(keys), 0), np.int32), keys, positions, rule)
    assert done.code == -1
    assert done.num.tolist() == [1] * len(keys)
    return Drawn(done.tokens[:, 0].astype(np.int64), done.logprobs[:, 0], done.policy_logprobs[:, 0])


def verified(
    logits: Floats,
    drafts: Int32Array,
    keys: Int64Array,
    positions: Int64Array,
    rule: Rule,
    parents: Int32Array | None = None,
    contexts: Int32Array | None = None,
) -> Verified:
    """Call `verify` for B rollouts with equally many drafts [B, J], chains or trees, and logits [B * (J + 1), V].

    Each context is the first `positions` tokens of its row of `contexts`, by default repetitions of the rule's context.
    """
    num, num_drafts = drafts.shape
    if parents is None:
        parents = np.tile(np.arange(-1, num_drafts - 1, dtype=np.int32), (num, 1))
    path = np.full((num, num_drafts + 1), -9, np.int32)
    tokens = np.full((num, num_drafts + 1), -9, np.int32)
    logprobs, policy_logprobs = np.full((2, num, num_drafts + 1), np.nan)
    num_out = np.full(num, -9)
    code = verify(
        logits,
        np.arange(num) * (num_drafts + 1),
        np.full(num, num_drafts),
        drafts.ravel(),
        parents.ravel(),
        np.arange(num + 1) * num_drafts,
        keys,
        positions,
        np.full(num, rule.temperature),
        np.full(num, rule.top_k),
        np.full(num, rule.top_p),
        np.full(num, rule.log_min_p),
        np.full(num, rule.penalty),
        _contexts(rule, positions) if contexts is None else contexts,
        np.arange(num),
        tokens,
        logprobs,
        policy_logprobs,
        num_out,
        path,
    )
    return Verified(code, tokens, logprobs, policy_logprobs, num_out, path)


DRAW: dict[str, Callable[[Floats, Int64Array, Int64Array, Rule], Drawn]] = {"torch": draw_torch, "numba": draw_numba}


def rollout_keys(num: int, draw: int = 0) -> Int64Array:
    return np.array([row_key(11, f"prompt {i // 8}", draw, i % 8) for i in range(num)])


def assert_distribution(outcomes: Int64Array, probabilities: Floats) -> None:
    """Test with Pearson's chi-square and the upper-tail bound of Laurent and Massart."""
    counts = np.bincount(outcomes, minlength=probabilities.size)
    possible = probabilities > 0
    assert not counts[~possible].any()
    expected = outcomes.size * probabilities[possible]
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    degrees = possible.sum() - 1
    assert statistic <= degrees + 2 * math.sqrt(degrees * LOG_ODDS) + 2 * LOG_ODDS
