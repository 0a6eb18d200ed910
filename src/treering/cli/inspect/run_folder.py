"""What a run folder of `treering train` holds that inspection reads: rollouts, drafter settings, logged figures.

Knows file names and keys. They are written by files that load torch, which this one does not; tests hold them together.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treering import metrics
from treering.data.formats.files import numbered_lines
from treering.errors import InputError

ROLLOUTS_FOLDER = "rollouts"
CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"

MAX_EPOCHS = 2
"""Epochs that the store of a run keeps by default."""

_SETTINGS = ("max_draft", "min_acceptance", "policy", "shape", "sources")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """What a run logged of an epoch, its steps weighed by their tokens.

    Example: steps with 300 tokens in 100 row-steps and 100 tokens in 100 have 2.0 tokens per forward together.
    """

    tokens_per_forward: float
    acceptance: float | None
    """None where nothing was drafted."""


def trajectory_files(paths: Sequence[Path]) -> list[Path]:
    """The files of each path: itself, or those of a run folder, or of its folder of rollouts.

    Raises:
        InputError: a folder without such files.
    """
    return [file for path in paths for file in _files_of(path)]


def drafter_settings(path: Path) -> tuple[int, dict[str, Any]]:
    """Epochs that the store of a run keeps, and the settings of its drafter; the defaults where `path` is no run.

    Raises:
        InputError: the run's configuration cannot be read.
    """
    file = path / CONFIG_FILE
    if not file.is_file():
        return MAX_EPOCHS, {}
    try:
        history = json.loads(file.read_text(encoding="utf-8"))["history"]
        settings = {name: history[name] for name in _SETTINGS} | {"sources": tuple(history["sources"])}
        # A run without drafts may have no source; what drafts would have done is asked all the same.
        return history["max_epochs"], settings if settings["sources"] else settings | {"sources": ("history", "own")}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"{file}: a run's configuration says in [history] what is drafted, and it cannot be read ({error!r}); "
            "inspect the files of its rollouts folder instead"
        ) from error


def read_figures(path: Path) -> dict[int, RunFigures]:
    """By epoch, what a run logged of its own drafts; nothing where `path` is no run or logged nothing.

    Raises:
        InputError: a damaged line.
    """
    file = path / METRICS_FILE
    if not file.is_file():
        return {}
    totals: dict[int, list[float]] = {}
    for epoch, counts in _counts(file):
        have = totals.setdefault(epoch, [0.0] * 4)
        totals[epoch] = [a + b for a, b in zip(have, counts, strict=True)]
    return {
        epoch: RunFigures(
            tokens_per_forward=tokens / num_steps if num_steps else 0.0,
            acceptance=accepted / drafted if drafted else None,
        )
        for epoch, (tokens, num_steps, drafted, accepted) in totals.items()
    }


def _counts(file: Path) -> Iterator[tuple[int, tuple[float, float, float, float]]]:
    """Of each step the epoch, and its tokens, row-steps, drafted and accepted tokens."""
    for number, line in numbered_lines(file):
        try:
            row = json.loads(line)
            tokens, gain = row[metrics.NUM_SAMPLED], row[metrics.TOKENS_PER_FORWARD]
            drafted = row[metrics.NUM_DRAFTED]
            counts = tokens, tokens / gain if gain else 0.0, drafted, drafted * row[metrics.ACCEPTANCE]
            yield int(row[metrics.EPOCH]), counts
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(
                f"{file}:{number}: a line of a run's metrics has {metrics.TOKENS_PER_FORWARD} and others, and this one "
                f"cannot be read ({error!r}); inspect the files of the rollouts folder instead"
            ) from error


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    for folder in (path / ROLLOUTS_FOLDER, path):
        if files := sorted(folder.glob("epoch-*.jsonl")):
            return files
    raise InputError(
        f"a run keeps its rollouts in {ROLLOUTS_FOLDER}/epoch-*.jsonl, and {path} has none; run it with run.rollouts = "
        '"on", or name trajectory files'
    )
