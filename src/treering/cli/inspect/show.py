"""Print trajectories with the tokens that are trained, or write them to a page."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.text import Text

from treering.cli.display import PlainConsole, WorkProgress
from treering.cli.inspect.inspect_options import InspectOptions
from treering.cli.inspect.run_inspect import open_files
from treering.data import RenderedTrajectory, TaskId
from treering.data.cache.dataset import TokenDataset
from treering.data.image import StoredImage, thumbnail_uri
from treering.data.rendering.encoder import open_tokenizer
from treering.errors import InputError
from treering.report.page import PageSpan
from treering.report.page import trained_html as as_html
from treering.tree.forest import ImageTable
from treering.types import TokenIds, num_common

NUM_SHOWN = 3
"""Trajectories of a file without `--show`."""
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece's mark for a space before a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanImage:
    """Image of a span."""

    number: int
    """Number in its trajectory, from 1."""
    width: int
    """Pixels of the file, upright."""
    height: int
    digest: str
    """Hexadecimal digest; equal images have equal digests."""
    thumbnail: str | None
    """Small copy as a data URI, for a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSpan:
    """Successive tokens that are treated alike."""

    text: str
    """Decoded text with special tokens; ids without a tokenizer; a description in brackets for an image."""
    num_tokens: int
    trained: bool
    """Whether the loss covers them."""
    shared: bool
    """Whether another trajectory of the task also begins with them, so that they are computed once for both."""
    special: bool
    """Whether they are tokens that no text produces, such as turn markers."""
    image: SpanImage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTrajectory:
    """One sequence; a chat whose template rewrites history has several."""

    file: str
    row: int
    """Row of the trajectory in its file, from 1."""
    task_id: TaskId
    reward: float | None
    num_tokens: int
    num_trained: int
    num_shared: int
    """Leading tokens that another sequence of the task shares."""
    num_in_task: int
    """Number of sequences in its task."""
    spans: tuple[TextSpan, ...]


def shown_trajectories(
    dataset: TokenDataset,
    tokenizer: Path | None,
    *,
    num_shown: int | None = None,
    task: str | None = None,
    max_thumbnails: int = 0,
) -> list[ShownTrajectory]:
    """Return the first trajectories of a file, or of one of its tasks, as they will be trained.

    Args:
        dataset: of the file.
        tokenizer: decodes tokens; None shows ids.
        num_shown: number of trajectories; None: `NUM_SHOWN`, or all of the task.
        task: id of the task as text; None: any.
        max_thumbnails: number of images, from the first, that get a small copy.

    Raises:
        InputError: no such task.

    Example: tokens `[5, 6, 7]` with mask `[0, 1, 1]`, next to `[5, 6, 8]` in the same task, are the spans "5", shared;
    "6", shared and trained; "7", trained.
    """
    file = dataset.facts.source
    numbers = [i for i, one in enumerate(dataset.task_ids) if task is None or str(one) == task]
    if not numbers:
        names = list(dict.fromkeys(map(str, dataset.task_ids)))
        listed = ", ".join(map(repr, names[:5])) + (f" of {len(names):,}" if len(names) > 5 else "")
        raise InputError(f"{file} has no task {task!r}; its first ones are {listed}")
    # Indices of trajectories, in file order; a trajectory of several sequences counts once.
    indices = np.unique(np.concatenate([dataset.rows["index"][dataset.rows_of(number)] for number in numbers]))
    chosen = indices[: num_shown or (NUM_SHOWN if task is None else None)]
    rows = np.flatnonzero(np.isin(dataset.rows["index"], chosen)).tolist()
    groups = {number: dataset.task(number) for number in set(dataset.rows["task"][rows].tolist())}
    texts, thumbnails = _Texts(tokenizer), _Thumbnails(max_thumbnails)
    shown = []
    for row in rows:
        number = int(dataset.rows["task"][row])
        index = int(np.searchsorted(dataset.rows_of(number), row))
        one = groups[number][index]
        shown.append(_shown(one, groups[number], texts, thumbnails, file=file, row=one.index + 1))
    return shown


class _Texts:
    def __init__(self, folder: Path | None) -> None:
        self._tokenizer: Any = None if folder is None else open_tokenizer(folder)
        added = [] if self._tokenizer is None else list(self._tokenizer.get_added_tokens_decoder())
        self._added = np.array(sorted(added), np.int64)

    def are_special(self, tokens: TokenIds) -> npt.NDArray[np.bool_]:
        return np.isin(tokens, self._added)

    def decode(self, tokens: TokenIds, *, is_first: bool) -> str:
        if self._tokenizer is None:
            ids = " ".join(map(str, tokens.tolist()))
            return ids if is_first else f" {ids}"
        text = str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False))
        # Such tokenizers drop the space before the first decoded word.
        begins_word = str(self._tokenizer.id_to_token(int(tokens[0])) or "").startswith(_SPACE)
        return f" {text}" if begins_word and not is_first and not text.startswith(" ") else text


class _Thumbnails:
    """Small copies of the first distinct images."""

    def __init__(self, max_count: int) -> None:
        self._made: dict[bytes, str] = {}
        self._max_count = max_count

    def of(self, image: StoredImage) -> str | None:
        if image.digest not in self._made and len(self._made) < self._max_count:
            self._made[image.digest] = thumbnail_uri(image.source)
        return self._made.get(image.digest)


def _shown(
    one: RenderedTrajectory,
    task: Sequence[RenderedTrajectory],
    texts: _Texts,
    thumbnails: _Thumbnails,
    *,
    file: str,
    row: int,
) -> ShownTrajectory:
    table = ImageTable()
    keys = table.tokens(one.tokens, one.images)
    others = (table.tokens(other.tokens, other.images) for other in task if other is not one)
    num_shared = max((num_common(keys, other) for other in others), default=0)
    is_shared = np.arange(one.tokens.size) < num_shared
    # The number of the image at each token, from 1; 0 for text.
    image_numbers = np.zeros(one.tokens.size, np.int64)
    for number, placed in enumerate(one.images, start=1):
        image_numbers[placed.start : placed.stop] = number
    kinds = np.stack([one.loss_mask, is_shared, texts.are_special(one.tokens), image_numbers], axis=1)
    cuts = [0, *(np.flatnonzero((kinds[1:] != kinds[:-1]).any(axis=1)) + 1).tolist(), one.tokens.size]
    return ShownTrajectory(
        file=file,
        row=row,
        task_id=one.task_id,
        reward=one.reward,
        num_tokens=one.tokens.size,
        num_trained=int(one.loss_mask.sum()),
        num_shared=num_shared,
        num_in_task=len(task),
        spans=tuple(
            _image_span(one, int(image_numbers[begin]), thumbnails, shared=bool(kinds[begin, 1]))
            if image_numbers[begin]
            else TextSpan(
                text=texts.decode(one.tokens[begin:end], is_first=begin == 0),
                num_tokens=end - begin,
                trained=bool(kinds[begin, 0]),
                shared=bool(kinds[begin, 1]),
                special=bool(kinds[begin, 2]),
            )
            for begin, end in pairwise(cuts)
        ),
    )


def _image_span(one: RenderedTrajectory, number: int, thumbnails: _Thumbnails, *, shared: bool) -> TextSpan:
    image = one.images[number - 1].image
    assert isinstance(image, StoredImage), "a file has encoded images"
    (width, height), digest = image.size, image.digest.hex()
    return TextSpan(
        text=f"[image {number}: {width}x{height}, {image.num_tokens} tokens, digest {digest[:8]}…]",
        num_tokens=image.num_tokens,
        trained=False,
        shared=shared,
        special=True,
        image=SpanImage(number=number, width=width, height=height, digest=digest, thumbnail=thumbnails.of(image)),
    )


MAX_THUMBNAILS = 100
"""Images of a file that a page shows; others are only named."""
OPEN, CLOSE = "\u27e6", "\u27e7"
"""Marks around trained text, where there are no colours."""
_STYLES = {"trained": "green", "context": "dim", "special": "bold"}
# Text of a file must not steer the terminal: show control characters as symbols, or as U+FFFD if they have none.
_IMAGES = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"}
_IMAGES |= dict.fromkeys(range(128, 160), "�") | {0x7F: "\u2421"}


def run(options: InspectOptions) -> None:
    """Print the first trajectories of each file to stdout, as text or JSON, or write them to a page.

    Raises:
        InputError: an unknown task, or a page in a folder that does not exist.
    """
    page = options.html
    if page is not None and not page.absolute().parent.is_dir():
        raise InputError(f"--html needs an existing folder, got {page}: create {page.parent} first")
    shown: list[ShownTrajectory] = []
    with WorkProgress(PlainConsole(stderr=True)) as progress:
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
        show(shown, PlainConsole())


def show(shown: Sequence[ShownTrajectory], console: Console) -> None:
    """Print a legend, and each trajectory under its heading."""
    has_colours = console.color_system is not None and not console.no_color
    trained = Text("trained", _STYLES["trained"]) if has_colours else Text(f"{OPEN}trained{CLOSE}")
    rest = [(name, _STYLES[name]) for name in ("context", "special")] if has_colours else ["context"]
    console.print(Text(", ").join([trained, *(Text.assemble(one) for one in rest)]))
    for one in shown:
        console.print()
        console.print(Text(heading(one), "bold underline"))
        console.print(as_text(one, has_colours=has_colours))


def heading(one: ShownTrajectory) -> str:
    """Return a line that describes a trajectory.

    Example: "a.jsonl row 1, task 7: reward 1; 523 tokens, 120 trained; the first 412 shared in a task of 8".
    """
    reward = "" if one.reward is None else f" reward {one.reward:g};"
    shared = f"the first {one.num_shared:,}" if one.num_shared else "none"
    counts = f"{one.num_tokens:,} tokens, {one.num_trained:,} trained; {shared} shared in a task of {one.num_in_task}"
    return printable(f"{one.file} row {one.row}, task {one.task_id}:{reward} {counts}")


def as_text(one: ShownTrajectory, *, has_colours: bool) -> Text:
    """Return the whole text of a trajectory, with colours or marks, and a mark where the shared tokens end."""
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
    """Return a text with its control characters, except tabs and line breaks, made visible.

    Example: the escape character becomes U+241B.
    """
    return text.translate(_IMAGES)


def _facts(one: ShownTrajectory) -> list[PageSpan]:
    return [
        PageSpan(printable(span.text), _facts_of(span), None if span.image is None else span.image.thumbnail)
        for span in one.spans
    ]


def _facts_of(span: TextSpan) -> list[str]:
    also = [name for name in ("shared", "special") if getattr(span, name)]
    return ["trained" if span.trained else "context", *also]


def _shared_mark(num_shared: int) -> str:
    return f"\u27e8{num_shared:,} shared tokens\u27e9"
