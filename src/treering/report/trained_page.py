"""A page of trajectories as they will be trained, in the style of reports. It has no script and loads nothing."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from treering.report.page import shell

CLASSES = {"trained": "o", "context": "g", "shared": "p", "special": "n"}
"""Of the style sheet, by what is true of a span."""


class PageSpan(NamedTuple):
    """A stretch of text."""

    text: str
    facts: Sequence[str]
    """What is true of it, names of `CLASSES`."""
    picture: str | None = None
    """A data URI of what stands there."""


def as_html(trajectories: Sequence[tuple[str, Sequence[PageSpan]]]) -> str:
    """The page of headings, each with its spans.

    Example: `as_html([("row 1", [PageSpan("Hi", ["context"]), PageSpan(" there", ["trained"])])])` marks " there".
    """
    keys = "".join(f'<i class="key {CLASSES[name]}">{name}</i> ' for name in CLASSES)
    cards = "".join(
        f'<section class="card wide"><h3>{escape(heading)}</h3><div class="text">{"".join(map(_span, spans))}</div>'
        "</section>\n"
        for heading, spans in trajectories
    )
    body = f'<p class="help text">{keys}</p>\n<main class="cards">\n{cards}</main>'
    count = f"{len(trajectories)} sequence{'s' if len(trajectories) != 1 else ''}"
    return shell("What is trained", count, body, command="treering inspect --html")


def _span(span: PageSpan) -> str:
    classes = " ".join(CLASSES[fact] for fact in span.facts)
    name = escape(span.text)
    shown = name if span.picture is None else f'<img src="{escape(span.picture)}" alt="{name}" title="{name}">'
    return f'<i class="{classes}">{shown}</i>'
