"""The cost of a forest in time, and the trees that sharing would make slower."""

import math
from dataclasses import asdict, dataclass

from treering.errors import ConfigError
from treering.tree.forest import Forest
from treering.tree.stats import flat_work, visible_pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of forward and backward, without the constant cost of a micro-batch.

    Attributes:
        token_s: seconds per distinct token.
        pair_s: seconds per (query, visible key) pair.
        segment_s: seconds per segment.

    Example:
        >>> costs = CostModel(token_s=1e-3, pair_s=1e-6, segment_s=1e-2)
        >>> round(costs.of(Forest.from_sequences([[5, 6, 7], [5, 6, 8]])), 6)  # 4 tokens, 9 pairs, 3 segments
        0.034009
    """

    token_s: float
    pair_s: float
    segment_s: float

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if type(value) not in (int, float) or not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} of a cost model must be a finite number >= 0, got {value!r}; fit it again")
        if self.token_s == self.pair_s == self.segment_s == 0:
            raise ConfigError("a cost model needs one cost above 0, got three zeros; fit it again")

    def cost(self, num_tokens: int, num_pairs: int, num_segments: int) -> float:
        """Seconds of that many tokens, visible pairs and segments."""
        return self.token_s * num_tokens + self.pair_s * num_pairs + self.segment_s * num_segments

    def of(self, forest: Forest) -> float:
        """Seconds of computing each distinct token of a forest once."""
        return self.cost(forest.num_tokens, visible_pairs(forest), forest.num_segments)

    def of_branches(self, forest: Forest) -> float:
        """Seconds of computing every branch of a forest as a separate sequence."""
        flat = flat_work(forest.branch_length)
        return self.cost(flat.num_tokens, flat.num_pairs, forest.num_branches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unshared:
    """A tree that is computed as separate chains, with the reason.

    Attributes:
        tree: its number among the trees of the batch: forests in order, then their trees.
        num_tokens: distinct tokens of the tree.
        num_chain_tokens: tokens of its branches.
        tree_s: estimated seconds as a tree.
        chains_s: estimated seconds as separate chains.
    """

    tree: int
    num_tokens: int
    num_chain_tokens: int
    tree_s: float
    chains_s: float

    def in_words(self) -> str:
        """One sentence for a log.

        Example: "tree 3 is computed as separate chains (640 tokens, not 512): 0.021 s instead of 0.034 s, estimated".
        """
        return (
            f"tree {self.tree} is computed as separate chains ({self.num_chain_tokens:,} tokens, not "
            f"{self.num_tokens:,}): {self.chains_s:.2g} s instead of {self.tree_s:.2g} s, estimated"
        )


def why_unshared(number: int, tree: Forest, costs: CostModel) -> Unshared | None:
    """The record of a tree that costs more than its branches one by one; None if it does not."""
    tree_s, chains_s = costs.of(tree), costs.of_branches(tree)
    if tree_s <= chains_s:
        return None
    return Unshared(
        tree=number,
        num_tokens=tree.num_tokens,
        num_chain_tokens=tree.num_branch_tokens,
        tree_s=tree_s,
        chains_s=chains_s,
    )


def chains_of(tree: Forest) -> list[Forest]:
    """Each branch of a tree as a separate tree, in order."""
    return [tree.take_branches([branch]) for branch in range(tree.num_branches)]
