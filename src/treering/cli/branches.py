"""Says how chats became several branches each, because their chat template rewrites history."""

from collections.abc import Sequence

from treering.data import RenderedTrajectory
from treering.tree.forest import Forest


def branches_note(rendered: Sequence[RenderedTrajectory]) -> str | None:
    """One sentence on chats of several branches and the tokens that these share; None if every chat is one sequence.

    Args:
        rendered: the trajectories of one call of `Renderer.render`.

    Example: a chat of the branches [1, 2, 3] and [1, 2, 4, 5] has 7 tokens as separate sequences, and 2 are shared.
    """
    chats: dict[int, list[RenderedTrajectory]] = {}
    for one in rendered:
        chats.setdefault(one.index, []).append(one)
    several = [branches for branches in chats.values() if len(branches) > 1]
    if not several:
        return None
    num_flat = sum(branch.tokens.size for branches in several for branch in branches)
    num_unique = sum(Forest.from_sequences([branch.tokens for branch in branches]).num_tokens for branches in several)
    num_branches = sum(map(len, several))
    return (
        f"the chat template rewrites history, so {len(several)} of {len(chats)} chats are one branch a turn, "
        f"{num_branches} branches: of their {num_flat:,} tokens {num_flat - num_unique:,} are shared"
    )
