"""A small copy of a picture for a page."""

import base64
from io import BytesIO

from treering.data.pictures.decode import decoded
from treering.data.pictures.source import PictureSource

MAX_SIDE = 160
"""Pixels."""


def thumbnail_uri(source: PictureSource) -> str:
    """A data URI of the picture, at most `MAX_SIDE` pixels wide and high, a JPEG of some kilobytes.

    Raises:
        InputError: as `decoded`.

    Example: `<img src="{thumbnail_uri(source)}">` loads nothing.
    """
    small = decoded(source).convert("RGB")
    small.thumbnail((MAX_SIDE, MAX_SIDE))
    stream = BytesIO()
    small.save(stream, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"
