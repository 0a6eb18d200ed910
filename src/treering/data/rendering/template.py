"""Render messages to text by a tokenizer's chat template, as inference does.

The module imports jinja2 on first use, and does not need transformers.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date as Date
from functools import cached_property, lru_cache
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from treering.data.rendering.encoder import is_object_text
from treering.data.rendering.rendered_parts import common_length, restore_arguments
from treering.data.trajectory import Message, ToolCall
from treering.errors import ConfigError, InputError
from treering.extras import require
from treering.files.writing import read_object

CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
TEMPLATE_FILE = "chat_template.jinja"
_FURTHER_TEMPLATES = "additional_chat_templates/*.jinja"
TEMPLATE_FILES = (TEMPLATE_FILE, "chat_template.json", _FURTHER_TEMPLATES)
"""Patterns of template files; older processors have the second."""
PLAIN_TEMPLATE = (
    "{#- The plain form of Treering -#}\n"
    "{%- for message in messages %}\n"
    "{{- '<|im_start|>' + message.role + '\\n' }}\n"
    "{%- set thought = message.reasoning_content or message.reasoning %}\n"
    "{%- if thought %}{{- '<think>\\n' + thought.strip() + '\\n</think>\\n\\n' }}{%- endif %}\n"
    "{%- if message.content is string %}{{- message.content }}\n"
    "{%- else %}{%- for part in message.content or [] %}{{- part.text }}{%- endfor %}{%- endif %}\n"
    "{%- for item in message.tool_calls or [] %}\n"
    "{%- set call = item.function or item %}{%- set given = call.arguments or {} %}\n"
    "{{- ('' if loop.first else '\\n') + '{\"name\":' + call.name | tojson + ',\"arguments\":' }}\n"
    "{%- if given is string and given.strip() in ('', 'null', '\"\"', '\"null\"') %}{{- '{}' }}\n"
    "{%- elif given is string and given.strip().startswith('{') %}{{- given }}\n"
    "{%- else %}{{- given | tojson(separators=(',', ':')) }}{%- endif %}{{- '}' }}\n"
    "{%- endfor %}\n"
    "{{- '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}\n"
)
"""The plain form as a chat template, for checkpoints that were trained in it; `bos_token` is prepended."""


def chat_templates(folder: Path) -> Mapping[str, str]:
    """Return the chat templates of a folder by name; empty if it has none.

    A single template is called "default"; a template for chats with tools may be called "tool_use". Separate files take
    precedence over tokenizer_config.json.

    Raises:
        ConfigError: a file cannot be read.

    Example: a folder with only `chat_template.jinja` has `{"default": ...}`.
    """
    files = {path.stem: path for path in sorted(folder.glob(_FURTHER_TEMPLATES))}
    if (folder / TEMPLATE_FILE).is_file():
        files["default"] = folder / TEMPLATE_FILE
    if files:
        return MappingProxyType({name: _text(path) for name, path in files.items()})
    given = read_settings(folder / CONFIG_FILE).get("chat_template") or {}
    if isinstance(given, list):
        given = {one.get("name"): one.get("template") for one in given if isinstance(one, dict)}
    templates = {"default": given} if isinstance(given, str) else given
    if not isinstance(templates, dict) or not all(isinstance(text, str) for pair in templates.items() for text in pair):
        raise ConfigError(
            f"chat_template must be text, or a list of names and templates, and {folder / CONFIG_FILE} has another "
            "value; fetch it again"
        )
    return MappingProxyType(templates)


def named_tokens(folder: Path) -> Mapping[str, str | None]:
    """Return the named special tokens of a folder, such as bos_token; None for names that are set to null.

    Example: Qwen2 has `{"bos_token": None, "eos_token": "<|endoftext|>", ...}`.
    """
    settings = read_settings(folder / CONFIG_FILE)
    if "added_tokens_decoder" not in settings:
        # Older folders name the tokens in a separate file.
        settings |= read_settings(folder / SPECIAL_TOKENS_FILE)
    extra = settings.get("extra_special_tokens")
    named = {name: value for name, value in settings.items() if name.endswith("_token")}
    named |= extra if isinstance(extra, dict) else {}
    texts = {name: token_text(value) for name, value in named.items()}
    return MappingProxyType({name: texts[name] for name in named if texts[name] or named[name] is None})


def end_of_text(folder: Path) -> str | None:
    """Return the `eos_token`, which ends a text; None if the folder does not name it."""
    files = (read_settings(folder / name) for name in (CONFIG_FILE, SPECIAL_TOKENS_FILE))
    return next((text for text in (token_text(settings.get("eos_token")) for settings in files) if text), None)


def token_text(value: Any) -> str | None:
    """Return the text of a token that is stored as text or as an object with settings; None for other values."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def read_settings(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a tokenizer folder; {} if the file is missing.

    Raises:
        ConfigError: the file is not a JSON object.
    """
    return read_object(file, ConfigError) if file.is_file() else {}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"a tokenizer file must be readable, and {file} is not ({error}); fetch it again") from error


_QUESTION, _ANSWER, _NEXT = "mark-1-kram", "mark-2-kram", "mark-3-kram"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnd:
    """How the template ends a chat's last turn, compared with the same turn before others."""

    missing: str = ""
    """Token that ends a turn but is written only if another turn follows, such as the next role in GLM."""
    added: str = ""
    """Token that the template writes only after the last turn, such as the end of text in Phi-3."""

    def length(self, written: str) -> int:
        """Return the length of the policy's part of a last turn: all but line breaks at its end and `added`."""
        return len(written.rstrip("\n").removesuffix(self.added).rstrip("\n"))


def _find_turn_end(template: "ChatTemplate") -> TurnEnd:
    r"""Compare an answer at the end of a chat with the same answer before a further question.

    Example: Phi-3's template writes `<|end|>\n<|endoftext|>` after a last answer and `<|end|>\n<|user|>` before a
    question, so `added` is `<|endoftext|>`.
    """
    asked, answered = Message(role="user", content=_QUESTION), Message(role="assistant", content=_ANSWER)
    try:
        opened, alone, once = template.prompt([asked]), template.text([asked]), template.text([asked, answered])
        again = template.text([asked, answered, Message(role="user", content=_NEXT)])
    except InputError:
        return TurnEnd()
    special_tokens, last = template.special_tokens, once.partition(_ANSWER)[2]
    opening = opened.partition(_QUESTION)[2]
    if opened == alone and opening.strip() and last.endswith(opening):
        raise InputError(
            f"a chat template must open a turn only where add_generation_prompt is set, and it always does, with "
            f'{opening!r:.80}; use template="plain", or another template of this model'
        )
    between = again.partition(_ANSWER)[2].partition(_NEXT)[0]
    if not last.strip():
        return TurnEnd(missing=leading_token(between, special_tokens))
    shared = common_length(last, between)
    ends = [found.end() for found in _any_of(special_tokens).finditer(last) if found.end() <= shared]
    added = last[ends[-1] :].strip() if ends else ""
    return TurnEnd(added=added if added in special_tokens else "")


def leading_token(text: str, special_tokens: Sequence[str]) -> str:
    r"""Return the special token that a text begins with; "" if there is none."""
    found = _any_of(special_tokens).match(text)
    return found.group() if found else ""


def _any_of(special_tokens: Sequence[str]) -> re.Pattern[str]:
    # Longest first, since a token may be a prefix of another. Without tokens, the pattern matches nothing.
    return re.compile("|".join(map(re.escape, sorted(special_tokens, key=len, reverse=True))) or r"(?!)")


_ArgumentsOf: TypeAlias = Callable[[ToolCall], Mapping[str, Any] | str]
"""Return the arguments of a call as a template gets them: an object, or text."""

_MARK = "mark-kram"
_ODD_KEY = "odd-kram"
"""Key that no template reads; it appears in the text only if a template prints a whole part as Python or JSON."""
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_OWN_VARIABLES = {"messages", "tools", "documents", "add_generation_prompt"}
_STANDARD_TOKENS = {f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
# Tokenizer classes whose special tokens are all in the files; others may define some in code.
_CLASSES_WITHOUT_TOKENS = ("PreTrainedTokenizerFast", "TokenizersBackend")


class ChatTemplate:
    r"""The chat template of a Hugging Face tokenizer folder.

    Example: with a ChatML template, `prompt([Message(role="user", content="Hi")])` is
    `<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n`.
    """

    def __init__(
        self, folder: Path, *, date: Date | None = None, variables: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Open the folder; the other arguments are those of `Renderer`.

        Raises:
            ConfigError: the folder has no chat template, or the template needs code, or tokens that no file names, or
                does not read one of the variables.
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
        self._variables = variables
        self._check()

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return the text before the policy's turn: the messages and the opening of the turn.

        Raises:
            InputError: the template refuses the messages; also raised by `text`.
        """
        return self._render(messages, tools, opens_turn=True)

    def text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return the rendered messages without an open turn."""
        return self._render(messages, tools, opens_turn=False)

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """Texts of the tokenizer's special tokens, each once."""
        settings = read_settings(self._folder / CONFIG_FILE)
        added = [
            *read_settings(self._folder / "tokenizer.json").get("added_tokens", ()),
            *settings.get("added_tokens_decoder", {}).values(),
        ]
        lists = [settings.get(name) for name in ("additional_special_tokens", "extra_special_tokens")]
        listed = [token for tokens in lists if isinstance(tokens, list) for token in tokens]
        found = [*(token for token in added if token.get("special")), *listed, *self._named.values()]
        return tuple(dict.fromkeys(text for text in map(token_text, found) if text))

    @cached_property
    def turn_end(self) -> TurnEnd:
        """The end of an assistant's turn."""
        return _find_turn_end(self)

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether a content must be a list of parts, as in some templates of vision models."""
        parts = [part | {_ODD_KEY: ""} for part in _parts(_MARK)]
        return not self._shows({"content": _MARK}) and self._shows({"content": parts})

    @cached_property
    def _takes_thinking_parts(self) -> bool:
        """Whether a thought must be a part of the content, as in Mistral's templates."""
        thought = {"content": "4"} | dict.fromkeys(_REASONING_KEYS, _MARK)
        parts = {"content": [{"type": "thinking", "thinking": _MARK, _ODD_KEY: ""}, *_parts("4")]}
        return not self._shows(thought, role="assistant") and self._shows(parts, role="assistant")

    def _shows(self, fields: Mapping[str, Any], role: str = "user") -> bool:
        """Return whether the template renders a mark in a message."""
        question = {"role": "user", "content": _parts("2+2?") if role != "user" and self._takes_parts else "2+2?"}
        messages = [*([question] if role != "user" else []), {"role": role, **fields}]
        try:
            text = self._apply(messages, None, opens_turn=False)
            # A template that prints parts as Python or JSON does not read them.
            return _MARK in text and _ODD_KEY not in text
        except _refusals():
            return False

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, opens_turn: bool) -> str:
        shown = [dict(tool) for tool in tools] or None
        # Some templates concatenate the arguments of a call as text; most dump an object as JSON.
        for arguments in (_as_object, attrgetter("arguments_text")):
            try:
                records = [self._record(message, arguments) for message in messages]
                return restore_arguments(self._apply(records, shown, opens_turn=opens_turn), messages)
            except _refusals() as error:
                refusal = error
                if not isinstance(error, TypeError):
                    break
        raise InputError(
            f'the chat template refuses the chat up to messages[{len(messages) - 1}] ({refusal}); use template="plain"'
            f"{_advice(messages)}"
        ) from refusal

    def _record(self, message: Message, arguments: _ArgumentsOf) -> dict[str, Any]:
        record = _record(message, arguments)
        if message.images:
            first, *rest = (_parts(text) for text in message.stretches)
            return record | {"content": [*first, *(part for parts in rest for part in ({"type": "image"}, *parts))]}
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
            messages=plain(records),
            tools=plain(tools),
            documents=None,
            add_generation_prompt=opens_turn,
            **(named | plain(self._variables)),
        )

    def _check(self) -> None:
        """Check that the template is valid and needs neither code of the folder nor unknown tokens."""
        from treering.data.rendering.sandbox import variables

        if "default" not in self._templates:
            names = ", ".join(self._templates)
            raise ConfigError(
                f"one of several chat templates must be named default, and {self._folder} has {names}; rename one"
            )
        used = set().union(*map(variables, self._templates.values()))
        for name in self._variables:
            if name in _OWN_VARIABLES or name not in used:
                raise ConfigError(
                    f"a chat template gets values for the variables that it reads, and that of {self._folder} reads "
                    f"no variable {name!r} of a caller's; remove it"
                )
        settings = read_settings(self._folder / CONFIG_FILE)
        code = settings.get("auto_map")
        if isinstance(code, list) or (isinstance(code, dict) and code.get("AutoTokenizer")):
            raise ConfigError(
                f'template="hf" needs a tokenizer that is read from files, and {self._folder} brings its own '
                'Python code, which is never run; use template="plain", or a folder that has only tokenizer.json'
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


def _advice(messages: Sequence[Message]) -> str:
    """Return further advice if a call has arguments that most templates cannot parse."""
    for index, message in enumerate(messages):
        for call in message.tool_calls:
            if isinstance(call.given, str) and not is_object_text(call.given):
                return f", or repair the call of {call.name!r} in messages[{index}]; arguments must be a JSON object"
    return ""


def _as_object(call: ToolCall) -> Mapping[str, Any] | str:
    return _parsed(call.given) if isinstance(call.given, str) else dict(call.given)


@lru_cache(maxsize=4096)
def _parsed(arguments: str) -> Mapping[str, Any] | str:
    # Cached, because every rendered prefix of a chat needs the same calls.
    return json.loads(arguments) if is_object_text(arguments) else arguments


def _record(message: Message, arguments: _ArgumentsOf) -> dict[str, Any]:
    record: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.reasoning is not None:
        # Model families read reasoning under different names.
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


Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""JSON schemas of tools."""


class RenderedChat:
    """The rendered prefixes of a chat.

    Example: under ChatML, with one user message "Hi", `closed(1)` ends with the end marker, and `opened(1)` is the
    prompt of the first answer.
    """

    def __init__(self, template: ChatTemplate, messages: Sequence[Message], tools: Tools = ()) -> None:
        """Store the messages, which are rendered on demand."""
        self.template = template
        self.messages = tuple(messages)
        self.tools = tools
        self._opened: dict[int, str] = {}
        self._closed: dict[int, str] = {}

    def opened(self, count: int) -> str:
        """Return the first `count` messages and the opening of a turn, as at inference."""
        if count not in self._opened:
            self._opened[count] = self.template.prompt(self.messages[:count], self.tools)
        return self._opened[count]

    def closed(self, count: int) -> str:
        """Return the first `count` messages without an open turn."""
        if count not in self._closed:
            self._closed[count] = self.template.text(self.messages[:count], self.tools)
        return self._closed[count]

    def text(self, messages: Sequence[Message]) -> str:
        """Return other messages under the same template and tools."""
        return self.template.text(messages, self.tools)

    @cached_property
    def whole(self) -> str:
        """All messages, without an open turn."""
        return self.closed(len(self.messages))

    @cached_property
    def num_seen(self) -> int:
        """Number of messages before the last turn of the policy; all if it has none."""
        trained = [i for i, message in enumerate(self.messages) if message.is_trained and i]
        return trained[-1] if trained else len(self.messages)

    @property
    def seen(self) -> str:
        """The last and longest prompt of the policy."""
        return self.opened(self.num_seen)
