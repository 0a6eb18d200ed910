"""A page of trajectories as they will be trained, in the style of reports. It has no script and loads nothing."""

from collections.abc import Sequence
from html import escape

from treering.report.page import shell

CLASSES = {"trained": "o", "context": "g", "shared": "p", "special": "n"}
"""Of the style sheet, by what is true of a span."""


def as_html(trajectories: Sequence[tuple[str, Sequence[tuple[str, Sequence[str]]]]]) -> str:
    """The page of headings, each with spans of text and what is true of them: names of `CLASSES`.

    Example: `as_html([("row 1", [("Hi", ["context", "shared"]), (" there", ["trained"])])])` marks " there".
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


def _span(span: tuple[str, Sequence[str]]) -> str:
    text, facts = span
    return f'<i class="{" ".join(CLASSES[fact] for fact in facts)}">{escape(text)}</i>'
