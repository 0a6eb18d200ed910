"""`treering inspect`: how much trajectory files share, and the best speedup that allows. It counts and never times."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from treering.analysis.tower import read_tower
from treering.cli.display.progress import WorkProgress, note_compiling
from treering.cli.inspect.file_report import FileReport, measure
from treering.cli.inspect.files import open_files
from treering.cli.inspect.options import InspectOptions
from treering.cli.inspect.tables import cause_tables, detail_tables, summary_table
from treering.cli.inspect.verdict import next_command, picture_line, verdict
from treering.tree.build import fill_forest
from treering.tree.repeats import find_repeats
from treering.types import DEFAULT_SHAPE, find_shape

_NUM_CAUSES = 10
"""Places where sharing is lost that `--why` lists."""


def inspect_files(options: InspectOptions) -> list[FileReport]:
    """Reads, renders and measures trajectory files, with progress on stderr.

    Raises:
        InputError: a bad file, or messages without a tokenizer.
        ConfigError: an unknown model shape.

    Example: a file with `[5, 6, 7]` and `[5, 6, 8]` of one task reports 6 flat tokens, 4 unique ones and sharing 0.33.
    """
    name, tokenizer = options.model_shape or DEFAULT_SHAPE, options.tokenizer_dir
    shape = find_shape(name)
    # Of the same model where a folder is named, else of the one that reads the pictures.
    tower = read_tower(Path(name)) or (None if tokenizer is None else read_tower(tokenizer))
    num_causes = _NUM_CAUSES if options.why else 0
    reports: list[FileReport] = []
    with WorkProgress(Console(stderr=True)) as progress:
        for dataset in open_files(options, progress):
            if not reports:
                note_compiling(progress.console, fill_forest, *([find_repeats] if options.why else []))
            progress.show(f"{Path(dataset.facts.source).name}: merging")
            reports.append(measure(dataset, shape, tokenizer, num_causes, tower))
    return reports


def run(options: InspectOptions) -> None:
    """Prints the reports to stdout, as JSON or as tables with a verdict."""
    reports, shape = inspect_files(options), options.model_shape or DEFAULT_SHAPE
    if options.json_output:
        print(json.dumps({"files": [asdict(report) for report in reports]}, indent=2, allow_nan=False))
        return
    console = Console(highlight=False)
    details = detail_tables(reports, shape) if options.more else []
    for table in [summary_table(reports), *details, *cause_tables(reports)]:
        console.print(table)
    following = next_command(reports, options.tokenizer, has_causes=options.why)
    pictures = [picture_line(report, shape) for report in reports if report.pictures]
    for line in [*(verdict(report, shape) for report in reports), *pictures, f"Next: {following}"]:
        console.print(line, markup=False, soft_wrap=not sys.stdout.isatty() or line.startswith("Next"))
