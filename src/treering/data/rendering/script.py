"""Scripts: the text of a trajectory with the character spans that the policy wrote, for raw text and plain chats."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, starmap
from typing import NamedTuple

from treering.data.trajectory import Message, ToolCall

TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
THOUGHT_START, THOUGHT_END = "<think>", "</think>"


class Span(NamedTuple):
    """Characters `start` to `stop` (exclusive) of a script's text."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Text with its trained spans, one per assistant turn."""

    text: str
    """The text to tokenize."""
    spans: tuple[Span, ...] = ()
    """Ascending, disjoint and not empty."""
    markers: tuple[Span, ...] | None = None
    """Where special tokens stand: elsewhere their text is encoded as ordinary text. None: anywhere, as in text that a
    chat template wrote."""
    cuts: tuple[int, ...] = ()
    """Characters at which a token begins: inference encodes a prompt before its answer is known. Only of text without
    markers, ascending; no span crosses one."""

    def pieces(self) -> "list[Script]":
        """The script cut into scripts without cuts.

        Example: the text "ab" with the cut 1 and the span (1, 2) is "a", and "b" with the span (0, 1).
        """
        if not self.cuts:
            return [self]
        bounds = pairwise([0, *self.cuts, len(self.text)])
        return [self._piece(start, stop) for start, stop in bounds if start < stop]

    def _piece(self, start: int, stop: int) -> "Script":
        spans = tuple(Span(a - start, b - start) for a, b in self.spans if start <= a < stop)
        return Script(text=self.text[start:stop], spans=spans, markers=self.markers)


def message_script(message: Message) -> Script:
    r"""A message in the plain chat form; an assistant's span runs from its text to the end marker, inclusive.

    The form is `<|im_start|>{role}\n{thought}{content}{tool calls}<|im_end|>\n`, with a thought as
    `<think>\n{reasoning}\n</think>\n\n`.

    Example: an assistant's "Hi" is the text `<|im_start|>assistant\nHi<|im_end|>\n` with the span (22, 34).
    """
    head, thought = f"{message.role}\n", []
    if message.reasoning:
        thought = [head, THOUGHT_START, f"\n{message.reasoning.strip()}\n", THOUGHT_END]
    begin = "\n\n" if thought else head
    body = f"{begin}{message.content or ''}{tool_calls_text(message.tool_calls)}"
    parts = [TURN_START, *thought, body, TURN_END, "\n"]
    trained = Span(len(TURN_START) + len(head), sum(map(len, parts)) - 1)
    return _marked(parts, (trained,) if message.is_trained else ())


def turn_opening() -> Script:
    """What stands before an assistant's turn in the plain form."""
    return _marked([TURN_START, "assistant\n"], ())


def tool_calls_text(calls: Iterable[ToolCall]) -> str:
    """Tool calls as JSON objects, one per line, keys "name" then "arguments", characters unescaped.

    Arguments whose text is a JSON object stand as the model wrote them; other text, such as broken JSON, is a JSON
    string. Arguments without a text are written compactly.

    Example: `{"name":"search","arguments":{"query":"Zürich"}}`.
    """
    return "\n".join(_call_text(call) for call in calls)


def raw_script(messages: Sequence[Message]) -> Script:
    """The concatenated contents without markers; each assistant message with text is a span.

    Example: user "2+2=" and assistant "4" are the text "2+2=4" with the span (4, 5).
    """
    return join_scripts(_raw_message(message) for message in messages)


def join_scripts(scripts: Iterable[Script]) -> Script:
    """Joins scripts and shifts their spans; special tokens may stand anywhere if they may in one of them.

    Example: "ab" without span and "cd" with the span (0, 2) join to "abcd" with the span (2, 4).
    """
    texts: list[str] = []
    spans: list[Span] = []
    markers: list[Span] | None = []
    cuts: list[int] = []
    offset = 0
    for script in scripts:
        texts.append(script.text)
        spans.extend(_shifted(script.spans, offset))
        markers = None if markers is None or script.markers is None else [*markers, *_shifted(script.markers, offset)]
        cuts.extend(cut + offset for cut in script.cuts)
        offset += len(script.text)
    return Script(
        text="".join(texts),
        spans=tuple(spans),
        markers=None if markers is None else tuple(markers),
        cuts=tuple(cuts),
    )


def _marked(parts: Sequence[str], spans: tuple[Span, ...]) -> Script:
    """A script of texts, each after a marker."""
    ends = accumulate(map(len, parts), initial=0)
    return Script(text="".join(parts), spans=spans, markers=tuple(starmap(Span, pairwise(ends)))[::2])


def _raw_message(message: Message) -> Script:
    text = message.content or ""
    return Script(text=text, spans=(Span(0, len(text)),) if message.is_trained and text else ())


def _shifted(spans: Iterable[Span], offset: int) -> Iterator[Span]:
    return (Span(span.start + offset, span.stop + offset) for span in spans)


def _call_text(call: ToolCall) -> str:
    name = json.dumps(call.name, ensure_ascii=False)
    return f'{{"name":{name},"arguments":{_arguments_text(call)}}}'


def _arguments_text(call: ToolCall) -> str:
    if isinstance(call.arguments, str) and is_object_text(call.arguments):
        return call.arguments
    arguments = call.arguments if isinstance(call.arguments, str) else dict(call.arguments)
    return json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))


def is_object_text(text: str) -> bool:
    """Whether a text is a JSON object, as Python reads JSON: with NaN and infinities.

    Example: `{"x": NaN}` is one; `[1]` and `{"x": ` are not.
    """
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
