"""Pictures in a rendered chat: their placeholders in the text, and the tokens that they take."""

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from treering.data.picture import Picture, PlacedPicture
from treering.data.rendering.encoder import EncodedScript
from treering.data.rendering.picture_processor import Placeholder
from treering.data.rendering.rendered_chat import RenderedChat
from treering.data.rendering.script import Script, Span
from treering.data.trajectory import Message
from treering.errors import InputError
from treering.types import TokenIds


def check_pictures(chat: RenderedChat, written: str) -> None:
    """Refuses a chat whose text has another number of placeholders than pictures, in all or before a trained turn.

    Since each text has those of all messages before it, the first placeholder is of the first picture, and so on.

    Args:
        chat: the chat.
        written: what the template writes for a picture.

    Raises:
        InputError: a template that drops or repeats pictures, or a text that holds the placeholder itself.
    """
    for index, message in enumerate(chat.messages):
        if message.is_trained and index:
            _check_count(chat.opened(index), chat.messages[:index], written)
    _check_count(chat.whole, chat.messages, written)


def num_pictures(messages: Sequence[Message]) -> int:
    """Pictures of all messages."""
    return sum(len(message.pictures) for message in messages)


def expanded_script(script: Script, placeholder: Placeholder | None) -> Script:
    """The script with what the processor makes of each placeholder; as it is without any.

    Example: where `<img>` becomes `<img>*` a span after one of them moves by a character.
    """
    if placeholder is None or placeholder.written == placeholder.expanded:
        return script
    ends = [found.end() for found in re.finditer(re.escape(placeholder.written), script.text)]
    growth = len(placeholder.expanded) - len(placeholder.written)

    def moved(at: int) -> int:
        return at + growth * sum(end <= at for end in ends)

    return replace(
        script,
        text=script.text.replace(placeholder.written, placeholder.expanded),
        spans=tuple(Span(moved(start), moved(stop)) for start, stop in script.spans),
        cuts=tuple(map(moved, script.cuts)),
    )


def with_picture_tokens(encoded: EncodedScript, pictures: Sequence[Picture], token: int) -> EncodedScript:
    """The sequence with each placeholder as many times as its picture has tokens.

    Args:
        encoded: with one placeholder for each of the first pictures.
        pictures: all of the chat.
        token: id of the placeholder.

    Raises:
        InputError: more placeholders than pictures, or one that would be trained.

    Example: `[1, 9, 2]` with the placeholder 9 and a picture of 3 tokens is `[1, 9, 9, 9, 2]`.
    """
    at = np.flatnonzero(encoded.tokens == token)
    if at.size > len(pictures) or encoded.loss_mask[at].any():
        raise InputError("a text holds the token of pictures itself, which only a picture may; remove it from the text")
    shown = pictures[: at.size]
    times = np.ones(encoded.tokens.size, np.int64)
    times[at] = [picture.num_tokens for picture in shown]
    begins = np.concatenate([[0], np.cumsum(times)])
    tokens: TokenIds = np.repeat(encoded.tokens, times)
    return EncodedScript(
        tokens=tokens,
        loss_mask=np.repeat(encoded.loss_mask, times),
        turn_ends=begins[encoded.turn_ends].astype(np.int32),
        pictures=tuple(
            PlacedPicture(start=int(begins[i]), picture=picture) for i, picture in zip(at, shown, strict=True)
        ),
    )


def _check_count(text: str, messages: Sequence[Message], written: str) -> None:
    found, wanted = text.count(written), num_pictures(messages)
    if found != wanted:
        raise InputError(
            f"the chat template writes {written} once for each picture, and the chat up to "
            f"messages[{len(messages) - 1}] has {wanted} pictures and {found} of them; use a template that keeps all "
            "pictures, and no text that holds this token"
        )
