"""Thoughts in rendered text: the tags of the model families, and prompts that open or close a thought."""

import re
from dataclasses import dataclass

from treering.data.trajectory import Message

_OPEN = r"<[\w:]*think[\w:]*>|\[THINK\]|<\|START_THINKING\|>|<\|channel>thought\n"
_CLOSE = r"</[\w:]*think[\w:]*>|\[/THINK\]|<\|END_THINKING\|>|<channel\|>"

THOUGHT_TAG = re.compile(f"{_OPEN}|{_CLOSE}")
"""Opens or closes a thought, in the spellings of the model families."""

_OPENING = re.compile(rf"\s*(?:{_OPEN})\s*")
_CLOSING = re.compile(rf"\s*(?:{_CLOSE})\s*")
_EMPTY = re.compile(rf"\s*(?:(?:{_OPEN})\s*)?(?:{_CLOSE})\s*")
_ENDING = re.compile(rf"(?:(?P<open>{_OPEN})\s*)?(?:(?P<close>{_CLOSE})\s*)?\Z")
_MAX_ENDING = 200
_CLOSED_BY = {"[THINK]": "[/THINK]", "<|START_THINKING|>": "<|END_THINKING|>", "<|channel>thought\n": "<channel|>"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptThought:
    """What a prompt says about thoughts at its end."""

    start: int
    """Where the tags begin; the prompt's length if there are none."""
    is_open: bool = False
    """A thought is opened: the policy writes the thought and its end."""
    is_closed: bool = False
    """The thought is closed: the policy writes the answer alone."""
    end: str = ""
    """What closes an opened thought, with its line breaks."""


def prompt_thought(prompt: str) -> PromptThought:
    r"""The thought at the end of a prompt.

    Example: `<|im_start|>assistant\n<think>\n` has an open one, which starts at 22 and ends with `\n</think>\n\n`.
    """
    skipped = max(0, len(prompt) - _MAX_ENDING)
    found = _ENDING.search(prompt, skipped)
    assert found is not None, "the end of a text matches"
    opened, is_closed = found["open"], found["close"] is not None
    if opened is None or is_closed:
        return PromptThought(start=found.start(), is_closed=is_closed)
    closing = _CLOSED_BY.get(opened) or f"</{opened[1:]}"
    spaced = prompt.endswith("\n") and not opened.endswith("\n")
    return PromptThought(start=found.start(), is_open=True, end=f"\n{closing}\n\n" if spaced else closing)


def split_opening(text: str) -> tuple[str, str]:
    """A tag at the beginning that opens a thought, with the space around it, and the rest."""
    return _split(_OPENING, text)


def split_closing(text: str) -> tuple[str, str]:
    """A tag at the beginning that closes a thought, with the space around it, and the rest."""
    return _split(_CLOSING, text)


def split_empty(text: str) -> tuple[str, str]:
    r"""An empty thought at the beginning, or the mere end of one, and the rest.

    Example: `<think>\n\n</think>\n\n4` is `<think>\n\n</think>\n\n` and `4`.
    """
    return _split(_EMPTY, text)


def inline_thought(message: Message) -> tuple[str, str] | None:
    """The thought that stands in a message's content, without tags, and the answer after it; None without a thought.

    Example: "<think>hm</think>4" is ("hm", "4").
    """
    content = message.content or ""
    ends = [tag.span() for tag in re.finditer(_CLOSE, content)]
    if not ends:
        return None
    start, stop = ends[-1]
    return split_opening(content[:start])[1], content[stop:]


def _split(pattern: re.Pattern[str], text: str) -> tuple[str, str]:
    found = pattern.match(text)
    return (found.group(), text[found.end() :]) if found else ("", text)
