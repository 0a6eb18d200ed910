"""`treering report`: writes the page of a run, and its rollouts as a Parquet file. Loads no torch."""

import json
import webbrowser
from pathlib import Path

from rich.console import Console

from treering.atomic import write_text
from treering.cli.display.progress import note_compiling
from treering.cli.report.texts import find_text
from treering.history.draft.kernel import propose
from treering.report.content import page_content
from treering.report.page import as_html
from treering.writing import check_regular, writing

PAGE_FILE = "report.html"


def run(folder: Path, out: Path | None, open_page: bool, rollouts: Path | None, json_output: bool) -> None:
    """Writes the page and prints where it is.

    Args:
        folder: of a run, or of a demo.
        out: the page's file; None is `report.html` in the folder.
        open_page: show it in the browser.
        rollouts: Parquet file for all rollouts of the run; None writes none.
        json_output: print the page's content as JSON, and write no page unless `out` names its file.

    Raises:
        InputError: the folder holds no run.
        StateError: a file cannot be written.
    """
    console = Console(stderr=True, highlight=False)
    note_compiling(console, propose)
    content = page_content(folder, find_text)
    if rollouts is not None:
        from treering.cli.report.parquet import write_parquet

        num_rollouts = write_parquet(folder, rollouts)
        console.print(f"{num_rollouts:,} rollouts are in {rollouts}", soft_wrap=True)
    if json_output:
        print(json.dumps(content, allow_nan=False))
    if json_output and out is None:
        return
    file = folder / PAGE_FILE if out is None else out
    page = as_html(content)
    with writing(file, len(page)):
        check_regular(file)
        write_text(file, page)
    if not json_output:
        print(file)
    if open_page:
        webbrowser.open(file.resolve().as_uri())
