"""Flat specification of every objective: plain loops over sequences, no code of treering.train.

`Data` holds every value that an objective may read, different in every branch on shared tokens and NaN where nothing is
trained. `Flat` holds the stock forward's outputs for each sequence run separately.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.forests import sequence_sets
from tests.train.flat import Batch, Groups, entry_shares, normalize

PerToken = list[list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Data(Batch):
    """An optimizer batch; lists follow forests, then sequences. Nested lists have one value per token."""

    token_advantages: PerToken
    behaviour: PerToken
    ref: PerToken
    ref_sums: list[float]
    returns: PerToken
    old_values: PerToken
    pairs: list[tuple[int, int]]

    @property
    def mixed_ref(self) -> list[float | list[float]]:
        """Reference log-probs as a sum for every second branch, and one per token for the others."""
        return [self.ref_sums[i] if i % 2 else row for i, row in enumerate(self.ref)]

    def trained(self, branch: int) -> list[int]:
        """Return the indices of a branch's trained tokens."""
        return [t for t in range(1, len(self.sequences[branch])) if self.masks[branch][t]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """Outputs for each sequence run separately, one tensor per sequence with an entry per token except the first."""

    logprobs: list[Tensor]
    entropies: list[Tensor]
    values: list[Tensor]


def run_flat(model: nn.Module, data: Data, *, value_head: nn.Module, temperature: float = 1.0) -> Flat:
    """Run every sequence through the stock forward."""
    logprobs, entropies, values = [], [], []
    for sequence in data.sequences:
        ids = torch.tensor([sequence])
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]  # type: ignore[union-attr,operator]
        scores = (model.lm_head(hidden) / temperature).log_softmax(-1)  # type: ignore[union-attr,operator]
        logprobs.append(scores.gather(1, ids[0, 1:, None])[:, 0])
        entropies.append(-(scores.exp() * scores).sum(-1))
        values.append(value_head(hidden)[:, 0])
    return Flat(logprobs=logprobs, entropies=entropies, values=values)


def data_of(groups: Groups, model: nn.Module, seed: int = 0, noise: float = 0.3) -> Data:
    """Return random data whose log-probs differ from the model's by about `noise`, so that some terms are clipped."""
    generator = torch.Generator().manual_seed(seed)
    sequences = [sequence for group in groups for sequence in group]
    masks = [(torch.rand(len(s), generator=generator) < 0.75).long().tolist() for s in sequences]
    if len(masks) > 2:
        masks[seed % len(masks)] = [0] * len(masks[seed % len(masks)])

    def noisy(scale: float, centre: Sequence[Tensor] | None = None) -> PerToken:
        rows = []
        for i, s in enumerate(sequences):
            row = scale * torch.randn(len(s), generator=generator, dtype=torch.float64)
            row[1:] += 0 if centre is None else centre[i]
            rows.append(
                [v if m and t else math.nan for t, (v, m) in enumerate(zip(row.tolist(), masks[i], strict=True))]
            )
        return rows

    with torch.no_grad():
        own = [_own_logprobs(model, sequence) for sequence in sequences]
    ref = noisy(noise, own)
    first = torch.randint(0, len(sequences), (2 * len(sequences),), generator=generator).tolist()
    second = torch.randint(0, len(sequences), (2 * len(sequences),), generator=generator).tolist()
    return Data(
        groups=groups,
        masks=masks,
        advantages=torch.randn(len(sequences), generator=generator, dtype=torch.float64).tolist(),
        token_advantages=noisy(1.0),
        old_logprobs=noisy(noise, own),
        behaviour=noisy(noise, own),
        ref=ref,
        ref_sums=[sum(v for v in row if not math.isnan(v)) - 0.5 for row in ref],
        returns=noisy(1.0),
        old_values=noisy(0.5),
        pairs=[(c, r) for c, r in zip(first, second, strict=True) if c != r],
    )


@st.composite
def datas(draw: st.DrawFn, model: nn.Module, max_sequences: int = 4, max_extra: int = 6) -> Data:
    """Draw data over two forests: one that shares much, and one of any shape, single tokens included."""
    seed = draw(st.integers(0, 1000))
    return data_of([grown(seed), draw(sequence_sets(max_sequences, max_extra))], model, seed=seed)


def grown(seed: int) -> list[list[int]]:
    """Return five sequences: a random one, two that fork from earlier ones, a duplicate and a prefix."""
    rng = random.Random(seed)
    sequences = [[rng.randrange(4) for _ in range(rng.randrange(3, 8))]]
    while len(sequences) < 3:
        base = rng.choice(sequences)
        sequences.append(base[: rng.randrange(1, len(base) + 1)] + [rng.randrange(4) for _ in range(3)])
    sequences += [rng.choice(sequences), rng.choice(sequences)[:-1]]
    rng.shuffle(sequences)
    return sequences


def _own_logprobs(model: nn.Module, sequence: list[int]) -> Tensor:
    ids = torch.tensor([sequence])
    scores = model(input_ids=ids, use_cache=False).logits[0, :-1].double().log_softmax(-1)
    return scores.gather(1, ids[0, 1:, None])[:, 0]


TokenLoss = Callable[[int, int], Tensor]
"""(branch, index of a token in it) -> its term."""


def over_tokens(data: Data, term: TokenLoss, *, normalizer: str, shared: str = "sum", divisor: float = 1.0) -> Tensor:
    """Reduce the terms of trained tokens to the loss."""
    zero = torch.zeros((), dtype=torch.float64)
    terms = [
        [term(i, t) if data.masks[i][t] else zero for t in range(1, len(sequence))]
        for i, sequence in enumerate(data.sequences)
    ]
    shares = entry_shares(data, shared)
    if normalizer == "sequence_sum":
        return sum_of(s * x for row in zip(shares, terms, strict=True) for s, x in zip(*row, strict=True)) / len(terms)
    return normalize(terms, shares, data.trees, normalizer, divisor)


def over_sequences(data: Data, term: Callable[[int], Tensor]) -> Tensor:
    """Return the mean over sequences of one term each; a sequence without trained tokens counts as 0."""
    return sum_of(term(i) for i in range(len(data.masks)) if data.trained(i)) / len(data.masks)


def sum_of(terms: Any) -> Tensor:
    return sum(terms, torch.zeros((), dtype=torch.float64))


def sequence_log_ratio(data: Data, flat: Flat, i: int) -> Tensor:
    return sum_of(flat.logprobs[i][t - 1] - data.old_logprobs[i][t] for t in data.trained(i))
