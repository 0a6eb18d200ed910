"""One assistant turn after the prompt that inference saw: what the policy wrote, and what the template added."""

import warnings
from dataclasses import dataclass

from treering.data.rendering.rendered_chat import RenderedChat
from treering.data.rendering.rendered_parts import common_length, missing_part
from treering.data.rendering.script import Span
from treering.data.rendering.thoughts import (
    PromptThought,
    inline_thought,
    prompt_thought,
    split_closing,
    split_empty,
    split_opening,
)
from treering.data.rendering.turn_end import leading_token
from treering.data.trajectory import Message
from treering.errors import DataWarning, InputError

_MARK = "mark-kram"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTurn:
    """A prompt with the policy's turn after it."""

    text: str
    """The prompt, what the template adds before the answer, and the answer with its end."""
    prompt_length: int
    """Characters of the prompt."""
    span: Span
    """What the policy wrote."""


def policy_turn(chat: RenderedChat, index: int) -> PolicyTurn:
    """The turn of message `index`.

    Raises:
        InputError: the template refuses the messages, rewrites the prompt when the answer stands, drops the thought, or
            closes an empty thought before a message that has one.

    Example: under Qwen3's template a last answer without a thought stands after an empty one, which is not in the span.
    """
    if index == 0:
        raise InputError(
            "a chat template opens a turn after a message, and messages[0] is the assistant's; put the prompt before "
            "it, or give it weight 0"
        )
    message, prompt = chat.messages[index], chat.opened(index)
    lead, written = _lead_and_written(chat, index, prompt_thought(prompt))
    if message.reasoning and not _has_reasoning(message, written):
        raise InputError(
            f"the chat template must render thoughts, but it drops the reasoning of messages[{index}]; use "
            'template="plain", remove the reasoning, or write it into the content with the tags of the model'
        )
    start = len(prompt) + len(lead)
    end = _missing_end(chat, index, written)
    length = len(written + end) if end else chat.template.turn_end.length(written)
    return PolicyTurn(text=f"{prompt}{lead}{written}{end}", prompt_length=len(prompt), span=Span(start, start + length))


def _missing_end(chat: RenderedChat, index: int, written: str) -> str:
    """The token that ends the turn, where the template writes it only before a next message."""
    end = chat.template.turn_end.missing
    if not end or written.endswith(end) or not chat.messages[index].tool_calls:
        return "" if written.endswith(end) else end
    # A call ends with what stands before the tool's answer, which may be another role's token.
    answer = chat.messages[index + 1 : index + 2] or (Message(role="tool", content=_MARK),)
    here = chat.closed(index + 1)
    try:
        later = chat.text([*chat.messages[: index + 1], *answer])
    except InputError:
        return ""
    return leading_token(later[len(here) :], chat.template.special_tokens) if later.startswith(here) else ""


def _lead_and_written(chat: RenderedChat, index: int, thought: PromptThought) -> tuple[str, str]:
    """What the template adds after the prompt, and what the policy wrote."""
    message, prompt, whole = chat.messages[index], chat.opened(index), chat.closed(index + 1)
    is_kept = whole.startswith(prompt)
    if is_kept:
        rendered = whole[len(prompt) :]
    elif whole.startswith(prompt[: thought.start]):
        rendered = whole[thought.start :]
    else:
        rendered = _moved(chat, index, prompt[: thought.start])
    if thought.is_open:
        return _in_open_thought(message, index, thought, split_opening(rendered)[1])
    if not thought.is_closed:
        has_thought = message.reasoning or split_empty(message.content or "")[0]
        return ("", rendered) if has_thought else split_empty(rendered)
    if message.reasoning or inline_thought(message):
        raise InputError(
            f"the chat template closes an empty thought before each answer, but messages[{index}] has a thought; "
            "remove it, or switch thoughts on in the template, as by {% set enable_thinking = true %} at its start"
        )
    return "", rendered if is_kept else split_empty(rendered)[1]


def _in_open_thought(message: Message, index: int, thought: PromptThought, rendered: str) -> tuple[str, str]:
    inline = inline_thought(message)
    said = (message.reasoning or (inline[0] if inline else "")).strip()
    end = split_closing(rendered.lstrip().removeprefix(said))[0]
    if said and end.strip() == thought.end.strip():
        return "", rendered
    if message.reasoning:
        return "", f"{said}{thought.end}{rendered}"
    if inline:
        return "", _with_thought(message, index, thought, rendered)
    warnings.warn(
        "the chat template opens a thought before each answer, and some answers have none: there an empty thought is "
        "closed, and it is not trained",
        DataWarning,
        stacklevel=2,
    )
    lead, written = split_closing(rendered)
    return lead or thought.end, written


def _with_thought(message: Message, index: int, thought: PromptThought, rendered: str) -> str:
    """The content as the model wrote it, where the template cuts the thought, with the end of the turn."""
    content, end = split_opening(message.content or "")[1].rstrip(), thought.end.strip()
    if end not in content:
        raise InputError(
            f"the chat template ends a thought with {end!r}, but the content of messages[{index}] ends it otherwise; "
            "give the thought as reasoning, apart from the content"
        )
    said = content.rpartition(end)[2].strip()
    return content + (rendered[rendered.rfind(said) + len(said) :] if said else rendered)


def _has_reasoning(message: Message, written: str) -> bool:
    _, said, after = written.partition((message.reasoning or "").strip())
    return bool(said) and missing_part(message, after) is None


def _moved(chat: RenderedChat, index: int, prompt: str) -> str:
    """The turn in a text whose earlier part is not the prompt's, as where gpt-oss drops thoughts once it answers."""
    whole, before, asked = chat.closed(index + 1), chat.closed(index), chat.messages[index - 1]
    said = (asked.content or "").strip()
    header = prompt[len(before) if prompt.startswith(before) else len(prompt) :] or prompt.rpartition(said)[2]
    if said and header.strip():
        # Another answer leaves the earlier part alone, so the header stands before the first difference.
        other = chat.text([*chat.messages[:index], Message(role="assistant", content=_MARK)])
        at = whole.rfind(header, 0, common_length(whole, other))
        if at >= 0 and missing_part(asked, whole[:at]) is None:
            return whole[at + len(header) :]
    raise InputError(
        f"the chat template must keep a prompt as it is when the answer is added, but it rewrites the text before "
        f'messages[{index}]; use template="plain" or give tokens'
    )
