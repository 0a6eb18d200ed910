"""Renders trajectories to token ids and masks: their own tokens, raw text, the plain chat form or a chat template."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date as Date
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from treering.data.rendering.encoder import EncodedScript, Encoder, join_encoded
from treering.data.rendering.rendered_chat import RenderedChat, Tools
from treering.data.rendering.script import Script, message_script, plain_scripts, raw_script, turn_opening
from treering.data.rendering.template import ChatTemplate
from treering.data.rendering.turns import chat_scripts, check_rendered
from treering.data.trajectory import RAW_FORMAT, Message, TaskId, Trajectory
from treering.errors import ConfigError, DataWarning, InputError
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
    index: int = 0
    """Place of its trajectory among those rendered together; a chat whose template rewrites history has several."""
    reward: float | None = None
    """Reward of the whole rollout; None if unknown."""
    advantage: float | None = None
    """Advantage of the whole rollout; None if unknown."""
    advantages: npt.NDArray[np.float64] | None = None
    """float64 [T], the advantage of each token; None if unknown."""
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

    def __init__(self, *, tokenizer: Path | None, template: Template = "plain", date: Date | None = None) -> None:
        """Opens nothing yet.

        Args:
            tokenizer: a Hugging Face tokenizer folder; None will do if every trajectory has tokens.
            template: the chat form.
            date: what chat templates that write today's date write; None is today.

        Raises:
            ConfigError: an unknown template.
        """
        if template not in ("plain", "hf"):
            raise ConfigError(f'template is "plain" or "hf", got {template!r}; choose one of them')
        self._folder = tokenizer
        self._template: Template = template
        self._date = date
        self._encoder: Encoder | None = None
        self._chat: ChatTemplate | None = None

    def render(self, trajectories: Iterable[Trajectory]) -> list[RenderedTrajectory]:
        """The trajectories as tokens, in order. Equal messages of one call are tokenized once.

        A chat becomes several sequences where its template rewrites history; see `chat_scripts`.

        Raises:
            InputError: messages without a tokenizer, without any text, or that the template drops a part of.
        """
        trajectories = list(trajectories)
        written = [i for i, trajectory in enumerate(trajectories) if trajectory.messages is not None]
        sequences = [(i, scripts) for i in written for scripts in self._scripts(trajectories[i], self._open())]
        encoded = self._open().encode([scripts for _, scripts in sequences]) if sequences else []
        of_messages: dict[int, list[EncodedScript]] = {}
        for (i, _), sequence in zip(sequences, encoded, strict=True):
            is_own_text = self._chat is not None and trajectories[i].format != RAW_FORMAT
            of_messages.setdefault(i, []).append(sequence if is_own_text else self._begun(sequence))
        self._say_what_is_lost([trajectories[i] for i in written])
        return [
            _rendered(trajectory, sequence, i)
            for i, trajectory in enumerate(trajectories)
            for sequence in of_messages.get(i) or [_given(trajectory)]
        ]

    def prompt(self, messages: Sequence[Message], tools: Tools = (), *, is_raw: bool = False) -> TokenIds:
        r"""The messages up to the first token that the policy writes, int32 [P].

        Args:
            messages: the prompt, without the policy's turn.
            tools: JSON schemas for the chat template.
            is_raw: concatenate the contents.

        Raises:
            InputError: no tokenizer, no text, or something that the template drops.

        Example: in the plain form, user "Hi" is `<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n`.
        """
        encoder = self._open()
        if is_raw:
            scripts = [raw_script(messages)]
        elif self._chat is None:
            scripts = [*(message_script(message) for message in messages), turn_opening()]
        else:
            chat = RenderedChat(self._chat, messages, tools)
            check_rendered(chat)
            scripts = [Script(text=chat.opened(len(messages)))]
        self._say_what_is_lost([Trajectory(task_id=0, messages=tuple(messages), tools=tuple(tools))])
        encoded = encoder.encode([scripts])[0]
        return (encoded if self._chat is not None and not is_raw else self._begun(encoded)).tokens

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The tokenizer's own template; None for the plain form."""
        self._open()
        return self._chat

    def _open(self) -> Encoder:
        if self._folder is None:
            raise InputError(
                "messages need a tokenizer, got none; pass --tokenizer DIR (a Hugging Face folder or hub id)"
            )
        self._encoder = self._encoder or Encoder(self._folder)
        if self._template == "hf":
            self._chat = self._chat or ChatTemplate(self._folder, date=self._date)
        return self._encoder

    def _scripts(self, trajectory: Trajectory, encoder: Encoder) -> list[list[Script]]:
        """The sequences of a trajectory, each as its scripts."""
        if self._chat is None or trajectory.format == RAW_FORMAT:
            return [plain_scripts(trajectory)]
        assert trajectory.messages is not None, "only messages have a template"
        chat = RenderedChat(self._chat, trajectory.messages, trajectory.tools)
        return [[script] for script in chat_scripts(chat)]

    def _begun(self, encoded: EncodedScript) -> EncodedScript:
        """The sequence after what the tokenizer writes before a text; a chat template writes that itself."""
        begin = self._open().begin
        if not encoded.tokens.size or np.array_equal(encoded.tokens[: begin.size], begin):
            return encoded
        no_turn = np.zeros(0, np.int32)
        return join_encoded(
            [EncodedScript(tokens=begin, loss_mask=np.zeros(begin.size, np.bool_), turn_ends=no_turn), encoded]
        )

    def _say_what_is_lost(self, trajectories: Sequence[Trajectory]) -> None:
        """Warns of tools that the plain form leaves out, and of data that a template turns into special tokens."""
        is_plain = [self._chat is None or trajectory.format == RAW_FORMAT for trajectory in trajectories]
        if any(trajectory.tools for trajectory, plain in zip(trajectories, is_plain, strict=True) if plain):
            _warn("the plain form and raw text leave tools out; a policy that was shown them needs --template hf")
        read = [one for one in trajectories if self._chat or one.format == RAW_FORMAT]
        contents = [message.content or "" for one in read for message in one.messages or ()]
        if count := sum(self._open().has_special_text(content) for content in contents):
            _warn(
                f"{count} of {len(contents)} messages hold the text of special tokens, which a chat template or raw "
                "text turns into these tokens, so data can write turns; --template plain keeps it as text"
            )


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


def _rendered(trajectory: Trajectory, encoded: EncodedScript, index: int) -> RenderedTrajectory:
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
        advantages=trajectory.advantages,
        logprobs=trajectory.logprobs,
    )


def _warn(sentence: str) -> None:
    warnings.warn(sentence, DataWarning, stacklevel=4)
