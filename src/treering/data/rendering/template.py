"""Scripts from a tokenizer's own chat template: a turn is the text that an assistant message adds when rendered.

Imports transformers on first use, without its models.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treering.data.rendering.script import Script, Span
from treering.data.trajectory import Message
from treering.errors import ConfigError, InputError
from treering.extras import require


class ChatTemplate:
    """The chat template of a Hugging Face tokenizer folder.

    Example: with a ChatML template, an assistant's "Hi" is trained as "Hi<|im_end|>", as in the plain form.
    """

    def __init__(self, folder: Path) -> None:
        """Opens the folder; raises ConfigError if it has no tokenizer or no chat template."""
        require("--template hf", "transformers")
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--template hf needs a Hugging Face tokenizer folder, got {folder} ({error})") from error
        if not self._tokenizer.chat_template:
            raise ConfigError(f"--template hf needs a chat template, {folder} has none; use --template plain")

    def script(self, messages: Sequence[Message]) -> Script:
        """The rendered conversation; each assistant message is a span without its header and last line break.

        Raises:
            InputError: the template refuses the messages, drops a tool call, or rewrites earlier text when a message is
                added, so that no span of the whole text is what the policy saw.
        """
        records = [_record(message) for message in messages]
        text = self._render(records, opens_turn=False)
        turns = [i for i, message in enumerate(messages) if message.is_trained]
        spans = [self._span(text, records, i) for i in turns]
        for index, span in zip(turns, spans, strict=True):
            _check_calls(text[span.start : span.stop], messages[index], index)
        return Script(text=text, spans=tuple(span for span in spans if span.start < span.stop))

    def _span(self, text: str, records: list[dict[str, Any]], index: int) -> Span:
        before = self._render(records[:index], opens_turn=True)
        through = self._render(records[: index + 1], opens_turn=False)
        if not (through.startswith(before) and text.startswith(through)):
            raise InputError(
                f"the chat template must only append when a message is added, but it rewrites the text before "
                f"messages[{index}]; use --template plain or give tokens"
            )
        return Span(len(before), len(before) + len(through[len(before) :].rstrip("\n")))

    def _render(self, records: list[dict[str, Any]], *, opens_turn: bool) -> str:
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(records, tokenize=False, add_generation_prompt=opens_turn)
        except (TemplateError, ValueError, TypeError, IndexError) as error:
            raise InputError(
                f"the chat template refuses the first {len(records)} messages ({error}); use --template plain"
            ) from error
        return str(text)


def _check_calls(turn: str, message: Message, index: int) -> None:
    dropped = [call.name for call in message.tool_calls if call.name not in turn]
    if dropped:
        raise InputError(
            f"the chat template must render tool calls, but it drops {dropped[0]!r} of messages[{index}]; "
            f"use --template plain or a tokenizer whose template knows tools"
        )


def _record(message: Message) -> dict[str, Any]:
    record: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.name is not None:
        record["name"] = message.name
    if message.tool_call_id is not None:
        record["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        record["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return record
