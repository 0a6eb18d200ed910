"""Says of data what its owner should know before training: chats of several branches, and ids that nothing masks."""

from collections.abc import Sequence

from treering.data import RenderedTrajectory, Trajectory
from treering.tree.forest import Forest


def data_notes(trajectories: Sequence[Trajectory], rendered: Sequence[RenderedTrajectory]) -> list[str]:
    """Sentences about the trajectories of a file, rendered by one call of `Renderer.render`."""
    return [note for note in (branches_note(rendered), mask_note(trajectories)) if note]


def mask_note(trajectories: Sequence[Trajectory]) -> str | None:
    """One sentence on token ids without a mask, of which the prompt is trained too; None if each has one.

    Example: of two trajectories of tokens, one without a loss_mask, it counts 1 of 2.
    """
    ids = [one for one in trajectories if one.tokens is not None]
    num_bare = sum(one.loss_mask is None for one in ids)
    if not num_bare:
        return None
    return (
        f"{num_bare} of {len(ids)} trajectories of token ids have no loss_mask, so every token of theirs is trained, "
        "prompts too"
    )


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
