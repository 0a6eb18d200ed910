"""What a run is, for its page: settings, model, machine and versions, and where it was resumed."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from treering.files.atomic import write_text
from treering.files.step_lines import read_rows
from treering.report.run import RunData

STARTS_FILE = "starts.jsonl"
"""A line for each start of a run: "step" that it begins after, "time", "machine", "num_ranks", "parameters",
"versions"."""


def facts_of(run: RunData) -> dict[str, Any]:
    """The facts of a run: a table, its settings by dotted name, and the steps after which it was resumed.

    Example: a run that was killed in its seventh step and resumed after its fifth has "resumed" [5].
    """
    starts = [row for row in read_rows(run.folder / STARTS_FILE) if isinstance(row.get("step"), int)]
    return {
        "table": dict(_table(run.config, starts[-1] if starts else {})),
        "settings": dict(_flat(run.config)),
        "resumed": sorted({start["step"] for start in starts} - {0}),
    }


def note_start(folder: Path, start: Mapping[str, Any]) -> None:
    """Adds a start to the run in a folder; damaged lines are dropped.

    Raises:
        OSError: the file cannot be written.

    Example: `note_start(folder, {"step": 0, "time": "2026-03-01 10:20", "machine": "Linux x86_64, 16 cores"})`.
    """
    file = folder / STARTS_FILE
    rows = [*read_rows(file), dict(start)]
    write_text(file, "".join(json.dumps(row) + "\n" for row in rows))


def _table(config: Mapping[str, Any], start: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    model = config.get("model")
    if isinstance(model, Mapping):
        yield "model", str(model["path"]) if model.get("path") else "random weights"
    for name, key in (("parameters", "parameters"), ("machine", "machine"), ("processes", "num_ranks")):
        if start.get(key):
            yield name, str(start[key])
    versions = start.get("versions")
    if isinstance(versions, Mapping):
        yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())
    if start.get("time"):
        yield "started", str(start["time"])


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.dumps(value)
