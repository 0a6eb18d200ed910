"""Reasoning in rendered text: the tags of the model families, and prompts that open or close a thought."""

import re
from dataclasses import dataclass

from treering.data.trajectory import Message

_WORD = r"(?i:[\w:]*think[\w:]*|thoughts?|reason(?:ing)?)"
_OPEN = (
    rf"<{_WORD}>|\[THINK\]|<\|START_THINKING\|>|<\|channel>thought\n|<\|begin_of_thought\|>|<\|inner_prefix\|>|◁think▷"
    r"|<unused94>thought\n"
)
_CLOSE = (
    rf"</{_WORD}>|\[/THINK\]|<\|END_THINKING\|>|<channel\|>|<\|end_of_thought\|>|<\|inner_suffix\|>|◁/think▷|<unused95>"
)
# Messages of the model to itself, which end like other messages.
_OWN = r"<\|channel\|>analysis(?: [^<]*)?<\|message\|>|to=self<\|message\|>"
_OWN_END = r"<\|end\|>|<\|eom\|>"
_HEADER = re.compile(r"(?:<\|start\|>)?(?:assistant)?(?: to=[^\s<]+)?(?:<\|channel\|>[^<]*)?<\|message\|>")

THOUGHT_TAG = re.compile(f"{_OPEN}|{_CLOSE}")
"""Tag that opens or closes a thought, in the spellings of the model families."""

OPENING = re.compile(rf"\s*(?:{_OPEN})\s*")
CLOSING = re.compile(rf"\s*(?:{_CLOSE})\s*")
EMPTY = re.compile(rf"\s*(?:(?:{_OPEN})\s*)?(?:{_CLOSE})\s*")
"""Empty thought, or the end of one."""
_ENDING = re.compile(rf"(?:(?P<open>{_OPEN})\s*)?(?:(?P<close>{_CLOSE})\s*)?\Z")
_MAX_ENDING = 200
_ANY = re.compile(f"(?P<open>{_OPEN}|{_OWN})|(?P<close>{_CLOSE})|{_OWN_END}")
_CLOSED_BY = {
    "[THINK]": "[/THINK]",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|channel>thought\n": "<channel|>",
    "<unused94>thought\n": "<unused95>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "<|inner_prefix|>": "<|inner_suffix|>",
    "◁think▷": "◁/think▷",
    "to=self<|message|>": "<|eom|>",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptThought:
    """The state of a thought at the end of a prompt."""

    start: int
    """Index of the tags; the length of the prompt if there are none."""
    is_open: bool = False
    """Whether a thought is open, so that the policy writes the thought and its end."""
    is_closed: bool = False
    """Whether the thought is closed, so that the policy writes only the answer."""
    end: str = ""
    """Tag that closes an open thought, with its line breaks."""


def prompt_thought(prompt: str) -> PromptThought:
    r"""Return the thought at the end of a prompt.

    Example: `<|im_start|>assistant\n<think>\n` has an open one, which starts at 22 and ends with `\n</think>\n\n`.
    """
    skipped = max(0, len(prompt) - _MAX_ENDING)
    found = _ENDING.search(prompt, skipped)
    assert found is not None, "the end of a text matches"
    opened, is_closed = found["open"], found["close"] is not None
    if opened is None or is_closed:
        return PromptThought(start=found.start(), is_closed=is_closed)
    closing = _closing(opened)
    spaced = prompt.endswith("\n") and not opened.endswith("\n")
    return PromptThought(start=found.start(), is_open=True, end=f"\n{closing}\n\n" if spaced else closing)


def answer_start(text: str, prompt: str = "") -> int | None:
    """Return the index at which the answer of a response begins, after its last thought; None if the thought is open.

    The text has special tokens, and the prompt before it may open a thought.

    Example: it is 17 for "<think>hm</think>4", 0 for "4", and None for "<think>so 4".
    """
    thought = prompt_thought(prompt)
    start, end = 0, thought.end.strip()
    for tag in _ANY.finditer(text):
        if end and tag.group() == end:
            start, end = tag.end(), ""
        elif not end and tag["open"]:
            end = _closing(tag.group())
        elif not end and tag["close"]:
            # The prompt opened it.
            start = tag.end()
    return None if end else start


def answer_part(text: str) -> str:
    """Return the response after its thought, which is all that built-in rewards read; "" if the thought has no end.

    Example: `answer_part("<think>hm</think>4")` is "4".
    """
    start = answer_start(text)
    return "" if start is None else without_headers(text[start:])


def has_tags(text: str) -> bool:
    """Return whether a text has a tag that opens or closes a thought."""
    return any(tag["open"] or tag["close"] for tag in _ANY.finditer(text))


def without_headers(text: str) -> str:
    """Remove the headers of an answer's messages, which gpt-oss writes.

    Example: `<|start|>assistant<|channel|>final<|message|>4` is "4".
    """
    return _HEADER.sub("", text)


def _closing(opened: str) -> str:
    if opened.startswith("<|channel|>"):
        return "<|end|>"
    return _CLOSED_BY.get(opened) or f"</{opened[1:]}"


def split_off(part: re.Pattern[str], text: str) -> tuple[str, str]:
    r"""Split off a leading `OPENING`, `CLOSING` or `EMPTY`; the first text is "" without one.

    Example: `<think>\n\n</think>\n\n4` with `EMPTY` is `<think>\n\n</think>\n\n` and `4`.
    """
    found = part.match(text)
    return (found.group(), text[found.end() :]) if found else ("", text)


def inline_thought(message: Message) -> tuple[str, str] | None:
    """Return the thought in a message's content, without tags, and the answer after it; None without a thought.

    Example: "<think>hm</think>4" is ("hm", "4").
    """
    content = message.content or ""
    ends = [tag.span() for tag in re.finditer(_CLOSE, content)]
    if not ends:
        return None
    start, stop = ends[-1]
    return split_off(OPENING, content[:start])[1], content[stop:]
