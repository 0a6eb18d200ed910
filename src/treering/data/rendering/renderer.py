"""Renders trajectories to token ids and masks: their own tokens, raw text, the plain chat form or a chat template."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date as Date
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import numpy as np

from treering.data.rendering.chat_pictures import (
    check_pictures,
    expanded_script,
    num_pictures,
    with_picture_tokens,
)
from treering.data.rendering.encoder import EncodedScript, Encoder, join_encoded
from treering.data.rendering.picture_processor import PictureProcessor, Placeholder
from treering.data.rendering.rendered_chat import RenderedChat, Tools
from treering.data.rendering.rendered_trajectory import RenderedTrajectory, given, rendered
from treering.data.rendering.script import Script, message_script, raw_script, turn_opening
from treering.data.rendering.template import ChatTemplate
from treering.data.rendering.template_files import chat_templates
from treering.data.rendering.turns import chat_continuation, chat_scripts, check_rendered, plain_continuation
from treering.data.trajectory import RAW_FORMAT, Message, Trajectory
from treering.errors import ConfigError, DataWarning, InputError
from treering.types import TokenIds

Template: TypeAlias = Literal["auto", "plain", "hf"]
"""The chat form: "hf" is the tokenizer's own template, "plain" has markers. "auto" is "hf" where there is a template,
else "plain" where the tokenizer knows the markers."""


@dataclass(slots=True, kw_only=True)
class RenderCounts:
    """What a renderer has rendered, as far as something is to be said of it."""

    num_chats: int = 0
    """Chats that have become text."""
    drops_tools: bool = False
    """Whether the plain form or raw text has left tools out."""
    num_special: int = 0
    """Messages that hold the text of a special token, of which a template or raw text makes it."""
    num_contents: int = 0
    """Messages that were looked at for that."""

    def add(self, other: "RenderCounts") -> None:
        """Counts what another renderer has rendered too."""
        self.num_chats += other.num_chats
        self.drops_tools |= other.drops_tools
        self.num_special += other.num_special
        self.num_contents += other.num_contents


class Renderer:
    """Turns trajectories into tokens with one tokenizer, opened on first use.

    Example: `Renderer(tokenizer=None).render([Trajectory(task_id=1, tokens=ids)])[0].tokens` is `ids`.
    """

    def __init__(self, *, tokenizer: Path | None, template: Template = "auto", date: Date | None = None) -> None:
        """Opens nothing yet.

        Args:
            tokenizer: a Hugging Face tokenizer folder; None will do if every trajectory has tokens.
            template: the chat form.
            date: what chat templates that write today's date write; None is today.

        Raises:
            ConfigError: an unknown template.
        """
        if template not in get_args(Template):
            raise ConfigError(f'template is "auto", "plain" or "hf", got {template!r}; choose one of them')
        self.tokenizer = tokenizer
        """Folder of the tokenizer; None without one."""
        self.template: Template = template
        """The chat form, as it was asked for."""
        self.date = date
        """What chat templates write as today's date; None is today."""
        self.counts = RenderCounts()
        """Of what it has rendered; `warn` begins those of messages anew."""

    def render(self, trajectories: Iterable[Trajectory]) -> list[RenderedTrajectory]:
        """The trajectories as tokens, in order. Equal messages of one call are tokenized once.

        A chat becomes several sequences where its template rewrites history; see `chat_scripts`.

        Raises:
            InputError: messages without a tokenizer, without any text, or that the template drops a part of.
        """
        found = self.render_batch(list(trajectories))
        self.warn()
        return found

    def render_batch(self, trajectories: Sequence[Trajectory], first_index: int = 0) -> list[RenderedTrajectory]:
        """As `render`, for a part of the trajectories whose first one has the index `first_index`; it warns of nothing.

        `warn` follows the last part.
        """
        written = [i for i, trajectory in enumerate(trajectories) if trajectory.messages is not None]
        sequences = [(i, scripts) for i in written for scripts in self._scripts(trajectories[i])]
        encoded = self._encoder.encode([scripts for _, scripts in sequences]) if sequences else []
        of_messages: dict[int, list[EncodedScript]] = {}
        for (i, _), sequence in zip(sequences, encoded, strict=True):
            begun = self._begun(sequence) if self._template_of(trajectories[i]) is None else sequence
            of_messages.setdefault(i, []).append(self._with_pictures(trajectories[i], begun))
        self._count_contents([trajectories[i] for i in written])
        return [
            rendered(trajectory, sequence, first_index + i)
            for i, trajectory in enumerate(trajectories)
            for sequence in of_messages.get(i) or [given(trajectory)]
        ]

    def warn(self) -> None:
        """Says what the trajectories since the last call have lost, or what their data may write.

        Warns:
            DataWarning: tools that the plain form leaves out, and data that a template turns into special tokens.
        """
        counts, self.counts = self.counts, RenderCounts(num_chats=self.counts.num_chats)
        if counts.drops_tools:
            _warn("the plain form and raw text leave tools out; a policy that was shown them needs a chat template")
        if counts.num_special:
            _warn(
                f"{counts.num_special} of {counts.num_contents} messages hold the text of special tokens, which a chat "
                "template or raw text turns into these tokens, so data can write turns; the plain form keeps it as text"
            )

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
        _check_text_alone(messages)
        found = self.seen_prompt(messages, tools, is_raw=is_raw).tokens
        self.warn()
        return found

    def seen_prompt(self, messages: Sequence[Message], tools: Tools = (), *, is_raw: bool = False) -> EncodedScript:
        """As `prompt`, with its pictures at their placeholders; it warns of nothing, `warn` follows the last prompt.

        Raises:
            InputError: as `prompt`; or a picture that the processor refuses, a template that drops one, or no template.
            ConfigError: no processor, or one of another family.

        Example: a picture of 4 tokens before "Hi" stands 4 times as the model's placeholder before it.
        """
        trajectory = Trajectory(
            task_id=0, messages=tuple(messages), tools=tuple(tools), format=RAW_FORMAT if is_raw else "chat"
        )
        template = self._template_of(trajectory)
        self.counts.num_chats += not is_raw
        if is_raw:
            scripts = [raw_script(messages)]
        elif template is None:
            scripts = [*(message_script(message) for message in messages), turn_opening()]
        else:
            chat = RenderedChat(template, messages, tools)
            check_rendered(chat)
            scripts = [self._opened(chat)]
        if template is None:
            self._check_template(messages)
        self._count_contents([trajectory])
        encoded = self._encoder.encode([scripts])[0]
        return self._with_pictures(trajectory, self._begun(encoded) if template is None else encoded)

    def continuation(self, messages: Sequence[Message], num_seen: int, tools: Tools = ()) -> TokenIds | None:
        r"""What follows the policy's turn `messages[num_seen - 1]` up to its next turn, from the end of the turn on.

        The first token is the one that ends a turn, which the policy has sampled unless it was cut off. A chat that
        goes on with these tokens keeps all earlier ones as they were sampled and read. None where the chat has to be
        rendered anew: the template rewrites what stands before, or no single token ends a turn.

        Raises:
            InputError: no tokenizer, or the template refuses the messages.

        Example: in the plain form, after an answer and before its result "4",
        `<|im_end|>\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n`.
        """
        _check_text_alone(messages)
        if self.chat_template is None:
            if self._encoder.missing_markers:
                return None
            scripts = plain_continuation(messages[num_seen:])
        else:
            found = chat_continuation(RenderedChat(self.chat_template, messages, tools), num_seen)
            if found is None:
                return None
            scripts = [found]
        return self._encoder.encode([scripts])[0].tokens

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The tokenizer's own template; None for the plain form.

        Raises:
            ConfigError: "hf" without a chat template, or "auto" where the tokenizer has neither template nor markers.
        """
        folder = self._checked_folder
        if self.template == "plain":
            return None
        if self.template == "hf" or chat_templates(folder):
            return ChatTemplate(folder, date=self.date)
        if missing := self._encoder.missing_markers:
            raise ConfigError(
                f"chats need a chat template, or a tokenizer in which {' and '.join(missing)} are single tokens, and "
                f'{folder} has neither; add its chat_template.jinja, or set template="plain" to spell the markers out'
            )
        return None

    @property
    def form_in_words(self) -> str | None:
        """One sentence on how chats have become text; None before the first chat.

        Example: "chats are rendered by the chat template of models/qwen3".
        """
        if not self.counts.num_chats:
            return None
        if self.chat_template is not None:
            return f"chats are rendered by the chat template of {self.tokenizer}"
        missing = " and ".join(self._encoder.missing_markers)
        why = f": {self.tokenizer} has no chat template" if self.template == "auto" else ""
        return f"chats are rendered in the plain form{f', {missing} as ordinary tokens' if missing else why}"

    @cached_property
    def processor(self) -> PictureProcessor:
        """The picture half of the model's processor, in the folder of the tokenizer.

        Raises:
            InputError: no tokenizer.
        """
        return PictureProcessor(self._checked_folder)

    @property
    def _checked_folder(self) -> Path:
        if self.tokenizer is None:
            raise InputError(
                "messages need a tokenizer, got none; pass tokenizer=DIR (a Hugging Face folder or hub id)"
            )
        return self.tokenizer

    @cached_property
    def _encoder(self) -> Encoder:
        return Encoder(self._checked_folder)

    def _template_of(self, trajectory: Trajectory) -> ChatTemplate | None:
        """The template that renders a trajectory; None for the plain form and for raw text."""
        return None if trajectory.format == RAW_FORMAT else self.chat_template

    def _scripts(self, trajectory: Trajectory) -> list[list[Script]]:
        """The sequences of a trajectory, each as its scripts."""
        assert trajectory.messages is not None, "only messages have a template"
        self.counts.num_chats += trajectory.format != RAW_FORMAT
        template = self._template_of(trajectory)
        if template is None:
            self._check_template(trajectory.messages)
            is_raw = trajectory.format == RAW_FORMAT
            return [[raw_script(trajectory.messages)] if is_raw else list(map(message_script, trajectory.messages))]
        chat = RenderedChat(template, trajectory.messages, trajectory.tools)
        placeholder = self._placeholder(chat)
        return [[expanded_script(script, placeholder)] for script in chat_scripts(chat)]

    def _opened(self, chat: RenderedChat) -> Script:
        """The chat with a turn opened after it."""
        placeholder = self._placeholder(chat)
        return expanded_script(Script(text=chat.opened(len(chat.messages))), placeholder)

    def _placeholder(self, chat: RenderedChat) -> Placeholder | None:
        """How pictures stand in a chat's text, which is checked; None without pictures."""
        if not num_pictures(chat.messages):
            return None
        placeholder = self.processor.placeholder
        check_pictures(chat, placeholder.written)
        return placeholder

    def _check_template(self, messages: Sequence[Message]) -> None:
        if num_pictures(messages):
            raise InputError(
                "pictures need the chat template of the model, and the plain form has none; use the tokenizer of the "
                "model"
            )

    def _with_pictures(self, trajectory: Trajectory, encoded: EncodedScript) -> EncodedScript:
        """The sequence with the tokens of its pictures."""
        sources = [one.source for message in trajectory.messages or () for one in message.pictures]
        if not sources:
            return encoded
        token = self._encoder.id_of(self.processor.placeholder.token)
        if token is None:
            raise ConfigError(
                f"pictures stand at the token {self.processor.placeholder.token}, which {self.tokenizer} lacks; give "
                "the tokenizer of the model"
            )
        return with_picture_tokens(encoded, [self.processor.picture(source) for source in sources], token)

    def _begun(self, encoded: EncodedScript) -> EncodedScript:
        """The sequence after what the tokenizer writes before a text; a chat template writes that itself."""
        begin = self._encoder.begin
        if not begin.size or not encoded.tokens.size or np.array_equal(encoded.tokens[: begin.size], begin):
            return encoded
        no_turn = np.zeros(0, np.int32)
        return join_encoded(
            [EncodedScript(tokens=begin, loss_mask=np.zeros(begin.size, np.bool_), turn_ends=no_turn), encoded]
        )

    def _count_contents(self, trajectories: Sequence[Trajectory]) -> None:
        counts = self.counts
        counts.drops_tools |= any(one.tools and self._template_of(one) is None for one in trajectories)
        read = [one for one in trajectories if one.format == RAW_FORMAT or self.chat_template is not None]
        contents = [message.content or "" for one in read for message in one.messages or ()]
        counts.num_contents += len(contents)
        counts.num_special += sum(self._encoder.has_special_text(content) for content in contents)


def render(
    trajectories: Iterable[Trajectory], tokenizer: Path | None = None, template: Template = "auto"
) -> list[RenderedTrajectory]:
    """Renders trajectories with a new `Renderer`.

    Example: user "2+2=" and assistant "4" of format "raw" become the tokens of "2+2=4", of which only "4" is trained.
    """
    return Renderer(tokenizer=tokenizer, template=template).render(trajectories)


def _check_text_alone(messages: Sequence[Message]) -> None:
    if num_pictures(messages):
        raise InputError(
            "a prompt that is sampled from is text, and this one has pictures; sample it by an engine that sees"
        )


def _warn(sentence: str) -> None:
    warnings.warn(sentence, DataWarning, stacklevel=4)
