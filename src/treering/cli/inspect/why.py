"""`treering inspect --why`: where trajectories diverge though later tokens agree; found by `tree.divergence`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from treering.data import RenderedTrajectory
from treering.data.cache.dataset import TokenDataset
from treering.data.rendering.encoder import open_tokenizer
from treering.tree.divergence import Divergence, explain_losses
from treering.tree.forest import Forest

if TYPE_CHECKING:
    from tokenizers import Tokenizer

COLUMNS = ("row", "other", "position", "reads", "other reads", "tokens", "share", "shift")
_NUM_TOKENS_SHOWN = 6
_MAX_CHARACTERS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One place where two trajectories diverge; rows count the trajectories of the file from 1."""

    row: int
    other_row: int
    same_task: bool
    position: int
    """The first one where they differ."""
    token: int | None
    """The token there; None if the trajectory has ended."""
    other_token: int | None
    text: str | None
    """The text of this one from there on; None without a tokenizer."""
    other_text: str | None
    tokens: int
    """Tokens after it (between tasks, before it too) that agree again and are computed twice."""
    shift: int
    """How many positions later they are in this row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyReport:
    """Equal tokens that one tree per task does not share, in runs of at least 16."""

    repeated_tokens: int
    repeated_share: float
    """Share of the distinct tokens."""
    places: int
    causes: tuple[Cause, ...]
    """The costliest places, most tokens first."""


def explain_tasks(
    dataset: TokenDataset, forests: Sequence[Forest], tokenizer_dir: Path | None, num_causes: int
) -> WhyReport:
    """The `num_causes` costliest places of a file.

    Args:
        dataset: of the file.
        forests: one per task.
        tokenizer_dir: decodes tokens; None shows ids only.
        num_causes: at least 1.

    Example: rows `[1, 2, *run]` and `[1, 3, *run]` of one task with a run of 20 tokens have one cause, with 20 tokens.
    """
    rows = [int(row) for task in range(dataset.num_tasks) for row in dataset.rows_of(task)]
    tokenizer = None if tokenizer_dir is None else open_tokenizer(tokenizer_dir)
    losses = explain_losses(forests, num_causes)

    def cause(found: Divergence) -> Cause:
        ours, theirs = rows[found.branch], rows[found.other_branch]
        return Cause(
            row=ours + 1,
            other_row=theirs + 1,
            same_task=found.forest == found.other_forest,
            position=found.position,
            token=found.token,
            other_token=found.other_token,
            text=_text(tokenizer, dataset.row(ours), found.position),
            other_text=_text(tokenizer, dataset.row(theirs), found.position),
            tokens=found.num_tokens,
            shift=found.shift,
        )

    return WhyReport(
        repeated_tokens=losses.num_repeated_tokens,
        repeated_share=losses.repeated_share,
        places=losses.num_forks,
        causes=tuple(cause(found) for found in losses.divergences),
    )


def as_table(file: str, unique_tokens: int, why: WhyReport) -> Table:
    """The causes of one file for a terminal; `share` is of the file's unique tokens."""
    title = (
        f"{file}: {why.repeated_tokens:,} unique tokens ({why.repeated_share:.0%}) repeat another trajectory; the "
        f"costliest of {why.places:,} places where two of them part"
    )
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="left" if "reads" in name else "right", no_wrap="reads" in name)
    for cause in why.causes:
        other = f"{cause.other_row}" if cause.same_task else f"{cause.other_row}, other task"
        # As `Text`, so that trajectory text is not parsed as markup.
        reads = [Text(_short(cause.text, cause.token)), Text(_short(cause.other_text, cause.other_token))]
        share = f"{cause.tokens / unique_tokens:.1%}"
        table.add_row(
            f"{cause.row}", other, f"{cause.position:,}", *reads, f"{cause.tokens:,}", share, f"{cause.shift:+,}"
        )
    return table


def _text(tokenizer: "Tokenizer | None", trajectory: RenderedTrajectory, position: int) -> str | None:
    if tokenizer is None:
        return None
    ids = trajectory.tokens[position : position + _NUM_TOKENS_SHOWN].tolist()
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def _short(text: str | None, token: int | None) -> str:
    if token is None:
        return "(ends)"
    if text is None:
        return str(token)
    quoted = repr(text)
    return quoted if len(quoted) <= _MAX_CHARACTERS else f"{quoted[: _MAX_CHARACTERS - 1]}…"
