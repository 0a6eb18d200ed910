"""Says of data what its owner should know before training: chats of several branches, and ids that nothing masks."""

from collections.abc import Sequence
from itertools import groupby, pairwise

from treering.data.rendering.rendered_trajectory import RenderedTrajectory
from treering.data.trajectory import Trajectory
from treering.types import TokenIds


class DataNotes:
    """Counts trajectories and their tokens part by part, and makes the sentences at the end.

    Example: of two trajectories of tokens, one without a loss_mask, it counts 1 of 2.
    """

    def __init__(self) -> None:
        self._num_ids = self._num_bare = 0
        self._num_chats = self._num_several = 0
        self._num_branches = self._num_flat = self._num_unique = 0

    def add(self, trajectories: Sequence[Trajectory], rendered: Sequence[RenderedTrajectory]) -> None:
        """Counts trajectories, and what one call of the renderer made of them."""
        ids = [one for one in trajectories if one.tokens is not None]
        self._num_ids += len(ids)
        self._num_bare += sum(one.loss_mask is None for one in ids)
        for _, group in groupby(rendered, key=lambda one: one.index):
            branches = [one.tokens for one in group]
            self._num_chats += 1
            if len(branches) > 1:
                self._num_several += 1
                self._num_branches += len(branches)
                self._num_flat += sum(branch.size for branch in branches)
                self._num_unique += num_distinct(branches)

    def sentences(self) -> list[str]:
        """What is to be said, at most a sentence on branches and one on masks."""
        found = []
        if self._num_several:
            found.append(
                f"the chat template rewrites history, so {self._num_several} of {self._num_chats} chats are one branch "
                f"a turn, {self._num_branches} branches: of their {self._num_flat:,} tokens "
                f"{self._num_flat - self._num_unique:,} are shared"
            )
        if self._num_bare:
            found.append(
                f"{self._num_bare} of {self._num_ids} trajectories of token ids have no loss_mask, so every token of "
                "theirs is trained, prompts too"
            )
        return found


def num_distinct(branches: Sequence[TokenIds]) -> int:
    """Tokens that are left if branches that begin alike share their beginnings.

    Example:
        >>> num_distinct([np.array([1, 2, 3], np.int32), np.array([1, 2, 4, 5], np.int32)])
        5
    """
    # In lexical order each branch shares most with the one before it; big-endian bytes have the order of their ids.
    ordered = sorted((branch.astype(">i4") for branch in branches), key=lambda branch: branch.tobytes())
    return sum(branch.size for branch in ordered) - sum(num_common(*pair) for pair in pairwise(ordered))


def num_common(left: TokenIds, right: TokenIds) -> int:
    """Tokens that two sequences begin with alike.

    >>> num_common(np.array([1, 2, 3], np.int32), np.array([1, 2, 4, 5], np.int32))
    2
    """
    size = min(left.size, right.size)
    differ = left[:size] != right[:size]
    return int(differ.argmax()) if differ.any() else size
