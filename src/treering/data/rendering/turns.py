"""Sequences of a chat under a chat template: each assistant turn after the prompt that inference would have seen.

A template that only appends gives one sequence. One that rewrites earlier text, such as one that strips thoughts from
history, gives a sequence per rewritten turn; they share their beginnings, so together they are a tree.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from treering.data.formats.tool_calls import tool_name
from treering.data.rendering.policy_turn import PolicyTurn, policy_turn
from treering.data.rendering.rendered_chat import RenderedChat
from treering.data.rendering.rendered_parts import common_length, missing_part, says_by_itself
from treering.data.rendering.script import TURN_END, Script, Span, message_script, turn_opening
from treering.data.rendering.thoughts import inline_thought
from treering.data.trajectory import Message
from treering.errors import InputError


def chat_scripts(chat: RenderedChat) -> list[Script]:
    """The sequences of a chat, at least one; each trained message is a span of exactly one of them.

    A span is what the policy wrote: an empty thought that the template adds stands before it, a last line break after
    it.

    Raises:
        InputError: the template refuses the messages or tools, or drops a part of them.

    Example: user, assistant, user, assistant under ChatML are one sequence of two spans. Under Qwen3's template, with
    thoughts, they are two sequences: in the second the first answer has no thought.
    """
    check_rendered(chat)
    found: list[Script] = []
    for index, message in enumerate(chat.messages):
        if message.is_trained:
            turn = policy_turn(chat, index)
            _check_turn(chat, index, turn)
            found = _appended(found, turn)
    if not found:
        return [Script(text=chat.whole)]
    if _extends(chat.whole, found[-1]):
        found[-1] = replace(found[-1], text=chat.whole)
    return found


def check_rendered(chat: RenderedChat) -> None:
    """Refuses a chat of which the template drops something: a text, a call with its arguments, or the tools.

    Each message is compared with the text that it adds. In case a template says the same words by itself, the contents
    are also replaced by marks, which must come out again.

    Raises:
        InputError: the dropped part and its message.
    """
    _check_tools(chat)
    before, first = "", 0
    for end, text in _views(chat):
        added = text[common_length(before, text) :]
        for index in range(first, end):
            _refuse_loss(missing_part(_without_thoughts(chat.messages[index]), added), chat.messages, index)
        before, first = text, end
    # A template may cut earlier answers; each is compared in its own turn.
    context = [i for i, message in enumerate(chat.messages) if message.role != "assistant"]
    _check_marks(chat, [i for i in context if i < chat.num_seen], is_open=True)
    _check_marks(chat, [i for i in context if i > chat.num_seen], is_open=False)


def _views(chat: RenderedChat) -> Iterator[tuple[int, str]]:
    """Growing prefixes of a chat with their texts: the prompt of each assistant message, and the message after it."""
    for index, message in enumerate(chat.messages):
        if message.role != "assistant":
            continue
        try:
            views = [(index, chat.opened(index))] if index else []
            views.append((index + 1, chat.closed(index + 1)))
        except InputError:
            # Some templates refuse a chat that ends here, as with a call.
            if message.is_trained:
                raise
            continue
        yield from views
    yield len(chat.messages), chat.whole


def _check_turn(chat: RenderedChat, index: int, turn: PolicyTurn) -> None:
    message, messages = chat.messages[index], chat.messages[: index + 1]
    _refuse_loss(missing_part(message, turn.text[turn.span.start :]), messages, index)
    if message.tool_calls and says_by_itself(message):
        _check_marks(chat, [index], is_open=False)


def _appended(found: list[Script], turn: PolicyTurn) -> list[Script]:
    if turn.span.start == turn.span.stop:
        return found
    # Inference encodes a prompt before it knows the answer, so both begin with a token of their own.
    cuts = (turn.prompt_length, turn.span.start) if turn.prompt_length < turn.span.start else (turn.span.start,)
    if found and _extends(turn.text[: turn.span.start], found[-1]):
        last = found[-1]
        return [*found[:-1], Script(text=turn.text, spans=(*last.spans, turn.span), cuts=(*last.cuts, *cuts))]
    return [*found, Script(text=turn.text, spans=(turn.span,), cuts=cuts)]


def _extends(text: str, script: Script) -> bool:
    return text.startswith(script.text[: script.spans[-1].stop])


def _without_thoughts(message: Message) -> Message:
    """The message as templates show it in history: they may drop thoughts inside the content of earlier turns."""
    inline = inline_thought(message)
    return replace(message, content=inline[1]) if inline else message


def _check_tools(chat: RenderedChat) -> None:
    if not chat.tools:
        return
    try:
        without = chat.template.prompt(chat.messages[: chat.num_seen])
    except InputError:
        # A template for calls may need tools.
        without = ""
    for tool in chat.tools:
        if chat.seen == without or (tool_name(tool) or "") not in chat.seen:
            raise InputError(
                f"the chat template must show the policy its tools, but it drops {tool_name(tool)!r}; use a tokenizer "
                'whose template knows tools, or template="plain", which leaves them out'
            )


def _check_marks(chat: RenderedChat, indices: Sequence[int], *, is_open: bool) -> None:
    """Refuses a template that does not write a mark in the place of the text of each of these messages."""
    messages = chat.messages[: chat.num_seen if is_open else max(indices, default=-1) + 1]
    marks = {index: f"mark-{index}-{len(messages)}-kram" for index in indices if messages[index].content}
    marked = [
        replace(message, content=marks[i], pictures=()) if i in marks else message for i, message in enumerate(messages)
    ]
    if not marks:
        return
    try:
        text = chat.template.prompt(marked, chat.tools) if is_open else chat.text(marked)
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
            f'{messages[index].role!r}; use template="plain" or a tokenizer whose template knows it'
        )


def plain_continuation(messages: Sequence[Message]) -> list[Script]:
    r"""In the plain form, from the end marker of a turn to the opening of the next, with `messages` between them.

    Example: of a user's "Hi" it is `<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n`.
    """
    end = Script(text=f"{TURN_END}\n", markers=(Span(0, len(TURN_END)),))
    return [end, *(message_script(message) for message in messages), turn_opening()]


def chat_continuation(chat: RenderedChat, num_seen: int) -> Script | None:
    """The same under a chat template, after the first `num_seen` messages, of which the last is the policy's.

    None where the template writes the earlier messages otherwise once others follow, as those do that strip thoughts,
    or where no special token ends a turn.

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
        return _from_end(text, ends.missing) if text.startswith(ends.missing) else None
    end = max((token for token in chat.template.special_tokens if closed.endswith(token)), key=len, default="")
    return _from_end(f"{end}{rest}", end) if end else None


def _from_end(text: str, end: str) -> Script:
    return Script(text=text, cuts=(len(end),))
