"""Batches spread over ranks, with masks, advantages and objectives that differ from branch to branch."""

from dataclasses import dataclass

import numpy as np

from tests.models import build_float64
from treering.objectives import Objective, dapo, distill, gspo, sft
from treering.tree.forest import Forest

Groups = list[list[list[int]]]  # forests, sequences, tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBatch:
    """The groups of every rank and what they are trained with."""

    shares: list[Groups]
    objective: str = "dapo"
    max_tokens: int | None = None
    untrained: tuple[int, ...] = ()
    """Ranks without a trained token."""

    def forests(self, rank: int | None) -> list[Forest]:
        return [Forest.from_sequences(group) for group in self._groups(rank)]

    def make_objective(self, rank: int | None) -> Objective:
        """Return the objective of one rank's branches, or of all."""
        masks, advantages, old = [], [], []
        for owner, groups in enumerate(self.shares):
            for number, sequence in enumerate(s for group in groups for s in group):
                random = np.random.default_rng([owner, number])
                mask = random.integers(0, 2, len(sequence)) * (owner not in self.untrained)
                advantage, past = random.normal(), np.minimum(random.normal(-3, 1, len(sequence)), 0)
                if rank in (None, owner):
                    masks.append(mask)
                    advantages.append(advantage)
                    old.append(past)
        if self.objective == "sft":
            return sft(masks)
        if self.objective == "distill":
            # Each rank holds the whole teacher.
            return distill(build_float64(seed=1), "jsd", loss_masks=masks)
        return {"dapo": dapo, "gspo": gspo}[self.objective](advantages, masks, old)

    def _groups(self, rank: int | None) -> Groups:
        return [group for owner, groups in enumerate(self.shares) if rank in (None, owner) for group in groups]


def tree(seed: int, *, num_branches: int = 3, depth: int = 3) -> list[list[int]]:
    """Return sequences with a common start; trees of all seeds have one shape."""
    random = np.random.default_rng(seed)
    prefix = random.integers(0, 32, depth).tolist()
    # Each branch has its own first token, so that no two merge.
    return [[*prefix, branch, *random.integers(0, 32, depth - 1).tolist()] for branch in range(num_branches)]


def batches(num_ranks: int) -> dict[str, RankBatch]:
    """Return batches that ranks run in step, and batches with uneven passes, whose names begin with "uneven"."""
    others = range(1, num_ranks)
    even = [[tree(10 * rank), tree(10 * rank + 1)] for rank in range(num_ranks)]
    big = [[tree(rank, num_branches=4, depth=5)] for rank in range(num_ranks)]
    skewed = [[tree(i) for i in range(5)], *([tree(9 + r)] for r in others)]
    return {
        "even": RankBatch(shares=even),
        "distilled": RankBatch(shares=skewed, max_tokens=14, objective="distill"),
        "micro-batches": RankBatch(shares=even, max_tokens=14, objective="sft"),
        "skewed": RankBatch(shares=skewed, max_tokens=14),
        "empty": RankBatch(shares=[even[0], *([[]] * (num_ranks - 1))], max_tokens=14),
        "untrained": RankBatch(shares=even, untrained=(num_ranks - 1,), max_tokens=14),
        "gspo": RankBatch(shares=even, objective="gspo"),
        "partitions": RankBatch(shares=big, max_tokens=7),
        "gspo in partitions": RankBatch(shares=big, max_tokens=7, objective="gspo"),
        "uneven partitions": RankBatch(shares=[big[0], *([tree(9 + rank)] for rank in others)], max_tokens=9),
        "uneven gspo": RankBatch(
            shares=[[*big[0], tree(50)], [tree(51)], *([[]] * (num_ranks - 2))], max_tokens=9, objective="gspo"
        ),
    }
