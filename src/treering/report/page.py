"""HTML pages: of runs, and of trajectories with their trained tokens."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any, NamedTuple

from treering.report.content import tiles_of

_SCRIPTS = ("chart.js", "figures.js", "forest.js", "episode.js", "page.js")


def as_html(content: Mapping[str, Any]) -> str:
    """Return the page for the result of `content.page_content`.

    The page's own script draws the figures as SVG from the JSON in `<script id="data">`; they follow the width and the
    light or dark setting of the browser.

    Example: `Path("report.html").write_text(as_html(page_content(folder, find_text)), encoding="utf-8")`
    """
    notes = "".join(f"<li>{escape(note)}</li>" for note in content["notes"])
    parts = {
        "tiles": "".join(_tile(*tile) for tile in tiles_of(content)),
        "notes": f'<aside class="notes"><h2>Missing data</h2><ul>{notes}</ul></aside>' if notes else "",
        "script": "\n".join(_asset(name) for name in _SCRIPTS),
        # No text can end the script element.
        "data": json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
    }
    status = f"{content['status']}; page made {content['made']}"
    return shell(str(content["title"]), status, _filled("page.html", parts), command="treering report")


def shell(title: str, status: str, body: str, *, command: str) -> str:
    """Return a whole page in the style of reports around an HTML body; title and status are plain text."""
    parts = {"title": escape(title), "style": _asset("page.css"), "status": escape(status), "command": escape(command)}
    return _filled("shell.html", {**parts, "body": body})


def _filled(asset: str, parts: Mapping[str, str]) -> str:
    """Replace the markers of an asset; the last part may contain any text, even a marker, as it is filled in last."""
    page = _asset(asset)
    for name, part in parts.items():
        page = page.replace(f"<!--{name}-->", part)
    return page


def _tile(label: str, value: str, words: str) -> str:
    return f'<div class="tile"><b>{escape(value)}</b><span>{escape(label)}</span><small>{escape(words)}</small></div>'


def _asset(name: str) -> str:
    return (files("treering.report") / "assets" / name).read_text(encoding="utf-8")


CLASSES = {"trained": "o", "context": "g", "shared": "p", "special": "n"}
"""Classes of the style sheet, by properties of a span."""


class PageSpan(NamedTuple):
    """A piece of text."""

    text: str
    facts: Sequence[str]
    """Properties of the text, names of `CLASSES`."""
    image: str | None = None
    """Data URI of an image to show in place of the text."""


def trained_html(trajectories: Sequence[tuple[str, Sequence[PageSpan]]]) -> str:
    """Return a page of headings, each with its spans.

    Example: `trained_html([("row 1", [PageSpan("Hi", ["context"]), PageSpan(" there", ["trained"])])])` marks " there".
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
    shown = name if span.image is None else f'<img src="{escape(span.image)}" alt="{name}" title="{name}">'
    return f'<i class="{classes}">{shown}</i>'
