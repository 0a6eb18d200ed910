"""Renders trajectories to token ids and masks: their own tokens, raw text, the plain chat form or a chat template."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from treering.data.rendering.encoder import EncodedScript, Encoder
from treering.data.rendering.script import Script, plain_scripts
from treering.data.rendering.template import ChatTemplate
from treering.data.trajectory import RAW_FORMAT, TaskId, Trajectory
from treering.errors import ConfigError, InputError
from treering.types import LossMask, TokenIds

Template: TypeAlias = Literal["plain", "hf"]
"""The chat form: "plain" markers, or "hf" for the tokenizer's own template."""


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
    reward: float | None = None
    """Reward of the whole rollout; None if unknown."""
    advantage: float | None = None
    """Advantage of the whole rollout; None if unknown."""
    logprobs: npt.NDArray[np.float64] | None = None
    """float64 [T] under the policy that sampled; None if unknown."""

    def __post_init__(self) -> None:
        assert self.tokens.shape == self.loss_mask.shape, "one mask entry per token"
        assert self.logprobs is None or self.logprobs.shape == self.tokens.shape, "one log-probability per token"

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens before the first trained one; all tokens if none is trained."""
        return int(self.loss_mask.argmax()) if self.loss_mask.any() else self.tokens.size


class Renderer:
    """Turns trajectories into tokens with one tokenizer, opened on first use.

    Example: `Renderer(tokenizer=None).render([Trajectory(task_id=1, tokens=ids)])[0].tokens` is `ids`.
    """

    def __init__(self, *, tokenizer: Path | None, template: Template = "plain") -> None:
        """`tokenizer` is a Hugging Face tokenizer folder; None will do if every trajectory has tokens."""
        if template not in ("plain", "hf"):
            raise ConfigError(f'template is "plain" or "hf", got {template!r}; choose one of them')
        self._folder = tokenizer
        self._template: Template = template
        self._encoder: Encoder | None = None
        self._chat: ChatTemplate | None = None

    def render(self, trajectories: Iterable[Trajectory]) -> list[RenderedTrajectory]:
        """The trajectories as tokens, in order. Equal messages of one call are tokenized once.

        Raises:
            InputError: messages without a tokenizer, or without any text.
        """
        trajectories = list(trajectories)
        written = [i for i, trajectory in enumerate(trajectories) if trajectory.messages is not None]
        encoded: dict[int, EncodedScript] = {}
        if written:
            encoder = self._open()
            encoded = dict(zip(written, encoder.encode([self._scripts(trajectories[i]) for i in written]), strict=True))
        return [
            _rendered(trajectory, encoded[i] if i in encoded else _given(trajectory))
            for i, trajectory in enumerate(trajectories)
        ]

    def _open(self) -> Encoder:
        if self._folder is None:
            raise InputError("messages need a tokenizer, got none; pass --tokenizer DIR (a Hugging Face folder)")
        self._encoder = self._encoder or Encoder(self._folder)
        if self._template == "hf":
            self._chat = self._chat or ChatTemplate(self._folder)
        return self._encoder

    def _scripts(self, trajectory: Trajectory) -> list[Script]:
        if self._chat is None or trajectory.format == RAW_FORMAT:
            return plain_scripts(trajectory)
        assert trajectory.messages is not None, "only messages have a template"
        return [self._chat.script(trajectory.messages)]


def render(
    trajectories: Iterable[Trajectory], tokenizer: Path | None = None, template: Template = "plain"
) -> list[RenderedTrajectory]:
    """Renders trajectories with a new `Renderer`.

    Example: user "2+2=" and assistant "4" of format "raw" become the tokens of "2+2=4", of which only "4" is trained.
    """
    return Renderer(tokenizer=tokenizer, template=template).render(trajectories)


def by_task(trajectories: Iterable[RenderedTrajectory]) -> list[list[RenderedTrajectory]]:
    """Groups trajectories by `task_id`; tasks and trajectories stay in order of first appearance.

    Example: trajectories of the tasks a, b, a give two groups: the two of a, then the one of b.
    """
    tasks: dict[TaskId, list[RenderedTrajectory]] = {}
    for trajectory in trajectories:
        tasks.setdefault(trajectory.task_id, []).append(trajectory)
    return list(tasks.values())


def _given(trajectory: Trajectory) -> EncodedScript:
    tokens, mask = trajectory.tokens, trajectory.loss_mask
    assert tokens is not None, "a trajectory has messages or tokens"
    if mask is None:
        mask = np.ones(tokens.size, dtype=np.bool_)
    # With tokens alone, a turn is a maximal trained run.
    ends = np.flatnonzero(mask & ~np.append(mask[1:], False)) + 1
    return EncodedScript(tokens=tokens, loss_mask=mask, turn_ends=ends.astype(np.int32))


def _rendered(trajectory: Trajectory, encoded: EncodedScript) -> RenderedTrajectory:
    if encoded.tokens.size == 0:
        raise InputError(f"a trajectory needs text, got only empty messages in task {trajectory.task_id!r}; drop it")
    return RenderedTrajectory(
        task_id=trajectory.task_id,
        tokens=encoded.tokens,
        loss_mask=encoded.loss_mask,
        turn_ends=encoded.turn_ends,
        reward=trajectory.reward,
        advantage=trajectory.advantage,
        logprobs=trajectory.logprobs,
    )
