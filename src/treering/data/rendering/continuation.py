"""What stands between a policy's turn and its next one, so that a chat goes on after the very tokens it sampled."""

from collections.abc import Sequence

from treering.data.rendering.rendered_chat import RenderedChat
from treering.data.rendering.script import TURN_END, Script, Span, message_script, turn_opening
from treering.data.trajectory import Message


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
