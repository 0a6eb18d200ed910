"""Sequences of a chat under a chat template: each assistant turn after the prompt that it has at inference.

A template that only appends makes one sequence. A template that rewrites earlier text, for example by stripping
reasoning from history, makes one sequence per rewritten turn; they share prefixes and form a tree.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from treering.data.formats.chat_messages import tool_name
from treering.data.rendering.encoder import TURN_END, Script, Span, message_script, turn_opening
from treering.data.rendering.rendered_parts import common_length, is_in_calls, missing_part
from treering.data.rendering.template import ChatTemplate, RenderedChat, Tools, leading_token
from treering.data.rendering.thoughts import (
    CLOSING,
    EMPTY,
    OPENING,
    PromptThought,
    inline_thought,
    prompt_thought,
    split_off,
)
from treering.data.trajectory import Message
from treering.errors import DataWarning, InputError

_MARK = "mark-kram"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTurn:
    """A prompt and the policy's turn."""

    text: str
    """Prompt, text that the template adds before the answer, and the answer with its end."""
    prompt_length: int
    """Number of characters of the prompt."""
    span: Span
    """Span that the policy wrote."""


def policy_turn(chat: RenderedChat, index: int) -> PolicyTurn:
    """Return the turn of message `index`.

    Raises:
        InputError: the template refuses the messages, rewrites the prompt when the answer is added, drops the thought,
            or closes an empty thought before a message that has one.

    Example: Qwen3's template writes an empty thought, outside the span, before a last answer without a thought.
    """
    if index == 0:
        raise InputError(
            "a chat template opens a turn after a message, and messages[0] is the assistant's; put the prompt before "
            "it, or give it weight 0"
        )
    message, prompt = chat.messages[index], chat.opened(index)
    lead, written = _lead_and_written(chat, index, prompt_thought(prompt))
    if message.reasoning:
        _, found, after = written.partition(message.reasoning.strip())
        if not found or missing_part(message, after) is not None:
            raise InputError(
                f"the chat template must render thoughts, but it drops the reasoning of messages[{index}]; use "
                'template="plain", remove the reasoning, or write it into the content with the tags of the model'
            )
    start = len(prompt) + len(lead)
    end = _missing_end(chat, index, written)
    length = len(written + end) if end else chat.template.turn_end.length(written)
    return PolicyTurn(text=f"{prompt}{lead}{written}{end}", prompt_length=len(prompt), span=Span(start, start + length))


def probed_turn(template: ChatTemplate, question: str, turn: Message, tools: Tools) -> PolicyTurn | None:
    """Return a turn of the policy after a question, without warnings; None if the template cannot train such a turn."""
    chat = RenderedChat(template, (Message(role="user", content=question), turn), tools)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DataWarning)
            return policy_turn(chat, 1)
    except InputError:
        return None


def _missing_end(chat: RenderedChat, index: int, written: str) -> str:
    """Return the token that ends the turn, if the template writes it only before a next message."""
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
    """Return the text that the template adds after the prompt, and the text that the policy wrote."""
    message, prompt, whole = chat.messages[index], chat.opened(index), chat.closed(index + 1)
    is_kept = whole.startswith(prompt)
    if is_kept:
        rendered = whole[len(prompt) :]
    elif whole.startswith(prompt[: thought.start]):
        rendered = whole[thought.start :]
    else:
        rendered = _moved(chat, index, prompt[: thought.start])
    if thought.is_open:
        return _in_open_thought(message, index, thought, split_off(OPENING, rendered)[1])
    if not thought.is_closed:
        has_thought = message.reasoning or split_off(EMPTY, message.content or "")[0]
        return ("", rendered) if has_thought else split_off(EMPTY, rendered)
    if message.reasoning or inline_thought(message):
        raise InputError(
            f"the chat template closes an empty thought before each answer, but messages[{index}] has a thought; "
            "remove it, or switch thoughts on in the template, as by {% set enable_thinking = true %} at its start"
        )
    return "", rendered if is_kept else split_off(EMPTY, rendered)[1]


def _in_open_thought(message: Message, index: int, thought: PromptThought, rendered: str) -> tuple[str, str]:
    inline = inline_thought(message)
    written_thought = (message.reasoning or (inline[0] if inline else "")).strip()
    end = split_off(CLOSING, rendered.lstrip().removeprefix(written_thought))[0]
    if written_thought and end.strip() == thought.end.strip():
        return "", rendered
    if message.reasoning:
        return "", f"{written_thought}{thought.end}{rendered}"
    if inline:
        return "", _with_thought(message, index, thought, rendered)
    warnings.warn(
        "the chat template opens a thought before each answer, and some answers have none: there an empty thought is "
        "closed, and it is not trained",
        DataWarning,
        stacklevel=2,
    )
    lead, written = split_off(CLOSING, rendered)
    return lead or thought.end, written


def _with_thought(message: Message, index: int, thought: PromptThought, rendered: str) -> str:
    """Return the content as the model wrote it, for a template that cuts the thought, with the end of the turn."""
    content, end = split_off(OPENING, message.content or "")[1].rstrip(), thought.end.strip()
    if end not in content:
        raise InputError(
            f"the chat template ends a thought with {end!r}, but the content of messages[{index}] ends it otherwise; "
            "give the thought as reasoning, apart from the content"
        )
    answer = content.rpartition(end)[2].strip()
    return content + (rendered[rendered.rfind(answer) + len(answer) :] if answer else rendered)


def _moved(chat: RenderedChat, index: int, prompt: str) -> str:
    """Return the turn in a text whose earlier part differs from the prompt, since gpt-oss drops earlier thoughts."""
    whole, before, asked = chat.closed(index + 1), chat.closed(index), chat.messages[index - 1]
    question = (asked.content or "").strip()
    header = prompt[len(before) if prompt.startswith(before) else len(prompt) :] or prompt.rpartition(question)[2]
    if question and header.strip():
        # A different answer does not change the earlier part, so the header is before the first difference.
        other = chat.text([*chat.messages[:index], Message(role="assistant", content=_MARK)])
        at = whole.rfind(header, 0, common_length(whole, other))
        if at >= 0 and missing_part(asked, whole[:at]) is None:
            return whole[at + len(header) :]
    raise InputError(
        f"the chat template must keep a prompt as it is when the answer is added, but it rewrites the text before "
        f'messages[{index}]; use template="plain" or give tokens'
    )


def chat_scripts(chat: RenderedChat) -> list[Script]:
    """Return the sequences of a chat, at least one; each trained message is a span of exactly one of them.

    A span is what the policy wrote, without an empty thought that the template adds or a last line break.

    Raises:
        InputError: the template refuses the messages or tools, or drops a part of them.

    Example: user, assistant, user, assistant under ChatML are one sequence with two spans. Under Qwen3's template, with
    thoughts, they are two sequences, and the first answer has no thought in the second one.
    """
    check_rendered(chat)
    found: list[Script] = []
    for index, message in enumerate(chat.messages):
        if message.is_trained:
            turn = policy_turn(chat, index)
            _refuse_loss(missing_part(message, turn.text[turn.span.start :]), chat.messages, index)
            if message.tool_calls and is_in_calls(message):
                _check_marks(chat, [index], is_open=False)
            found = _appended(found, turn)
    if not found:
        return [Script(text=chat.whole)]
    if _extends(chat.whole, found[-1]):
        found[-1] = replace(found[-1], text=chat.whole)
    return found


def check_rendered(chat: RenderedChat) -> None:
    """Check that the template does not drop a text, a call with its arguments, or the tools.

    Each message is compared with the text that it adds. Contents are also replaced by marks, which must be rendered, in
    case a template writes the same words anyway.

    Raises:
        InputError: something is dropped; the message names the part and its message.
    """
    _check_tools(chat)
    before, first = "", 0
    for end, text in _views(chat):
        added = text[common_length(before, text) :]
        for index in range(first, end):
            message = chat.messages[index]
            # Templates may drop thoughts in the content from history.
            inline = inline_thought(message)
            said = replace(message, content=inline[1]) if inline else message
            _refuse_loss(missing_part(said, added), chat.messages, index)
        before, first = text, end
    # A template may cut earlier answers, so each is compared in its own turn.
    context = [i for i, message in enumerate(chat.messages) if message.role != "assistant"]
    _check_marks(chat, [i for i in context if i < chat.num_seen], is_open=True)
    _check_marks(chat, [i for i in context if i > chat.num_seen], is_open=False)


def _views(chat: RenderedChat) -> Iterator[tuple[int, str]]:
    """Yield growing prefixes of a chat with their texts: the prompt of each assistant turn, and the turn."""
    for index, message in enumerate(chat.messages):
        if message.role != "assistant":
            continue
        try:
            views = [(index, chat.opened(index))] if index else []
            views.append((index + 1, chat.closed(index + 1)))
        except InputError:
            # Some templates refuse a chat that ends with a call.
            if message.is_trained:
                raise
            continue
        yield from views
    yield len(chat.messages), chat.whole


def _appended(found: list[Script], turn: PolicyTurn) -> list[Script]:
    if turn.span.start == turn.span.stop:
        return found
    # Inference encodes the prompt alone, so a token begins at the answer.
    cuts = (turn.prompt_length, turn.span.start) if turn.prompt_length < turn.span.start else (turn.span.start,)
    if found and _extends(turn.text[: turn.span.start], found[-1]):
        last = found[-1]
        return [*found[:-1], Script(text=turn.text, spans=(*last.spans, turn.span), cuts=(*last.cuts, *cuts))]
    return [*found, Script(text=turn.text, spans=(turn.span,), cuts=cuts)]


def _extends(text: str, script: Script) -> bool:
    return text.startswith(script.text[: script.spans[-1].stop])


def _check_tools(chat: RenderedChat) -> None:
    if not chat.tools:
        return
    try:
        without = chat.template.prompt(chat.messages[: chat.num_seen])
    except InputError:
        # A template may write calls only with tools.
        without = ""
    for tool in chat.tools:
        if chat.seen == without or (tool_name(tool) or "") not in chat.seen:
            raise InputError(
                f"the chat template must show the policy its tools, but it drops {tool_name(tool)!r}; use a tokenizer "
                'whose template knows tools, or template="plain", which leaves them out'
            )


def _check_marks(chat: RenderedChat, indices: Sequence[int], *, is_open: bool) -> None:
    """Check that the template writes a mark in place of the text of each of these messages."""
    messages = chat.messages[: chat.num_seen if is_open else max(indices, default=-1) + 1]
    marks = {index: f"mark-{index}-{len(messages)}-kram" for index in indices if messages[index].content}
    marked = [
        replace(message, content=marks[i], images=()) if i in marks else message for i, message in enumerate(messages)
    ]
    if not marks:
        return
    try:
        text = chat.template.prompt(marked, chat.tools) if is_open else chat.text(marked)
    except InputError:
        # The template inspects contents and refuses marks; the comparison of texts must suffice.
        return
    for index, mark in marks.items():
        if mark not in text:
            _refuse_loss(f"the text {messages[index].content!r:.60}", messages, index)


def _refuse_loss(lost: str | None, messages: Sequence[Message], index: int) -> None:
    if lost is not None:
        raise InputError(
            f"the chat template must render all of a message, but it drops {lost} in messages[{index}] of role "
            f'{messages[index].role!r}; use template="plain" or a tokenizer whose template knows it'
        )


def plain_continuation(messages: Sequence[Message]) -> list[Script]:
    r"""Return the plain form's text from the end marker of a turn, over `messages`, to the opening of the next turn.

    Example: for a user's "Hi" it is `<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n`.
    """
    end = Script(text=f"{TURN_END}\n", markers=(Span(0, len(TURN_END)),))
    return [end, *(message_script(message) for message in messages), turn_opening()]


def chat_continuation(chat: RenderedChat, num_seen: int) -> Script | None:
    """Return the continuation under a chat template, after the first `num_seen` messages; the last is the policy's.

    The result is None if the template rewrites earlier messages once others follow, for example to strip reasoning, or
    if no special token ends a turn.

    Raises:
        InputError: the template refuses the messages.
    """
    closed, opened, ends = chat.closed(num_seen), chat.opened(len(chat.messages)), chat.template.turn_end
    closed = closed[: ends.length(closed)]
    if not opened.startswith(closed):
        return None
    rest = opened[len(closed) :]
    if ends.missing:
        text = rest.lstrip("\n")
        # A call ends with what stands before the tool's answer, which may be another role's token.
        is_call = bool(chat.messages[num_seen - 1].tool_calls)
        end = leading_token(text, chat.template.special_tokens) if is_call else ends.missing
        return _from_end(text, end) if end and text.startswith(end) else None
    end = max((token for token in chat.template.special_tokens if closed.endswith(token)), key=len, default="")
    return _from_end(f"{end}{rest}", end) if end else None


def _from_end(text: str, end: str) -> Script:
    return Script(text=text, cuts=(len(end),))
