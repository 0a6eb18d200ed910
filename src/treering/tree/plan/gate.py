"""The gate: trees whose branches would be faster one by one are not computed as trees.

Only time and memory depend on this decision; the gradient does not.
"""

from dataclasses import dataclass

from treering.tree.forest import Forest
from treering.tree.plan.costs import CostModel


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
