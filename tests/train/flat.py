"""Flat specification of a training step: every branch separately, plain formulas, no code of treering.train."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.forests import sequence_sets
from tests.models import flat_logprobs

Groups = list[list[list[int]]]  # sequences by forest, then tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """An optimizer batch with all values that an objective may read; lists are ordered by forest, then sequence."""

    groups: Groups
    masks: list[list[int]]
    advantages: list[float]
    old_logprobs: list[list[float]]

    @property
    def sequences(self) -> list[list[int]]:
        return [sequence for group in self.groups for sequence in group]

    @property
    def prefixes(self) -> list[list[tuple[object, ...]]]:
        """Identity of each edge: forest number and the tokens up to it. Branches share an edge iff these agree."""
        return [
            [(g, *sequence[: t + 1]) for t in range(len(sequence))]
            for g, group in enumerate(self.groups)
            for sequence in group
        ]

    @property
    def trees(self) -> list[tuple[int, int]]:
        """Tree of each branch: forest number and first token."""
        return [(g, sequence[0]) for g, group in enumerate(self.groups) for sequence in group]


@st.composite
def batches(draw: st.DrawFn, max_groups: int = 2, max_sequences: int = 4, max_extra: int = 6) -> Batch:
    """Draw batches whose shared tokens have different masks, advantages and old log-probs in different branches."""
    groups = draw(st.lists(sequence_sets(max_sequences, max_extra), min_size=1, max_size=max_groups))
    sequences = [sequence for group in groups for sequence in group]
    old = st.floats(-6.0, -0.05)
    return Batch(
        groups=groups,
        masks=[draw(st.lists(st.integers(0, 1), min_size=len(s), max_size=len(s))) for s in sequences],
        advantages=[draw(st.sampled_from([-1.5, -0.5, 0.0, 1.0, 2.0])) for _ in sequences],
        old_logprobs=[draw(st.lists(old, min_size=len(s), max_size=len(s))) for s in sequences],
    )


def flat_loss(
    model: nn.Module,
    batch: Batch,
    *,
    kind: str,
    normalizer: str,
    shared: str = "sum",
    clip: tuple[float, float] = (0.2, 0.2),
    divisor: float = 1.0,
    temperature: float = 1.0,
) -> Tensor:
    """Compute the loss of the batch with every sequence run separately."""
    terms: list[list[Tensor]] = []
    for sequence, advantage, old in zip(batch.sequences, batch.advantages, batch.old_logprobs, strict=True):
        logprobs = flat_logprobs(model, sequence, temperature)[0] if len(sequence) > 1 else torch.zeros(0)
        row = []
        for t, logprob in enumerate(logprobs, start=1):
            previous = torch.tensor(old[t], dtype=logprob.dtype)
            row.append(-logprob if kind == "sft" else surrogate(torch.exp(logprob - previous), advantage, clip))
        terms.append(row)
    shares = entry_shares(batch, shared)
    return normalize(terms, shares, batch.trees, normalizer, divisor)


def surrogate(ratio: Tensor, advantage: float, clip: tuple[float, float]) -> Tensor:
    bounded = torch.clamp(ratio, 1 - clip[0], 1 + clip[1])
    return -torch.min(ratio * advantage, bounded * advantage)


def entry_shares(batch: Batch, shared: str) -> list[list[float]]:
    """Count each token after the first: its mask, divided by the branches that train it under `once`."""
    trained = [mask[1:] for mask in batch.masks]
    if shared == "sum":
        return [[float(m) for m in mask] for mask in trained]
    trainers: dict[tuple[object, ...], int] = {}
    for prefixes, mask in zip(batch.prefixes, trained, strict=True):
        for prefix, m in zip(prefixes[1:], mask, strict=True):
            trainers[prefix] = trainers.get(prefix, 0) + m
    return [
        [m / trainers[prefix] if m else 0.0 for prefix, m in zip(prefixes[1:], mask, strict=True)]
        for prefixes, mask in zip(batch.prefixes, trained, strict=True)
    ]


def normalize(
    terms: list[list[Tensor]],
    shares: list[list[float]],
    trees: Sequence[tuple[int, int]],
    normalizer: str,
    divisor: float,
) -> Tensor:
    zero = torch.zeros((), dtype=torch.float64)
    sums = [sum((s * t for s, t in zip(*row, strict=True)), zero) for row in zip(shares, terms, strict=True)]
    counts = [sum(row) for row in shares]
    if normalizer == "sum":
        return sum(sums, zero)
    if normalizer == "constant":
        return sum(sums, zero) / divisor
    if normalizer == "token_mean":
        return sum(sums, zero) / max(sum(counts), 1e-300)
    if normalizer == "sequence_mean":
        return sum((s / c for s, c in zip(sums, counts, strict=True) if c), zero) / len(sums)
    assert normalizer == "tree_mean"
    means = [
        sum((s for s, t in zip(sums, trees, strict=True) if t == tree), zero) / trees.count(tree) for tree in set(trees)
    ]
    return sum(means, zero) / len(means)
