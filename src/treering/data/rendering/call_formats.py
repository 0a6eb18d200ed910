"""The formats in which models write tool calls, and the detection of a chat template's format.

A format is an entry of `FORMATS`: an opening, a body (JSON, tags of parameters, Python, Gemma's notation) and a
closing. The format of a template is the one that reads a rendered call.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, TypeAlias

from treering.data.formats.chat_messages import decode_call, tool_name
from treering.data.rendering.chat_turns import probed_turn
from treering.data.rendering.template import ChatTemplate, Tools
from treering.data.rendering.thoughts import answer_start
from treering.data.trajectory import Message, ToolCall
from treering.errors import InputError, UnsupportedError

Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the parameters of each tool, by tool and parameter."""
Body: TypeAlias = Callable[[re.Match[str], Schemas], tuple[list[ToolCall], int] | None]
"""Returns the calls after an opening and their end. Returns None, or raises one of `NOT_READ`, if there is no call."""

_DECODER = json.JSONDecoder()
_BETWEEN = re.compile(r"\s*[,;]?\s*(?=[{\[])")
_KEY = re.compile(r"(?<=[{,])\s*([^\s{}\[\],:\"]+)\s*:")
_STRING = re.compile(r"='(.*?)'(?=, *\w+=|\)(?:, |\]?$))", re.DOTALL)
_MAX_ENDS = 8
"""Number of ends that are tried for a call in Python, since an end may be inside a string."""
NOT_READ = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, InputError)
_KINDS: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


def records(*keys: str) -> Body:
    """Return a reader of JSON objects, or lists of them, with a name and arguments under one of the keys.

    Example: `records("arguments")` reads `[{"name": "f", "arguments": {}}]`.
    """

    def read(found: re.Match[str], _: Schemas) -> tuple[list[ToolCall], int] | None:
        calls: list[ToolCall] = []
        text, at = found.string, found.end()
        while True:
            try:
                value, end = _DECODER.raw_decode(text, at)
                calls += [_record(each, keys) for each in (value if isinstance(value, list) else [value])]
            except NOT_READ:
                break
            stop, between = end, _BETWEEN.match(text, end)
            if between is None:
                break
            at = between.end()
        return (calls, stop) if calls else None

    return read


def named(found: re.Match[str], _: Schemas) -> tuple[list[ToolCall], int] | None:
    """Read the arguments, a JSON object, of a call whose opening has the groups `name` and perhaps `id`."""
    value, end = _DECODER.raw_decode(found.string, found.end())
    return [_call(found["name"], value, found.groupdict().get("id"))], end


def tags(parameter: str) -> Body:
    """Return a reader of parameters by a pattern with the groups `key` and `value`, typed by the tool's schema."""
    pattern = re.compile(parameter, re.DOTALL)

    def read(found: re.Match[str], schemas: Schemas) -> tuple[list[ToolCall], int] | None:
        name, at, arguments = found["name"].strip(), found.end(), {}
        while one := pattern.match(found.string, at):
            key = one["key"].strip()
            arguments[key] = _typed(one["value"], schemas.get(name, {}).get(key))
            at = one.end()
        return [_call(name, arguments)], at

    return read


def python(end: str) -> Body:
    """Return a reader of Python calls with keywords, in a list or one per line, up to the pattern `end`.

    Example: `[f(a=1), g(b='x', c={"d": true})]` has the calls f and g.
    """
    pattern = re.compile(end)

    def read(found: re.Match[str], _: Schemas) -> tuple[list[ToolCall], int] | None:
        for stop, _number in zip(pattern.finditer(found.string, found.end()), range(_MAX_ENDS), strict=False):
            body = found.string[found.end() : stop.start()].strip()
            # Some templates do not escape quotes and line breaks in strings.
            for text in (body, _STRING.sub(lambda one: f"={json.dumps(one[1], ensure_ascii=False)}", body)):
                try:
                    return _python_calls(text), stop.start()
                except NOT_READ:
                    continue
        return None

    return read


def marked(mark: str) -> Body:
    """Return a reader of an object with bare keys whose strings are between two marks, as Gemma 4 writes it.

    Example: with the mark `<|"|>`, `{days:3,place:<|"|>Oslo<|"|>}` is `{"days": 3, "place": "Oslo"}`.
    """
    pattern = re.compile(rf"{re.escape(mark)}|[{{}}]")

    def read(found: re.Match[str], _: Schemas) -> tuple[list[ToolCall], int] | None:
        depth, inside = 0, False
        for one in pattern.finditer(found.string, found.end()):
            if one.group() == mark:
                inside = not inside
            elif not inside:
                depth += 1 if one.group() == "{" else -1
                if depth == 0:
                    break
        else:
            return None
        parts = found.string[found.end() : one.end()].split(mark)
        # Templates write null as None.
        bare = [re.sub(r"\bNone\b", "null", _KEY.sub(r'"\1":', part)) for part in parts]
        value = json.loads("".join(json.dumps(part) if i % 2 else bare[i] for i, part in enumerate(parts)))
        return [_call(found["name"], value)], one.end()

    return read


def _record(value: object, keys: tuple[str, ...]) -> ToolCall:
    """Return the call in a JSON object, or raise InputError."""
    if not isinstance(value, dict):
        raise InputError(f"a tool call is an object, got {value!r:.60}")
    inner = value["function"] if isinstance(value.get("function"), dict) else value
    key = next((key for key in keys if key in inner), None)
    if key is None:
        raise InputError(f"a tool call has {' or '.join(keys)}, got {value!r:.60}")
    return _call(inner.get("name", inner.get("tool_name")), inner[key], value.get("id"))


def _call(name: object, arguments: object, identifier: object = None) -> ToolCall:
    return decode_call({"name": name, "arguments": arguments, "id": identifier}, "a tool call")


def _typed(text: str, schema: Any) -> Any:
    """Convert a text by its schema: a string if only strings are allowed, else a JSON or Python value if it is one."""
    kinds = _kinds_of(schema)
    if kinds == {"string"}:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        try:
            value = ast.literal_eval(text.strip())
        except NOT_READ:
            return text
    kind = _KINDS.get(type(value))
    if kind is None or (kinds and kind not in kinds and not (kind == "integer" and "number" in kinds)):
        return text
    return value


def _kinds_of(schema: Any) -> set[str]:
    """Return the types that a JSON schema allows; empty if it has none."""
    if not isinstance(schema, Mapping):
        return set()
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return {kinds} | ({"null"} if schema.get("nullable") else set())
    if isinstance(kinds, list | tuple):
        return set(kinds)
    options = [_kinds_of(each) for key in ("anyOf", "oneOf") for each in schema.get(key) or ()]
    if options and all(options):
        return set().union(*options)
    allowed = schema.get("enum")
    return {_KINDS.get(type(value), "") for value in allowed} if isinstance(allowed, list) else set()


class _JsonWords(ast.NodeTransformer):
    """Transformer of true, false and null to Python's constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        words = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node


def _python_calls(text: str) -> list[ToolCall]:
    values = [getattr(statement, "value", None) for statement in ast.parse(text).body]
    nodes = [node for value in values for node in (value.elts if isinstance(value, ast.List) else [value])]
    if not nodes:
        raise InputError("a turn calls at least one tool")
    return [_python_call(node) for node in nodes]


def _python_call(node: ast.AST | None) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        raise InputError("a tool call in Python is a name with keywords")
    found = {each.arg: ast.literal_eval(_JsonWords().visit(each.value)) for each in node.keywords}
    if None in found:
        raise InputError("the arguments of a tool call have names")
    # JSON turns tuples into lists and refuses other types.
    return _call(ast.unparse(node.func), json.loads(json.dumps(found)))


class CallFormat(Protocol):
    """A format of tool calls."""

    def split(self, text: str, tools: Tools = ()) -> tuple[str, tuple[ToolCall, ...]]:
        """Return the text without its calls, and the calls in order; an incomplete call stays text."""


@dataclass(frozen=True, slots=True)
class WrittenFormat:
    """A format with an opening, a body and a closing."""

    opening: re.Pattern[str]
    body: Body
    closing: re.Pattern[str]

    def split(self, text: str, tools: Tools = ()) -> tuple[str, tuple[ToolCall, ...]]:
        """Split off the calls that match the opening, body and closing."""
        schemas = _schemas(tools)
        kept: list[str] = []
        calls: list[ToolCall] = []
        # Stop at the last closing, since a turn may open thousands of calls and close none.
        ends = re.finditer(self.closing.pattern.removeprefix(r"\s*"), text, re.MULTILINE)
        last = max((found.start() for found in ends), default=-1)
        at = done = 0
        while (found := self.opening.search(text, at)) and found.start() <= last:
            try:
                read = self.body(found, schemas)
            except NOT_READ:
                read = None
            end = self.closing.match(text, read[1]) if read else None
            if read is None or end is None:
                at = max(found.end(), at + 1)
                continue
            kept.append(text[done : found.start()])
            calls += read[0]
            at = done = end.end()
        return "".join([*kept, text[done:]]), tuple(calls)


@dataclass(frozen=True, slots=True)
class DescribedFormat:
    """A format that the tokenizer's settings describe and transformers parses."""

    key: str
    """"response_template" (transformers 5.13 and later) or "response_schema" (earlier)."""
    description: Mapping[str, Any]

    def split(self, text: str, tools: Tools = ()) -> tuple[str, tuple[ToolCall, ...]]:
        """Split off the calls that transformers parses; text that it cannot parse has none."""
        try:
            message = self._message(text, [dict(tool) for tool in tools])
            found = [each.get("function", each) for each in message.get("tool_calls") or ()]
            calls = tuple(decode_call(each, "a tool call") for each in found)
        except Exception:
            # Errors have many types; a truncated or broken call stays text.
            return text, ()
        return (message.get("content") or "", calls) if calls else (text, ())

    def _message(self, text: str, tools: list[dict[str, Any]]) -> Any:
        parsing, description = "transformers.utils.chat_parsing", dict(self.description)
        if self.key == "response_template":
            return import_module(parsing).parse_response(text, description, prefix="", tools=tools)
        return import_module(f"{parsing}_utils").recursive_parse(text, description)


def _delimited(opening: str, body: Body, closing: str) -> WrittenFormat:
    return WrittenFormat(re.compile(opening, re.MULTILINE), body, re.compile(closing, re.MULTILINE))


_LIST = records("arguments", "parameters")
_WRAPPED = r"(?:<[^\s<>/]*(?:function_calls|tool_calls?)>\s*)?"
_UNWRAPPED = r"(?:\s*</[^\s<>]*(?:function_calls|tool_calls?)>)?"

TAGGED = _delimited(r"<tool_call>\s*", records("arguments"), r"\s*</tool_call>")
"""Hermes, Qwen2.5, Qwen3: JSON between <tool_call> and </tool_call>."""
LINES = _delimited(r"^[ \t]*(?=[{\[])", records("arguments"), r"[ \t]*(?=$|<)")
"""JSON with name and arguments on its own line."""

FORMATS: Mapping[str, WrittenFormat] = {
    "Hermes": TAGGED,
    "Qwen3-Coder": _delimited(
        r"(?:<(?:seed:)?tool_call>\s*)?<function=(?P<name>[^>\n]+)>(?!\s*\{)",
        tags(
            r"\s*<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
            r"(?=\s*(?:<parameter=|</function>))"
        ),
        r"\s*</function>(?:\s*</(?:seed:)?tool_call>)?",
    ),
    "GLM": _delimited(
        r"<tool_call>\s*(?P<name>[^\s<{]+)\s*(?=<arg_key>|</tool_call>)",
        tags(
            r"\s*<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
            r"(?=\s*(?:<arg_key>|</tool_call>))"
        ),
        r"\s*</tool_call>",
    ),
    "invoke": _delimited(
        rf"(?:(?:<\|start\|>assistant)? ?to=[^\s<]+<\|message\|>\s*)?{_WRAPPED}"
        r'<[^\s<>/]*?invoke name="(?P<name>[^"]+)">',
        tags(
            r'\s*<[^\s<>/]*?parameter name="(?P<key>[^"]+)"[^<>]*>(?P<value>.*?)</[^\s<>]*?parameter>'
            r"(?=\s*</?[^\s<>/]*?(?:parameter name|invoke))"
        ),
        rf"\s*</[^\s<>]*?invoke>{_UNWRAPPED}",
    ),
    "harmony": _delimited(
        r"(?:<\|start\|>assistant)?(?:<\|channel\|>commentary)? ?to=(?:functions\.)?(?P<name>[\w.-]+)"
        r"(?:<\|channel\|>commentary)?\s*(?:<\|constrain\|>)?\s*(?:json)?\s*<\|message\|>\s*(?=\{)",
        named,
        r"\s*(?:<\|call\|>|<\|end\|>|\Z)",
    ),
    "Gemma 4": _delimited(
        r"<\|tool_call>\s*call:(?P<name>[\w.-]+)\s*(?=\{)", marked('<|"|>'), r"\s*<tool_call\|>(?:<\|tool_response>)?"
    ),
    "FunctionGemma": _delimited(
        r"<start_function_call>\s*call:(?P<name>[\w.-]+)\s*(?=\{)",
        marked("<escape>"),
        r"\s*<end_function_call>(?:<start_function_response>)?",
    ),
    "LFM2": _delimited(r"<\|tool_call_start\|>\s*", python(r"<\|tool_call_end\|>"), r"<\|tool_call_end\|>"),
    "OLMo 3": _delimited(r"<function_calls>\s*", python("</function_calls>"), "</function_calls>"),
    "DeepSeek": _delimited(
        r"(?:<\uff5ctool▁calls▁begin\uff5c>\s*)?<\uff5ctool▁call▁begin\uff5c>(?:function<\uff5ctool▁sep\uff5c>)?(?P<name>[^\s<>{]+)"
        r"(?:<\uff5ctool▁sep\uff5c>)?\s*(?:```json\s*)?(?=\{)",
        named,
        r"\s*(?:```\s*)?<\uff5ctool▁call▁end\uff5c>(?:\s*<\uff5ctool▁calls▁end\uff5c>)?",
    ),
    "Mistral": _delimited(r"\[TOOL_CALLS\]\s*(?=\[)", _LIST, ""),
    "Mistral, one call each": _delimited(
        r"\[TOOL_CALLS\]\s*(?P<name>[^\s\[\]{}]+?)\s*(?:\[CALL_ID\]\s*(?P<id>[^\s\[\]]+)\s*)?(?:\[ARGS\])?\s*(?=\{)",
        named,
        "",
    ),
    "Cohere": _delimited(r"<\|START_ACTION\|>\s*", _LIST, r"\s*<\|END_ACTION\|>"),
    "Command R": _delimited(r"Action:\s*```json\s*", _LIST, r"\s*```"),
    "Kimi K2": _delimited(
        r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*"
        r"(?P<id>(?:functions\.)?(?P<name>[\w.-]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>\s*",
        named,
        r"\s*<\|tool_call_end\|>(?:\s*<\|tool_calls_section_end\|>)?",
    ),
    "Phi-4, Granite 3": _delimited(r"<\|tool_call\|>\s*", _LIST, r"(?:\s?<\|/tool_call\|>)?"),
    "Hunyuan, MiniMax": _delimited(r"<tool_calls>\s*", _LIST, r"\s*</tool_calls>"),
    "InternLM": _delimited(r"<\|action_start\|>\s*<\|plugin\|>\s*", _LIST, r"\s*<\|action_end\|>"),
    "functionary": _delimited(r"<function=(?P<name>[^>\s]+)>\s*(?=\{)", named, r"\s*</function>"),
    "Llama 4": _delimited(
        r"^[ \t]*(?:<\|python_start\|>)?(?=\[\w)",
        python(r"(?m)(?<=\])(?=[ \t]*(?:$|<))"),
        r"[ \t]*(?:<\|python_end\|>)?(?=$|[ \t]*<)",
    ),
    "Llama 3": _delimited(r"^[ \t]*(?:<\|python_tag\|>)?(?=\{)", records("parameters"), r"[ \t]*;?[ \t]*(?=$|<)"),
    "lines of JSON": LINES,
}
"""Formats by name; a format that reads only part of another format's calls comes after it."""


class PlainFormat:
    """The format of chats without a template: `TAGGED`, or `LINES` if there is no tag."""

    def split(self, text: str, tools: Tools = ()) -> tuple[str, tuple[ToolCall, ...]]:
        """Split by `TAGGED` if the text has its tag, else by `LINES`."""
        rest, calls = TAGGED.split(text, tools)
        return (rest, calls) if calls else LINES.split(text, tools)


_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "find_it",
        "description": "Find it.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "Where."},
                "days": {"type": "integer", "description": "When."},
            },
            "required": ["place", "days"],
        },
    },
}
_ARGUMENTS = {"place": "Oslo 7", "days": 3}
# Mistral's templates require nine letters or digits, and Kimi's write only the id.
_IDS = ("call00001", "functions.find_it:0")
_MARKER = re.compile(r"<[|\uff5c][^<>\s]*>|<[^<>\s]*[|\uff5c]>|</s>")
_ANSWER = "mark-kram"


def find_call_format(template: ChatTemplate, settings: Mapping[str, Any]) -> CallFormat:
    """Return the format that reads a call which the template has rendered.

    A description of the format in the settings of the tokenizer is tried first.

    Raises:
        UnsupportedError: no format reads the call.
    """
    keys = [key for key in ("response_template", "response_schema") if isinstance(settings.get(key), Mapping)]
    call_formats: list[CallFormat] = [*(DescribedFormat(key, settings[key]) for key in keys), *FORMATS.values()]
    written = ""
    for identifier in _IDS:
        call = ToolCall(name="find_it", arguments=_ARGUMENTS, id=identifier)
        written = _written(template, Message(role="assistant", content="", tool_calls=(call,))) or written
        ends = {*template.special_tokens, _written(template, Message(role="assistant", content=_ANSWER)).strip()}
        for call_format in call_formats:
            if _reads(call_format, written, ends):
                return call_format
    raise UnsupportedError(
        "tools= needs a chat template whose tool calls Treering can read, and this one writes a call of find_it as "
        f"{written!r:.90}; write the schemas into a message, leave out tools=, and read the calls from reply.text"
    )


def _written(template: ChatTemplate, turn: Message) -> str:
    """Return the text that the policy writes in a turn; empty if the template refuses the turn."""
    found = probed_turn(template, "Find it.", turn, [_TOOL])
    return "" if found is None else found.text[found.span.start : found.span.stop].rpartition(_ANSWER)[2]


def _reads(call_format: CallFormat, written: str, ends: set[str]) -> bool:
    rest, calls = call_format.split(written[answer_start(written) or 0 :], [_TOOL])
    if [(call.name, call.arguments) for call in calls] != [("find_it", _ARGUMENTS)]:
        return False
    for end in sorted(ends, key=len, reverse=True):
        rest = rest.replace(end, "") if end else rest
    return not _MARKER.sub("", rest).strip()


def _schemas(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    found = {}
    for tool in tools:
        inner = tool.get("function")
        parameters = (inner if isinstance(inner, Mapping) else tool).get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        found[tool_name(tool) or ""] = properties if isinstance(properties, Mapping) else {}
    return found
