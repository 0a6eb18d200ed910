"""Render trajectories to token ids and masks, from their tokens, raw text, the plain chat form or a chat template."""

import json
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date as Date
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from treering.data.formats.json_fields import placed
from treering.data.rendering.chat_turns import (
    chat_continuation,
    chat_scripts,
    check_rendered,
    plain_continuation,
    probed_turn,
)
from treering.data.rendering.encoder import (
    NO_TURN,
    TURN_END,
    EncodedScript,
    Encoder,
    Script,
    join_encoded,
    message_script,
    missing_begin,
    raw_script,
    turn_opening,
)
from treering.data.rendering.image_processor import (
    ImageProcessor,
    Placeholder,
    check_images,
    expanded_script,
    num_images,
    takes_images,
    with_image_tokens,
)
from treering.data.rendering.template import (
    PLAIN_TEMPLATE,
    ChatTemplate,
    RenderedChat,
    Tools,
    chat_templates,
    end_of_text,
)
from treering.data.trajectory import RAW_FORMAT, Message, RenderedTrajectory, ToolCall, Trajectory
from treering.errors import ConfigError, DataWarning, InputError, plural
from treering.types import TokenIds

_ABOUT_IMAGES = re.compile("image|img|picture|pixel|vision|video|audio|sound|speech", re.IGNORECASE)
_ABOUT_OTHERS = re.compile("video|audio|sound|speech", re.IGNORECASE)
Template: TypeAlias = Literal["auto", "plain", "hf"]
"""The chat form: "hf" is the tokenizer's template, "plain" is ChatML. "auto" is "hf" if there is a template, else
"plain" if the tokenizer has its markers."""


Count: TypeAlias = Literal["chats", "dropped tools", "contents", "contents with special text", "ended texts"]
"""What a renderer counts for its warnings and notes: rendered chats; trajectories whose tools the plain form or raw
text has dropped; messages that were checked for the text of special tokens, and those that have it; texts to which
`eos_token` was added, or would be if the tokenizer had one (`Trajectory.adds_end`)."""

_ANSWER = Message(role="assistant", content="an answer")
_CALL = Message(role="assistant", content=None, tool_calls=(ToolCall(name="ask", arguments={"x": 1}, id="call00000"),))
_TOOL = {"type": "function", "function": {"name": "ask", "description": "Asks.", "parameters": {"type": "object"}}}


class Renderer:
    """Renderer of trajectories to tokens with one tokenizer, which is opened on first use.

    Example: `Renderer(tokenizer=None).render([Trajectory(task_id=1, tokens=ids)])[0].tokens` is `ids`.
    """

    def __init__(
        self,
        *,
        tokenizer: Path | None,
        template: Template = "auto",
        date: Date | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Store the settings; `variables` are values of the chat template's own variables, such as `enable_thinking`.

        Raises:
            ConfigError: the template is unknown.
        """
        if template not in get_args(Template):
            raise ConfigError(f'template is "auto", "plain" or "hf", got {template!r}; choose one of them')
        self.tokenizer = tokenizer
        """Hugging Face tokenizer folder; None if every trajectory has tokens."""
        self.template: Template = template
        """Requested chat form."""
        self.date = date
        """Date in chat templates that write today's date; None for today."""
        self._variables = variables
        self.counts: Counter[Count] = Counter()
        """Counts since the start; `warn` resets all but that of chats."""

    def render(self, trajectories: Iterable[Trajectory]) -> list[RenderedTrajectory]:
        """Return the trajectories as tokens, in order. Equal messages of one call are tokenized once.

        A chat becomes several sequences if its template rewrites history; see `chat_scripts`.

        Raises:
            InputError: there is no tokenizer for messages, messages have no text, or the template drops a part.
        """
        found = self.render_batch(list(trajectories))
        self.warn()
        return found

    def render_batch(self, trajectories: Sequence[Trajectory], first_index: int = 0) -> list[RenderedTrajectory]:
        """Render a part of the trajectories, the first with the index `first_index`, without warnings.

        Call `warn` after the last part.
        """
        written = [i for i, trajectory in enumerate(trajectories) if trajectory.messages is not None]
        sequences: list[tuple[int, list[Script]]] = []
        for i in written:
            with placed(trajectories[i].where):
                sequences += [(i, scripts) for scripts in self._scripts(trajectories[i])]
        encoded = self._encoder.encode([scripts for _, scripts in sequences]) if sequences else []
        of_messages: dict[int, list[EncodedScript]] = {}
        for (i, _), sequence in zip(sequences, encoded, strict=True):
            with placed(trajectories[i].where):
                of_messages.setdefault(i, []).append(self._whole(trajectories[i], sequence))
        self._count_contents([trajectories[i] for i in written])
        found: list[RenderedTrajectory] = []
        for i, trajectory in enumerate(trajectories):
            with placed(trajectory.where):
                for sequence in of_messages.get(i) or [given(trajectory)]:
                    self._check_placeholders(sequence)
                    found.append(rendered(trajectory, sequence, first_index + i))
        return found

    def warn(self) -> None:
        """Give the warnings on the trajectories since the last call."""
        counts, self.counts = self.counts, Counter({"chats": self.counts["chats"]})
        if counts["dropped tools"]:
            _warn("the plain form and raw text leave tools out; a policy that was shown them needs a chat template")
        if num_special := counts["contents with special text"]:
            _warn(
                f"{num_special} of {plural(counts['contents'], 'message')} "
                f"{'holds' if num_special == 1 else 'hold'} the text of special tokens, which a chat "
                "template or raw text turns into these tokens, so data can write turns; the plain form keeps it as text"
            )

    def prompt(self, messages: Sequence[Message], tools: Tools = (), *, is_raw: bool = False) -> TokenIds:
        r"""Return the tokens before the policy's turn, int32 [P]; `is_raw` concatenates the contents.

        Raises:
            InputError: there is no tokenizer or no text, or the template drops a part.

        Example: in the plain form, user "Hi" is `<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n`.
        """
        _check_text_alone(messages)
        found = self.seen_prompt(messages, tools, is_raw=is_raw).tokens
        self.warn()
        return found

    def seen_prompt(self, messages: Sequence[Message], tools: Tools = (), *, is_raw: bool = False) -> EncodedScript:
        """Return the prompt as `prompt` does, with images at their placeholders and without warnings.

        Call `warn` after the last prompt.

        Raises:
            InputError: as `prompt`; or the processor refuses an image, the template drops one, or there is no template.
            ConfigError: the processor is missing or of another family.

        Example: an image of 4 tokens before "Hi" becomes 4 placeholders before it.
        """
        trajectory = Trajectory(
            task_id=0, messages=tuple(messages), tools=tuple(tools), format=RAW_FORMAT if is_raw else "chat"
        )
        template = self._template_of(trajectory)
        self.counts["chats"] += not is_raw
        if template is None:
            scripts = [raw_script(messages)] if is_raw else [*map(message_script, messages), turn_opening()]
            _check_no_images(messages)
        else:
            chat = RenderedChat(template, messages, tools)
            check_rendered(chat)
            placeholder = self._placeholder(chat)
            scripts = [expanded_script(Script(text=chat.opened(len(chat.messages))), placeholder)]
        self._count_contents([trajectory])
        found = self._whole(trajectory, self._encoder.encode([scripts])[0])
        self._check_placeholders(found)
        return found

    def continuation(self, messages: Sequence[Message], num_seen: int, tools: Tools = ()) -> TokenIds | None:
        r"""Return the tokens from the end of the policy's turn `messages[num_seen - 1]` to the start of its next turn.

        The first token ends a turn; the policy has sampled it unless it was truncated. A chat that continues with these
        tokens keeps all earlier tokens as they were sampled. The result is None if the chat must be rendered again,
        because the template rewrites earlier text or no single token ends a turn.

        Raises:
            InputError: there is no tokenizer, or the template refuses the messages.

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
        """The tokenizer's template; None for the plain form.

        Raises:
            ConfigError: "hf" without a chat template, or "auto" with neither template nor markers.
        """
        folder = self._checked_folder
        if self.template == "plain":
            return None
        found = chat_templates(folder)
        if self.template == "auto" and found.get("default", "").endswith(PLAIN_TEMPLATE):
            return None
        if self.template == "hf" or found:
            return ChatTemplate(folder, date=self.date, variables=self._variables)
        if missing := self._encoder.missing_markers:
            raise ConfigError(
                f"chats need a chat template, or a tokenizer in which {' and '.join(missing)} are single tokens, and "
                f'{folder} has neither; add its chat_template.jinja, or set template="plain" to spell the markers out'
            )
        return None

    @property
    def plain_template(self) -> str | None:
        """The plain form as a chat template for this tokenizer; None if its own template is used."""
        if self.chat_template is not None:
            return None
        begin = self._encoder.begin_text
        return ("{{- " + json.dumps(begin, ensure_ascii=False) + " }}" if begin else "") + PLAIN_TEMPLATE

    @cached_property
    def turn_ends(self) -> tuple[int, ...]:
        """Tokens that end a trained turn, an answer or a call; empty if ordinary text ends it.

        Example: <|eot_id|> for Llama 3; <|return|> and <|call|> for gpt-oss.
        """
        found = [self._turn_end(_ANSWER), self._turn_end(_CALL, (_TOOL,))]
        return tuple(dict.fromkeys(token for token in found if token is not None))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings that end a turn: <|im_end|> in the plain form if it is not a token, else empty."""
        is_text = self.chat_template is None and TURN_END in self._encoder.missing_markers
        return (TURN_END,) if is_text else ()

    @property
    def form_note(self) -> str | None:
        """A sentence on how chats became text; None before the first chat.

        Example: "chats are rendered by the chat template of models/qwen3".
        """
        if not self.counts["chats"]:
            return None
        if self.chat_template is not None:
            return f"chats are rendered by the chat template of {self.tokenizer}"
        missing = " and ".join(self._encoder.missing_markers)
        has_none = self.template == "auto" and not chat_templates(self._checked_folder)
        why = f": {self.tokenizer} has no chat template" if has_none else ""
        return f"chats are rendered in the plain form{f', {missing} as ordinary tokens' if missing else why}"

    @property
    def notes(self) -> tuple[str, ...]:
        """At most one sentence, on ends that were added to texts."""
        if not self.counts["ended texts"]:
            return ()
        what = f"the {self.counts['ended texts']:,} texts of TRL's rows (prompt and completion, or chosen and rejected)"
        if self._end_of_text is None:
            return (f"{what} train no end, as {self.tokenizer} names no eos_token; name one in tokenizer_config.json",)
        return (f"{what} end with {self._end_of_text}, which is trained, as TRL adds it",)

    @cached_property
    def processor(self) -> ImageProcessor:
        """Image processor of the model, in the folder of the tokenizer."""
        return ImageProcessor(self._checked_folder)

    @property
    def _checked_folder(self) -> Path:
        if self.tokenizer is None:
            raise InputError(
                "messages need a tokenizer, got none; pass tokenizer=DIR (a Hugging Face folder or hub id)"
            )
        return self.tokenizer

    @cached_property
    def _end_of_text(self) -> str | None:
        return end_of_text(self._checked_folder)

    def _turn_end(self, message: Message, tools: Tools = ()) -> int | None:
        if self.chat_template is None:
            return self._encoder.end_of(message_script(message).text.rstrip(), is_special=True)
        turn = probed_turn(self.chat_template, "a question", message, tools)
        # A call may end with its own added token, such as </tool_call>.
        is_special = bool(message.tool_calls)
        return None if turn is None else self._encoder.end_of(turn.text[: turn.span.stop], is_special=is_special)

    @cached_property
    def _encoder(self) -> Encoder:
        return Encoder(self._checked_folder)

    def _template_of(self, trajectory: Trajectory) -> ChatTemplate | None:
        """Return the template that renders a trajectory; None for the plain form and for raw text."""
        return None if trajectory.format == RAW_FORMAT else self.chat_template

    def _scripts(self, trajectory: Trajectory) -> list[list[Script]]:
        """Return the sequences of a trajectory, each as its scripts."""
        assert trajectory.messages is not None, "only messages have a template"
        self.counts["chats"] += trajectory.format != RAW_FORMAT
        template = self._template_of(trajectory)
        if template is None:
            _check_no_images(trajectory.messages)
            is_raw = trajectory.format == RAW_FORMAT
            messages = self._ended(trajectory) if trajectory.adds_end else trajectory.messages
            return [[raw_script(messages)] if is_raw else list(map(message_script, messages))]
        chat = RenderedChat(template, trajectory.messages, trajectory.tools)
        placeholder = self._placeholder(chat)
        return [[expanded_script(script, placeholder)] for script in chat_scripts(chat)]

    def _ended(self, trajectory: Trajectory) -> Sequence[Message]:
        """Return the messages of a text with its end, which is not added twice."""
        *before, last = trajectory.messages or ()
        self.counts["ended texts"] += 1
        end, text = self._end_of_text or "", last.content or ""
        return [*before, last if text.endswith(end) else replace(last, content=text + end)]

    def _placeholder(self, chat: RenderedChat) -> Placeholder | None:
        """Check the images of a chat and return their placeholder; None without images."""
        if not num_images(chat.messages):
            return None
        placeholder = self.processor.placeholder
        check_images(chat, placeholder.written)
        return placeholder

    def _whole(self, trajectory: Trajectory, encoded: EncodedScript) -> EncodedScript:
        """Return the sequence with the tokens of its images, and those that the tokenizer adds before a text."""
        # Chat templates write these tokens themselves.
        if self._template_of(trajectory) is None and encoded.tokens.size:
            begin = missing_begin(encoded.tokens, self._encoder.begin)
            before = EncodedScript(tokens=begin, loss_mask=np.zeros(begin.size, np.bool_), turn_ends=NO_TURN)
            encoded = join_encoded([before, encoded])
        sources = [one.source for message in trajectory.messages or () for one in message.images]
        if not sources:
            return encoded
        token = self._encoder.id_of(self.processor.placeholder.token)
        if token is None:
            raise ConfigError(
                f"images stand at the token {self.processor.placeholder.token}, which {self.tokenizer} lacks; give "
                "the tokenizer of the model"
            )
        return with_image_tokens(encoded, [self.processor.image(source) for source in sources], token)

    @cached_property
    def _placeholders(self) -> tuple[TokenIds, TokenIds]:
        """Ids of all special tokens for images, videos and sound, and of those for videos and sound.

        Both are empty for a text model, for which these tokens have no meaning.
        """
        if self.tokenizer is None or not takes_images(self.tokenizer):
            return np.zeros(0, np.int32), np.zeros(0, np.int32)
        ids = (self._encoder.special_ids(pattern) for pattern in (_ABOUT_IMAGES, _ABOUT_OTHERS))
        every, others = (np.array(found, np.int32) for found in ids)
        return every, others

    def _check_placeholders(self, encoded: EncodedScript) -> None:
        """Refuse placeholder tokens of an image, video or sound that is not there."""
        every, others = self._placeholders
        if not every.size:
            return
        # The template writes tokens around each image.
        found = encoded.tokens[np.isin(encoded.tokens, others if encoded.images else every)]
        if found.size:
            text = self._encoder.text_of(int(found[0]))
            raise InputError(
                f"{text} stands for an image, video or sound of this model, and none is given there; remove it from "
                'the text, or give the image as a part {"type": "image", ...}'
            )

    def _count_contents(self, trajectories: Sequence[Trajectory]) -> None:
        counts = self.counts
        counts["dropped tools"] += sum(bool(one.tools) and self._template_of(one) is None for one in trajectories)
        read = [one for one in trajectories if one.format == RAW_FORMAT or self.chat_template is not None]
        contents = [message.content or "" for one in read for message in one.messages or ()]
        counts["contents"] += len(contents)
        counts["contents with special text"] += sum(self._encoder.has_special_text(one) for one in contents)


def render(
    trajectories: Iterable[Trajectory], tokenizer: Path | None = None, template: Template = "auto"
) -> list[RenderedTrajectory]:
    """Render trajectories with a new `Renderer`.

    Example: user "2+2=" and assistant "4" of format "raw" become the tokens of "2+2=4", of which only "4" is trained.
    """
    return Renderer(tokenizer=tokenizer, template=template).render(trajectories)


def given(trajectory: Trajectory) -> EncodedScript:
    """Return the tokens of a trajectory of tokens; without a mask all are trained.

    Example: tokens with the mask `[0, 1, 1, 0, 1]` have the turn ends `[3, 5]`.
    """
    tokens, mask = trajectory.tokens, trajectory.loss_mask
    assert tokens is not None, "a trajectory has messages or tokens"
    if mask is None:
        mask = np.ones(tokens.size, dtype=np.bool_)
    # Without messages, a turn is a maximal run of trained tokens.
    ends = np.flatnonzero(mask & ~np.append(mask[1:], False)) + 1
    return EncodedScript(tokens=tokens, loss_mask=mask, turn_ends=ends.astype(np.int32), images=trajectory.images)


def rendered(trajectory: Trajectory, encoded: EncodedScript, index: int) -> RenderedTrajectory:
    """Return the encoded tokens with the trajectory's metadata."""
    if encoded.tokens.size == 0:
        raise InputError(f"a trajectory needs text, got only empty messages in task {trajectory.task_id!r}; drop it")
    kept = ("task_id", "reward", "advantage", "epoch", "step", "advantages", "logprobs", "routed_experts")
    return RenderedTrajectory(
        tokens=encoded.tokens,
        loss_mask=encoded.loss_mask,
        turn_ends=encoded.turn_ends,
        index=index,
        images=encoded.images,
        **{name: getattr(trajectory, name) for name in kept},
    )


def _check_no_images(messages: Sequence[Message]) -> None:
    if num_images(messages):
        raise InputError(
            "images need the chat template of the model, and the plain form has none; use the tokenizer of the model"
        )


def _check_text_alone(messages: Sequence[Message]) -> None:
    if num_images(messages):
        raise InputError(
            "a prompt that is sampled from is text, and this one has images; sample it by an engine that sees"
        )


def _warn(sentence: str) -> None:
    warnings.warn(sentence, DataWarning, stacklevel=4)
