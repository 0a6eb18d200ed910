"""Prints trajectories as they will be trained: on a terminal in colours, elsewhere with marks; or as a page."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from treering.cli.display.progress import WorkProgress
from treering.cli.inspect.files import open_files
from treering.cli.inspect.options import InspectOptions
from treering.cli.inspect.trained import ShownTrajectory, Span, shown_trajectories
from treering.errors import InputError
from treering.report.trained_page import PageSpan, as_html

MAX_THUMBNAILS = 100
"""Pictures of a file that a page shows; others are named."""
OPEN, CLOSE = "\u27e6", "\u27e7"
"""Around what is trained, where there are no colours."""
_STYLES = {"trained": "green", "context": "dim", "special": "bold"}
# Text of a file must not steer the terminal: control characters are shown by their pictures, and those that have none.
_PICTURES = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"}
_PICTURES |= dict.fromkeys(range(128, 160), "�") | {0x7F: "\u2421"}


def run(options: InspectOptions) -> None:
    """Prints the first trajectories of each file to stdout, as text or JSON, and writes them to a page if it is named.

    Raises:
        InputError: see `shown_trajectories`; a page whose folder does not exist.
    """
    page = options.html
    if page is not None and not page.absolute().parent.is_dir():
        raise InputError(f"--html needs an existing folder, got {page}: create {page.parent} first")
    shown: list[ShownTrajectory] = []
    with WorkProgress(Console(stderr=True)) as progress:
        for dataset in open_files(options, progress):
            shown += shown_trajectories(
                dataset,
                options.tokenizer_dir,
                num_shown=options.show,
                task=options.task,
                max_thumbnails=0 if page is None else MAX_THUMBNAILS,
            )
    if page is not None:
        page.write_text(as_html([(heading(one), _facts(one)) for one in shown]), encoding="utf-8")
    if options.json_output:
        print(json.dumps({"trajectories": [asdict(one) for one in shown]}, indent=2, allow_nan=False))
    elif page is not None:
        print(page)
    else:
        show(shown, Console(highlight=False))


def show(shown: Sequence[ShownTrajectory], console: Console) -> None:
    """Prints a legend, and each trajectory under its heading."""
    has_colours = console.color_system is not None and not console.no_color
    console.print(_legend(has_colours), soft_wrap=True)
    for one in shown:
        console.print()
        console.print(Text(heading(one), "bold underline"), soft_wrap=True)
        console.print(as_text(one, has_colours=has_colours), soft_wrap=True)


def heading(one: ShownTrajectory) -> str:
    """What a trajectory is, in a line.

    Example: "a.jsonl row 1, task 7: reward 1; 523 tokens, 120 trained; the first 412 shared in a task of 8".
    """
    reward = "" if one.reward is None else f" reward {one.reward:g};"
    shared = f"the first {one.num_shared:,}" if one.num_shared else "none"
    counts = f"{one.num_tokens:,} tokens, {one.num_trained:,} trained; {shared} shared in a task of {one.num_in_task}"
    return printable(f"{one.file} row {one.row}, task {one.task_id}:{reward} {counts}")


def as_text(one: ShownTrajectory, *, has_colours: bool) -> Text:
    """The whole text of a trajectory, with colours or with marks, and a mark where the shared tokens end."""
    text, num_shared, was_trained = Text(), one.num_shared, False
    for span in one.spans:
        if was_trained and not span.trained and not has_colours:
            text.append(CLOSE)
        if num_shared and not span.shared:
            text.append(_shared_mark(num_shared), "reverse")
            num_shared = 0
        if span.trained and not was_trained and not has_colours:
            text.append(OPEN)
        text.append(printable(span.text), " ".join(_STYLES[fact] for fact in _facts_of(span) if fact in _STYLES))
        was_trained = span.trained
    if was_trained and not has_colours:
        text.append(CLOSE)
    return text.append(_shared_mark(num_shared), "reverse") if num_shared else text


def printable(text: str) -> str:
    """A text whose control characters, tabs and line breaks left out, are shown instead of obeyed.

    Example: the escape character becomes U+241B.
    """
    return text.translate(_PICTURES)


def _facts(one: ShownTrajectory) -> list[PageSpan]:
    return [
        PageSpan(printable(span.text), _facts_of(span), None if span.picture is None else span.picture.thumbnail)
        for span in one.spans
    ]


def _facts_of(span: Span) -> list[str]:
    also = [name for name in ("shared", "special") if getattr(span, name)]
    return ["trained" if span.trained else "context", *also]


def _shared_mark(num_shared: int) -> str:
    return f"\u27e8{num_shared:,} shared tokens\u27e9"


def _legend(has_colours: bool) -> Text:
    trained = Text("trained", _STYLES["trained"]) if has_colours else Text(f"{OPEN}trained{CLOSE}")
    rest = [(name, _STYLES[name]) for name in ("context", "special")] if has_colours else ["context"]
    return Text(", ").join([trained, *(Text.assemble(one) for one in rest)])
