"""Texts that can be written: lone surrogates, halves of a pair that a cut left, have no form in UTF-8."""

import json
from typing import Any

from treering.errors import InputError


def valid_text(text: str, where: str) -> str:
    r"""The text itself.

    Raises:
        InputError: it has lone surrogates, which no tokenizer takes and no file holds.

    Example: "ä" is valid; "\ud83d" alone, half of an emoji, is not.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = repr(text) if len(text) <= 76 else f"{text[:73]!r}..."
        raise InputError(f"{where} must be valid Unicode, got {shown} ({error.reason}); repair it") from error
    return text


def valid_texts(value: Any, where: str) -> None:
    """Checks every text of a JSON value, keys too.

    Raises:
        InputError: one has lone surrogates.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, default=dict)
    except (TypeError, ValueError):
        # What is no JSON is refused where it is written or rendered, with more to say of it.
        return
    valid_text(text, where)
