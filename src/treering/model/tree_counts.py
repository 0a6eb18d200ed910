"""What the calls of a patched model computed."""

from dataclasses import dataclass

from treering.tree.forest import Forest


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeCounts:
    """What patched calls computed since the counts were last taken.

    Example: two rows of 3 tokens that share 2 are 6 flat tokens and 4 computed ones.
    """

    num_calls: int = 0
    """Calls that ran on a forest."""
    num_flat_tokens: int = 0
    """Real tokens of their batches."""
    num_tokens: int = 0
    """Distinct ones, which were computed."""

    @property
    def token_ratio(self) -> float:
        """Flat tokens per computed token, 1.0 without calls: the bound of the speedup by tokens."""
        return self.num_flat_tokens / self.num_tokens if self.num_tokens else 1.0

    def with_call(self, forest: Forest) -> "TreeCounts":
        """These counts and a call on the forest."""
        return TreeCounts(
            num_calls=self.num_calls + 1,
            num_flat_tokens=self.num_flat_tokens + forest.num_branch_tokens,
            num_tokens=self.num_tokens + forest.num_tokens,
        )
