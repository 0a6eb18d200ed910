"""A tokenizer's own chat template: renders messages to text as inference does, or refuses them by name.

Needs jinja2 on first use, and no transformers.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import date as Date
from functools import cached_property, lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias

from treering.data.rendering.rendered_parts import restore_arguments
from treering.data.rendering.script import is_object_text
from treering.data.rendering.template_files import (
    CONFIG_FILE,
    chat_templates,
    named_tokens,
    read_settings,
    special_tokens,
)
from treering.data.rendering.turn_end import TurnEnd, find_turn_end
from treering.data.trajectory import Message, ToolCall
from treering.errors import ConfigError, InputError
from treering.extras import require

_Form: TypeAlias = Callable[[ToolCall], Mapping[str, Any] | str]
"""How a template gets the arguments of a call."""

_MARK = "mark-kram"
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_STANDARD_TOKENS = {f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
# Other classes of Transformers may have tokens of their own.
_CLASSES_WITHOUT_TOKENS = ("PreTrainedTokenizerFast", "TokenizersBackend")


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
            ConfigError: the folder has no chat template, or one that needs more than its files.
            MissingExtraError: jinja2 is not installed.
        """
        require("a chat template", "jinja2")
        self._folder = folder
        self._templates = chat_templates(folder)
        if not self._templates:
            raise ConfigError(
                f'template="hf" needs a chat template, and {folder} has none; use template="plain", or the tokenizer '
                "of a model that chats"
            )
        self._date = date or Date.today()
        self._named = named_tokens(folder)
        self._check()

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

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """Texts of the tokenizer's special tokens."""
        return special_tokens(self._folder)

    @cached_property
    def turn_end(self) -> TurnEnd:
        """How it ends an assistant's turn.

        Raises:
            InputError: the template opens a turn where the caller asked for none.
        """
        return find_turn_end(self.prompt, self.text, self.special_tokens)

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether a content must be a list of parts, as some templates of models that see want it."""
        return not self._shows({"content": _MARK}) and self._shows({"content": _parts(_MARK)})

    @cached_property
    def _takes_thinking_parts(self) -> bool:
        """Whether a thought must be a part of the content, as in Mistral's templates."""
        thought = {"content": "4"} | dict.fromkeys(_REASONING_KEYS, _MARK)
        parts = {"content": [{"type": "thinking", "thinking": _MARK}, *_parts("4")]}
        return not self._shows(thought, role="assistant") and self._shows(parts, role="assistant")

    def _shows(self, fields: Mapping[str, Any], role: str = "user") -> bool:
        """Whether a mark in a message comes out again."""
        question = {"role": "user", "content": _parts("2+2?") if role != "user" and self._takes_parts else "2+2?"}
        messages = [*([question] if role != "user" else []), {"role": role, **fields}]
        try:
            text = self._apply(messages, None, opens_turn=False)
            # A list that is printed as Python has it is not read as parts.
            return _MARK in text and "{'type'" not in text
        except _refusals():
            return False

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, opens_turn: bool) -> str:
        shown = [dict(tool) for tool in tools] or None
        # Some templates join the arguments of a call as text, most write an object as JSON.
        for form in (_as_object, attrgetter("arguments_text")):
            try:
                records = [self._record(message, form) for message in messages]
                return restore_arguments(self._apply(records, shown, opens_turn=opens_turn), messages)
            except _refusals() as error:
                refusal = error
                if not isinstance(error, TypeError):
                    break
        raise InputError(
            f'the chat template refuses the chat up to messages[{len(messages) - 1}] ({refusal}); use template="plain"'
            f"{_advice(messages)}"
        ) from refusal

    def _record(self, message: Message, form: _Form) -> dict[str, Any]:
        record = _record(message, form)
        if message.pictures:
            return record | {"content": _parts_with_pictures(message)}
        if message.reasoning and self._takes_thinking_parts:
            return record | {
                "content": [{"type": "thinking", "thinking": message.reasoning}, *_parts(record["content"])]
            }
        return record | {"content": _parts(record["content"])} if self._takes_parts else record

    def _apply(
        self, records: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, *, opens_turn: bool
    ) -> str:
        from treering.data.rendering.sandbox import compiled, plain

        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        render = compiled(self._templates[name], self._date)
        named = {name: text for name, text in self._named.items() if text is not None}
        return render(
            messages=plain(records), tools=plain(tools), documents=None, add_generation_prompt=opens_turn, **named
        )

    def _check(self) -> None:
        """Refuses templates that cannot be read, and those that need code of the folder or what no file says.

        Raises:
            ConfigError: names what is wrong.
        """
        from treering.data.rendering.sandbox import variables

        if "default" not in self._templates:
            names = ", ".join(self._templates)
            raise ConfigError(f"of several chat templates one is named default, and {self._folder} has {names}")
        used = set().union(*map(variables, self._templates.values()))
        settings = read_settings(self._folder / CONFIG_FILE)
        code = settings.get("auto_map")
        if isinstance(code, list) or (isinstance(code, dict) and code.get("AutoTokenizer")):
            raise ConfigError(
                f'template="hf" needs a tokenizer that is read from files, and {self._folder} brings Python code of '
                'its own, which is never run; use template="plain", or a folder with tokenizer.json alone'
            )
        unknown = sorted((used & _STANDARD_TOKENS) - self._named.keys())
        if unknown and settings.get("tokenizer_class") not in _CLASSES_WITHOUT_TOKENS:
            raise ConfigError(
                f"the chat template writes {unknown[0]}, and no file of {self._folder} says which token that is; add "
                f'"{unknown[0]}" to {CONFIG_FILE}, null if there is none'
            )


def _refusals() -> tuple[type[Exception], ...]:
    from treering.data.rendering.sandbox import REFUSALS

    return REFUSALS


def _parts(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}] if content else []


def _parts_with_pictures(message: Message) -> list[dict[str, str]]:
    first, *rest = (_parts(text) for text in message.stretches)
    return [*first, *(part for parts in rest for part in ({"type": "image"}, *parts))]


def _advice(messages: Sequence[Message]) -> str:
    """A further way out where a call has arguments that most templates cannot take apart."""
    for index, message in enumerate(messages):
        for call in message.tool_calls:
            if isinstance(call.arguments, str) and not is_object_text(call.arguments):
                return f", or repair the call of {call.name!r} in messages[{index}], whose arguments are no JSON object"
    return ""


def _as_object(call: ToolCall) -> Mapping[str, Any] | str:
    return _parsed(call.arguments) if isinstance(call.arguments, str) else dict(call.arguments)


@lru_cache(maxsize=4096)
def _parsed(arguments: str) -> Mapping[str, Any] | str:
    # Each prefix of a chat asks for the same calls again.
    return json.loads(arguments) if is_object_text(arguments) else arguments


def _record(message: Message, arguments: _Form) -> dict[str, Any]:
    record: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.reasoning is not None:
        # Model families read the thought under different names.
        record |= dict.fromkeys(_REASONING_KEYS, message.reasoning)
    if message.name is not None:
        record["name"] = message.name
    if message.tool_call_id is not None:
        record["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        record["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": arguments(call)}}
            | ({} if call.id is None else {"id": call.id})
            for call in message.tool_calls
        ]
    return record
