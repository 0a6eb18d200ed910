"""`treering inspect`: how much trajectory files share, and the best speedup that allows. It counts and never times."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console

from treering.analysis.tower import read_tower
from treering.cli.data_files import expanded, read_file, show_build
from treering.cli.display.progress import WorkProgress, note_compiling
from treering.cli.inspect.file_report import FileReport, measure
from treering.cli.inspect.tables import cause_tables, detail_tables, summary_table
from treering.cli.inspect.verdict import next_command, picture_line, verdict
from treering.data import FormatName, Renderer, Template
from treering.data.cache.build import ReadOptions
from treering.tree.build import fill_forest
from treering.tree.repeats import find_repeats
from treering.types import find_shape


def inspect_files(
    paths: Sequence[Path],
    tokenizer_dir: Path | None,
    model_shape: str,
    template: Template = "auto",
    num_causes: int = 0,
    format: FormatName = "auto",
    keeps_cache: bool = True,
) -> list[FileReport]:
    """Reads, renders and measures trajectory files, with progress on stderr.

    With `num_causes` above 0, each report lists that many places where sharing is lost. `format` is that of the
    records in every file, and with `keeps_cache` their tokens are kept for the next start.

    Raises:
        InputError: a bad file, or messages without a tokenizer.
        ConfigError: an unknown model shape.

    Example: a file with `[5, 6, 7]` and `[5, 6, 8]` of one task reports 6 flat tokens, 4 unique ones and sharing 0.33.
    """
    shape = find_shape(model_shape)
    # Of the same model where a folder is named, else of the one that reads the pictures.
    tower = read_tower(Path(model_shape)) or (None if tokenizer_dir is None else read_tower(tokenizer_dir))
    renderer = Renderer(tokenizer=tokenizer_dir, template=template)
    reports: list[FileReport] = []
    form: str | None = None
    console = Console(stderr=True)
    with WorkProgress(console) as progress:
        for number, path in enumerate(expanded(paths)):
            dataset = read_file(
                path,
                renderer,
                ReadOptions(format=format),
                keeps_cache=keeps_cache,
                on_progress=partial(show_build, progress, path.name),
            )
            form = form or dataset.facts.form
            for note in dataset.facts.notes:
                progress.console.print(f"{path.name}: {note}", soft_wrap=True)
            progress.show(f"{path.name}: merging")
            if number == 0:
                note_compiling(progress.console, fill_forest, *([find_repeats] if num_causes else []))
            reports.append(measure(dataset, shape, tokenizer_dir, num_causes, tower))
    if form:
        console.print(form, soft_wrap=True, markup=False)
    return reports


def as_json(reports: Sequence[FileReport]) -> str:
    """The reports as one JSON object `{"files": [...]}`."""
    return json.dumps({"files": [asdict(report) for report in reports]}, indent=2, allow_nan=False)


def run(
    files: list[Path],
    tokenizer: Path | None,
    model_shape: str,
    template: Template,
    json_output: bool,
    num_causes: int = 0,
    format: FormatName = "auto",
    more: bool = False,
    tokenizer_name: str | None = None,
    keeps_cache: bool = True,
) -> None:
    """Prints the reports of `files` to stdout, as JSON or as tables with a verdict.

    `more` adds every other figure to the tables, and `tokenizer_name` is what the next command calls the tokenizer.
    """
    reports = inspect_files(files, tokenizer, model_shape, template, num_causes, format, keeps_cache)
    if json_output:
        print(as_json(reports))
        return
    console = Console(highlight=False)
    details = detail_tables(reports, model_shape) if more else []
    for table in [summary_table(reports), *details, *cause_tables(reports)]:
        console.print(table)
    following = next_command(reports, tokenizer_name, has_causes=num_causes > 0)
    pictures = [picture_line(report, model_shape) for report in reports if report.pictures]
    for line in [*(verdict(report, model_shape) for report in reports), *pictures, f"Next: {following}"]:
        console.print(line, markup=False, soft_wrap=not sys.stdout.isatty() or line.startswith("Next"))
