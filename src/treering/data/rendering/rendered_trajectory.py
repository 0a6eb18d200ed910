"""Trajectories as tokens, masks and pictures, ready for merging and training."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from treering.data.picture import PlacedPicture
from treering.data.rendering.encoder import EncodedScript
from treering.data.trajectory import TaskId, Trajectory
from treering.errors import InputError
from treering.types import LossMask, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RenderedTrajectory:
    """A trajectory as tokens, ready for merging and training.

    Example: tokens `[5, 6, 7, 8]` with mask `[0, 0, 1, 1]` have `num_prompt_tokens` 2 and `turn_ends` `[4]`.
    """

    task_id: TaskId
    """The same for all trials of a task."""
    tokens: TokenIds
    """int32 [T], T >= 1."""
    loss_mask: LossMask
    """bool [T], True for trained tokens."""
    turn_ends: npt.NDArray[np.int32]
    """int32 [turns], ascending: one past the last trained token of each assistant turn."""
    index: int = 0
    """Place of its trajectory among those rendered together; a chat whose template rewrites history has several."""
    reward: float | None = None
    """Reward of the whole rollout; None if unknown."""
    advantage: float | None = None
    """Advantage of the whole rollout; None if unknown."""
    epoch: int | None = None
    """Pass over the data in which it was sampled; None if unknown."""
    step: int | None = None
    """Optimizer step for which it was sampled; None if unknown."""
    advantages: npt.NDArray[np.float64] | None = None
    """float64 [T], the advantage of each token; None if unknown."""
    logprobs: npt.NDArray[np.float64] | None = None
    """float64 [T] under the policy that sampled; None if unknown."""
    pictures: tuple[PlacedPicture, ...] = ()
    """Pictures in order, at the model's image tokens."""

    def __post_init__(self) -> None:
        assert self.tokens.shape == self.loss_mask.shape, "one mask entry per token"
        assert self.logprobs is None or self.logprobs.shape == self.tokens.shape, "one log-probability per token"

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens before the first trained one; all tokens if none is trained."""
        return int(self.loss_mask.argmax()) if self.loss_mask.any() else self.tokens.size


def by_task(trajectories: Iterable[RenderedTrajectory]) -> list[list[RenderedTrajectory]]:
    """Groups trajectories by `task_id`; tasks and trajectories stay in order of first appearance.

    Example: trajectories of the tasks a, b, a give two groups: the two of a, then the one of b.
    """
    tasks: dict[TaskId, list[RenderedTrajectory]] = {}
    for trajectory in trajectories:
        tasks.setdefault(trajectory.task_id, []).append(trajectory)
    return list(tasks.values())


def cut_pictures(pictures: Sequence[PlacedPicture], num_tokens: int) -> tuple[PlacedPicture, ...]:
    """The pictures among the first tokens of a sequence.

    Example: of pictures at the tokens 2 to 5 and 8 to 11 the first one is among the first 8 tokens.
    """
    return tuple(placed for placed in pictures if placed.stop <= num_tokens)


def given(trajectory: Trajectory) -> EncodedScript:
    """The tokens of a trajectory that has them; without a mask all are trained.

    Example: tokens with the mask `[0, 1, 1, 0, 1]` have the turn ends `[3, 5]`.
    """
    tokens, mask = trajectory.tokens, trajectory.loss_mask
    assert tokens is not None, "a trajectory has messages or tokens"
    if mask is None:
        mask = np.ones(tokens.size, dtype=np.bool_)
    # With tokens alone, a turn is a maximal trained run.
    ends = np.flatnonzero(mask & ~np.append(mask[1:], False)) + 1
    return EncodedScript(tokens=tokens, loss_mask=mask, turn_ends=ends.astype(np.int32), pictures=trajectory.pictures)


def rendered(trajectory: Trajectory, encoded: EncodedScript, index: int) -> RenderedTrajectory:
    """Tokens of a trajectory with what is known of it.

    Raises:
        InputError: no token.

    Example: `rendered(trajectory, given(trajectory), 0).reward` is `trajectory.reward`.
    """
    if encoded.tokens.size == 0:
        raise InputError(f"a trajectory needs text, got only empty messages in task {trajectory.task_id!r}; drop it")
    return RenderedTrajectory(
        task_id=trajectory.task_id,
        tokens=encoded.tokens,
        loss_mask=encoded.loss_mask,
        turn_ends=encoded.turn_ends,
        index=index,
        reward=trajectory.reward,
        advantage=trajectory.advantage,
        epoch=trajectory.epoch,
        step=trajectory.step,
        advantages=trajectory.advantages,
        logprobs=trajectory.logprobs,
        pictures=encoded.pictures,
    )
