"""Reads the folder of a run for its page, at any time: while it runs, after a kill, or damaged."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treering import metrics
from treering.errors import InputError
from treering.files.lock import is_locked
from treering.files.step_lines import read_rows, spans
from treering.files.writing import check_regular

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
LOCK_FILE = "run.lock"
DEMO_FILE = "demo.json"
SIDES = ("plain", "treering")
"""The runs of a demo's folder, ours last."""

Row = Mapping[str, Any]
"""A line of metrics.jsonl: "step", and numbers by the names of `treering.metrics`, or "nan", "inf", "-inf"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """What a run has written so far.

    Attributes:
        name: of the run on its page.
        folder: of the run.
        rows: a row per step, ascending; of a step that stands twice, the later row.
        config: the settings of `config.json`; empty if it is missing or damaged.
        notes: what is missing, in sentences.
    """

    name: str
    folder: Path
    rows: tuple[Row, ...]
    config: Mapping[str, Any]
    notes: tuple[str, ...]

    @property
    def num_planned(self) -> int | None:
        """Steps that the settings amount to; None where they are missing."""
        count = self.config.get("num_steps")
        return count if isinstance(count, int) else None

    @property
    def is_supervised(self) -> bool:
        """Whether it trains on given trajectories and samples no rollouts."""
        # Step 0 has an evaluation alone.
        steps = [row for row in self.rows if row["step"] > 0]
        return "train" in self.config or (bool(steps) and metrics.NUM_SAMPLED not in steps[-1])

    @property
    def runs_episodes(self) -> bool:
        """Whether its rollouts are runs of an environment, each of one branch or several."""
        return section_of(self.config, "task").get("kind") in ("environment", "verifiers")


def read_runs(folder: Path, user: str = "treering report") -> tuple[RunData, ...]:
    """The run of a folder, or both runs of a demo's folder, ours last; errors begin with the `user`.

    Raises:
        InputError: the folder is missing, or holds nothing of a run.

    Example: `read_runs(Path("runs/demo"))` gives the runs "plain" and "treering".
    """
    if not folder.is_dir():
        raise InputError(f"{user} needs the folder of a run, and {folder} is none; name the run.dir of a run")
    found = [folder / side for side in SIDES if _is_run(folder / side)]
    if _is_run(folder) or not found:
        if not _is_run(folder):
            raise InputError(
                f"{user} needs the folder of a run, which holds {METRICS_FILE} or {CONFIG_FILE}, and {folder} holds "
                "neither; name the run.dir of a run, or a demo's folder"
            )
        found = [folder]
    return tuple(read_run(each) for each in found)


def read_run(folder: Path) -> RunData:
    """What the folder of one run holds; what cannot be read is a note.

    Example: a run that was killed while it wrote its ninth row has the rows 1 to 8 and the note "metrics.jsonl has 1
    line that cannot be read".
    """
    notes: list[str] = []
    rows = _rows(folder / METRICS_FILE, notes)
    config = _object(folder / CONFIG_FILE, notes)
    return RunData(name=folder.resolve().name, folder=folder, rows=rows, config=config, notes=tuple(notes))


def read_demo(folder: Path) -> Mapping[str, Any]:
    """The comparison that `treering demo` writes when it ends; empty before, and for other folders."""
    return _object(folder / DEMO_FILE, []) if (folder / DEMO_FILE).is_file() else {}


def is_training(folder: Path) -> bool:
    """Whether a process of this machine trains in a run's folder, or in one of a demo's."""
    return any(is_locked(place / LOCK_FILE) for place in (folder, *(folder / side for side in SIDES)))


def number(value: object) -> float | None:
    """A metric as a finite number; None for what is missing, not a number or infinite.

    Example: 2 and 2.0 give 2.0, and "nan" gives None.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None  # type: ignore[arg-type]


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (METRICS_FILE, CONFIG_FILE))


def _rows(file: Path, notes: list[str]) -> tuple[Row, ...]:
    if not file.is_file():
        notes.append(f'{file.name} is missing: no step is done yet, or the sink "jsonl" is off.')
        return ()
    check_regular(file)
    # Counted first: a run that trains may add lines meanwhile, and these are not bad.
    with file.open("rb") as lines:
        num_lines = sum(1 for _ in lines)
    found = list(read_rows(file))
    num_bad = max(0, num_lines - len(found))
    rows = {row["step"]: row for row in found}
    if num_bad:
        notes.append(f"{file.name} has {num_bad} line{'s' * (num_bad > 1)} that cannot be read.")
    missing = set(range(1, max(rows, default=0) + 1)) - rows.keys()
    if missing:
        notes.append(f"{file.name} lacks step{'s' * (len(missing) > 1)} {spans(missing)}.")
    if not rows:
        notes.append("No step is done yet.")
    return tuple(rows[step] for step in sorted(rows))


def section_of(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of a run's settings; empty if it is missing or no section."""
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def _object(file: Path, notes: list[str]) -> dict[str, Any]:
    try:
        check_regular(file)
        value = json.loads(file.read_bytes())
        if isinstance(value, dict):
            return value
        notes.append(f"{file.name} holds no JSON object, so the settings are unknown.")
    except FileNotFoundError:
        notes.append(f"{file.name} is missing, so the settings are unknown.")
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{file.name} cannot be read ({error}), so the settings are unknown.")
    return {}
