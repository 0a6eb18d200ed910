"""A tokenizer's own chat template: renders messages to text as inference does, or refuses them by name.

Imports transformers on first use, without its models.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date as Date
from pathlib import Path
from typing import Any

from treering.data.rendering.rendered_parts import restore_arguments
from treering.data.rendering.script import is_object_text
from treering.data.trajectory import Message, ToolCall
from treering.errors import ConfigError, InputError
from treering.extras import require

_TODAY = re.compile(r"strftime_now\(\s*(?P<quote>['\"])(?P<form>.*?)(?P=quote)\s*\)")


class ChatTemplate:
    r"""The chat template of a Hugging Face tokenizer folder.

    Example: with a ChatML template, `prompt([Message(role="user", content="Hi")])` is
    `<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n`.
    """

    def __init__(self, folder: Path, *, date: Date | None = None) -> None:
        """Opens the folder.

        Args:
            folder: the tokenizer's.
            date: what templates that write today's date write; None is today.

        Raises:
            ConfigError: the folder has no tokenizer or no chat template.
        """
        require("--template hf", "transformers")
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--template hf needs a Hugging Face tokenizer folder, got {folder} ({error})") from error
        if not self._tokenizer.chat_template:
            raise ConfigError(f"--template hf needs a chat template, {folder} has none; use --template plain")
        self._date = date or Date.today()

    @property
    def writes_date(self) -> bool:
        """Whether the template asks for today's date."""
        return "strftime_now" in str(self._tokenizer.chat_template)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The text before the policy's turn: the messages and whatever the template opens a turn with.

        Raises:
            InputError: the template refuses the messages.
        """
        return self._render(messages, tools, opens_turn=True)

    def text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The messages rendered, without an opened turn.

        Raises:
            InputError: the template refuses the messages.
        """
        return self._render(messages, tools, opens_turn=False)

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, opens_turn: bool) -> str:
        from jinja2 import TemplateError

        shown = [dict(tool) for tool in tools] or None
        template = _with_date(self._tokenizer.get_chat_template(tools=shown), self._date)
        # Some templates join the arguments of a call as text, most write an object as JSON.
        for form in (_as_object, _as_text):
            try:
                text = self._tokenizer.apply_chat_template(
                    [_record(message, form) for message in messages],
                    tools=shown,
                    chat_template=template,
                    tokenize=False,
                    add_generation_prompt=opens_turn,
                )
                return restore_arguments(str(text), messages)
            except (TemplateError, ValueError, TypeError, LookupError, AttributeError) as error:
                refusal = error
                if not isinstance(error, TypeError):
                    break
        raise InputError(
            f"the chat template refuses the first {len(messages)} messages ({refusal}); use --template plain"
        ) from refusal


def _with_date(template: str, date: Date) -> str:
    """The template with the date in place of its calls for today's."""
    dated = _TODAY.sub(lambda call: json.dumps(date.strftime(call["form"])), template)
    if "strftime_now(" in dated:
        raise InputError(
            "the chat template writes today's date in a form that it computes, so a resumed run would have other "
            "prompts; write the form into strftime_now(...) as text"
        )
    return dated


def _as_object(call: ToolCall) -> Mapping[str, Any] | str:
    if isinstance(call.arguments, str) and is_object_text(call.arguments):
        return json.loads(call.arguments)  # type: ignore[no-any-return]
    return call.arguments if isinstance(call.arguments, str) else dict(call.arguments)


def _as_text(call: ToolCall) -> str:
    return call.arguments if isinstance(call.arguments, str) else json.dumps(dict(call.arguments), ensure_ascii=False)


def _record(message: Message, arguments: Callable[[ToolCall], Mapping[str, Any] | str]) -> dict[str, Any]:
    record: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.reasoning is not None:
        # Model families read the thought under different names.
        record |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), message.reasoning)
    if message.name is not None:
        record["name"] = message.name
    if message.tool_call_id is not None:
        record["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        record["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": arguments(call)}}
            for call in message.tool_calls
        ]
    return record
