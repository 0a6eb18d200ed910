"""`treering report`: writes the page of a run, and its rollouts as a Parquet file. Loads no torch."""

import json
import time
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from treering.cli.display.progress import note_compiling
from treering.cli.report.texts import find_text
from treering.errors import ConfigError
from treering.files.atomic import write_text
from treering.files.writing import check_regular, writing
from treering.history.draft.kernel import propose
from treering.report.content import page_content
from treering.report.page import as_html
from treering.report.run import is_training

PAGE_FILE = "report.html"
COMPARISON_FILE = "comparison.html"
REFRESH_S = 10
"""Seconds between two pages of a run that trains."""


def run(folders: Sequence[Path], out: Path | None, open_page: bool, rollouts: Path | None, json_output: bool) -> None:
    """Writes the page and prints where it is; opened while the run trains, the page follows the run to its end.

    Args:
        folders: of a run or of a demo; several are compared.
        out: the page's file; None is `report.html` in the folder, and of a comparison `comparison.html` here.
        open_page: show it in the browser.
        rollouts: Parquet file for all rollouts of the run; None writes none.
        json_output: print the page's content as JSON, and write no page unless `out` names its file.

    Raises:
        ConfigError: several folders with `rollouts`, or a page to open that is not written.
        InputError: a folder holds no run.
        StateError: a file cannot be written.
    """
    folder, *others = folders
    console = Console(stderr=True, highlight=False)
    note_compiling(console, propose)
    if rollouts is not None and others:
        raise ConfigError(f"--rollouts writes those of one run, got {len(folders)} runs; name one")
    if open_page and json_output and out is None:
        raise ConfigError("--open shows a page, and with --json none is written; name one by --out, or leave one out")
    follows = open_page and not json_output and any(map(is_training, folders))
    content = page_content(folder, find_text, others=others)
    if rollouts is not None:
        from treering.cli.report.parquet import write_parquet

        num_rollouts = write_parquet(folder, rollouts)
        console.print(f"{num_rollouts:,} rollouts are in {rollouts}", soft_wrap=True)
    if json_output:
        print(json.dumps(content, allow_nan=False))
    if json_output and out is None:
        return
    file = out or (Path(COMPARISON_FILE) if others else folder / PAGE_FILE)
    _write(file, as_html({**content, "refresh_s": REFRESH_S if follows else None}))
    if not json_output:
        print(file, flush=True)
    if open_page:
        webbrowser.open(file.resolve().as_uri())
    if follows:
        console.print("the page follows the run until it ends, or this command does (Ctrl-C)")
        _follow(folders, file)


def _follow(folders: Sequence[Path], file: Path) -> None:
    """Writes the page again and again; the last one no longer reloads itself."""
    follows = True
    while follows:
        try:
            time.sleep(REFRESH_S)
            follows = any(map(is_training, folders))
        except KeyboardInterrupt:
            follows = False
        content = page_content(folders[0], find_text, others=folders[1:])
        _write(file, as_html({**content, "refresh_s": REFRESH_S if follows else None}))


def _write(file: Path, page: str) -> None:
    with writing(file, len(page)):
        check_regular(file)
        write_text(file, page)
