"""Sequences of a chat under a chat template: each assistant turn after the prompt that inference would have seen.

A template that only appends gives one sequence. One that rewrites earlier text, such as one that strips thoughts from
history, gives a sequence per rewritten turn; they share their beginnings, so together they are a tree.
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from treering.data.formats.tool_calls import tool_name
from treering.data.rendering.rendered_parts import THOUGHT_TAG, missing_part
from treering.data.rendering.script import Script, Span
from treering.data.rendering.template import ChatTemplate
from treering.data.trajectory import Message
from treering.errors import DataWarning, InputError

Tools = Sequence[Mapping[str, Any]]

_OPENED_THOUGHT = re.compile(r"\s*<(?P<tag>[\w:]*think[\w:]*)>\s*")
_EMPTY_THOUGHT = re.compile(r"\s*(?:<[\w:]*think[\w:]*>\s*)?</[\w:]*think[\w:]*>\s*|\s*\[THINK\]\s*\[/THINK\]\s*")


def chat_scripts(template: ChatTemplate, messages: Sequence[Message], tools: Tools = ()) -> list[Script]:
    """The sequences of a chat, at least one; each trained message is a span of exactly one of them.

    A span is what the policy wrote: an empty thought that the template adds stands before it, a last line break after
    it.

    Raises:
        InputError: the template refuses the messages or tools, or drops a part of them.

    Example: user, assistant, user, assistant under ChatML are one sequence of two spans. Under Qwen3's template, with
    thoughts, they are two sequences: in the second the first answer has no thought.
    """
    check_rendered(template, messages, tools)
    found: list[Script] = []
    for i, message in enumerate(messages):
        if message.is_trained:
            turn = _turn(template, messages[: i + 1], tools)
            found = _appended(found, turn)
    whole = template.text(messages, tools)
    if not found:
        return [Script(text=whole)]
    if _extends(whole, found[-1]):
        found[-1] = replace(found[-1], text=whole)
    return [replace(script, cuts=tuple(span.start for span in script.spans)) for script in found]


def check_rendered(template: ChatTemplate, messages: Sequence[Message], tools: Tools = ()) -> None:
    """Refuses a chat of which the template drops something: a text, a call with its arguments, or the tools.

    Each message is compared with the text that it adds. In case a template says the same words by itself, the contents
    are also replaced by marks, which must come out again.

    Raises:
        InputError: the dropped part and its message.
    """
    _check_tools(template, messages, tools)
    before, first = "", 0
    for i in range(len(messages)):
        try:
            text = template.text(messages[: i + 1], tools)
        except InputError:
            # Some templates refuse a chat that ends here, as after the system message.
            if i + 1 == len(messages):
                raise
            continue
        added = text[_common_length(before, text) :]
        for index in range(first, i + 1):
            _refuse_loss(missing_part(_without_thoughts(messages[index]), added), messages, index)
        before, first = text, i + 1
    # A template may cut earlier answers; each is compared in its own turn.
    _check_marks(template, messages, tools, [i for i, message in enumerate(messages) if message.role != "assistant"])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """A prompt with the policy's turn after it."""

    text: str
    start: int
    """Where the policy's own text begins."""

    @property
    def span(self) -> Span:
        """The policy's text without the template's last line break."""
        return Span(self.start, self.start + len(self.text[self.start :].rstrip("\n")))


def _turn(template: ChatTemplate, messages: Sequence[Message], tools: Tools) -> _Turn:
    message, index = messages[-1], len(messages) - 1
    prompt, whole = template.prompt(messages[:-1], tools), template.text(messages, tools)
    if whole.startswith(prompt):
        lead = None if _has_thought(message) else _EMPTY_THOUGHT.match(whole, len(prompt))
        turn = _Turn(text=whole, start=lead.end() if lead else len(prompt))
    else:
        turn = _thinking_turn(prompt, whole, message, index)
    _refuse_loss(missing_part(message, turn.text[turn.start :]), messages, index)
    if message.content and message.tool_calls:
        _check_marks(template, messages, tools, [index])
    if message.reasoning and message.reasoning.strip() not in turn.text[turn.start :]:
        raise InputError(
            f"the chat template must render thoughts, but it drops the reasoning of messages[{index}]; use --template "
            "plain, or remove the reasoning"
        )
    return turn


def _thinking_turn(prompt: str, whole: str, message: Message, index: int) -> _Turn:
    """A turn whose prompt opens a thought that the template leaves out of a finished turn."""
    shared = _common_length(prompt, whole)
    opened = _OPENED_THOUGHT.fullmatch(prompt, shared)
    if opened is None:
        raise InputError(
            f"the chat template must keep a prompt as it is when the answer is added, but it rewrites the text before "
            f"messages[{index}]; use --template plain or give tokens"
        )
    end, answer = f"</{opened['tag']}>", whole[shared:]
    if message.reasoning:
        return _Turn(text=f"{prompt}{message.reasoning.strip()}\n{end}\n\n{answer}", start=len(prompt))
    content = message.content or ""
    if end in content:
        said = content.rpartition(end)[2].strip()
        closing = answer[answer.rfind(said) + len(said) :] if said else answer
        thought = content.lstrip().removeprefix(f"<{opened['tag']}>").lstrip("\n")
        return _Turn(text=f"{prompt}{thought}{closing}", start=len(prompt))
    warnings.warn(
        "the chat template opens a thought before each answer, and some answers have none: there an empty thought is "
        "closed, and it is not trained",
        DataWarning,
        stacklevel=2,
    )
    lead = f"{prompt}\n{end}\n\n"
    return _Turn(text=f"{lead}{answer}", start=len(lead))


def _appended(found: list[Script], turn: _Turn) -> list[Script]:
    if turn.span.start == turn.span.stop:
        return found
    if found and _extends(turn.text[: turn.start], found[-1]):
        return [*found[:-1], Script(text=turn.text, spans=(*found[-1].spans, turn.span))]
    return [*found, Script(text=turn.text, spans=(turn.span,))]


def _extends(text: str, script: Script) -> bool:
    return text.startswith(script.text[: script.spans[-1].stop])


def _without_thoughts(message: Message) -> Message:
    """The message as templates show it in history: they may drop thoughts inside the content of earlier turns."""
    end = [tag.end() for tag in THOUGHT_TAG.finditer(message.content or "")]
    return replace(message, content=(message.content or "")[end[-1] :]) if end else message


def _has_thought(message: Message) -> bool:
    return bool(message.reasoning) or _EMPTY_THOUGHT.match(message.content or "") is not None


def _check_tools(template: ChatTemplate, messages: Sequence[Message], tools: Tools) -> None:
    if not tools:
        return
    text, without = template.text(messages, tools), template.text(messages)
    for tool in tools:
        if text == without or (tool_name(tool) or "") not in text:
            raise InputError(
                f"the chat template must show the policy its tools, but it drops {tool_name(tool)!r}; use a tokenizer "
                "whose template knows tools, or --template plain, which leaves them out"
            )


def _check_marks(template: ChatTemplate, messages: Sequence[Message], tools: Tools, indices: Sequence[int]) -> None:
    """Refuses a template that does not write a mark in the place of the text of each of these messages."""
    marks = {index: f"mark-{index}-{len(messages)}-kram" for index in indices if messages[index].content}
    marked = [replace(message, content=marks.get(i, message.content)) for i, message in enumerate(messages)]
    try:
        text = template.text(marked, tools)
    except InputError:
        # It looks into contents, and takes no others; comparing the texts themselves has to do.
        return
    for index, mark in marks.items():
        if mark not in text:
            _refuse_loss(f"the text {messages[index].content!r:.60}", messages, index)


def _refuse_loss(lost: str | None, messages: Sequence[Message], index: int) -> None:
    if lost is not None:
        raise InputError(
            f"the chat template must render all of a message, but it drops {lost} in messages[{index}] of role "
            f"{messages[index].role!r}; use --template plain or a tokenizer whose template knows it"
        )


def _common_length(one: str, other: str) -> int:
    """Length of the longest common beginning of two texts."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low
