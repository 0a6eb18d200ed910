"""Run `treering inspect`: report what trajectories share, and the best speedup that trees can give."""

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.table import Table

from treering.analysis.vision_tower import read_vision_tower
from treering.cli.data_files import expanded, read_file, show_build
from treering.cli.display import PlainConsole, WorkProgress, figures_table, note_compiling
from treering.cli.inspect.file_report import FileReport, as_table, measure
from treering.cli.inspect.inspect_options import InspectOptions
from treering.data.cache.build_dataset import ReadOptions
from treering.data.cache.dataset import TokenDataset
from treering.tree.radix import fill_forest
from treering.tree.repeats import find_repeats
from treering.types import DEFAULT_SHAPE, find_shape

_NUM_CAUSES = 10
"""Causes of lost sharing that `--why` lists."""


def inspect_files(options: InspectOptions) -> list[FileReport]:
    """Read, render and measure trajectory files, with progress on stderr.

    Raises:
        InputError: a bad file, or messages without a tokenizer.
        ConfigError: an unknown model shape.

    Example: a file with `[5, 6, 7]` and `[5, 6, 8]` of one task has 6 flat tokens, 4 unique tokens and sharing 0.33.
    """
    name, tokenizer = options.model_shape or DEFAULT_SHAPE, options.tokenizer_dir
    shape = find_shape(name)
    # Read the vision tower of the named model folder, else of the model whose processor reads the images.
    vision_tower = read_vision_tower(Path(name)) or (None if tokenizer is None else read_vision_tower(tokenizer))
    num_causes = _NUM_CAUSES if options.why else 0
    reports: list[FileReport] = []
    with WorkProgress(PlainConsole(stderr=True)) as progress:
        for dataset in open_files(options, progress):
            if not reports:
                note_compiling(progress.console, fill_forest, *([find_repeats] if options.why else []))
            progress.show(f"{Path(dataset.facts.source).name}: merging")
            reports.append(measure(dataset, shape, tokenizer, num_causes, vision_tower))
    return reports


def run(options: InspectOptions) -> None:
    """Print the reports to stdout, as JSON or as tables with a verdict."""
    reports, shape = inspect_files(options), options.model_shape or DEFAULT_SHAPE
    if options.json_output:
        print(json.dumps({"files": [asdict(report) for report in reports]}, indent=2, allow_nan=False))
        return
    console = PlainConsole()
    details = detail_tables(reports, shape) if options.more else []
    causes = [as_table(stem_of(report), report.unique_tokens, report.why) for report in reports if report.why]
    for table in [summary_table(reports), *details, *causes]:
        console.print(table)
    following = next_command(reports, options)
    images = [image_line(report, shape) for report in reports if report.images]
    verdicts = [line for report in reports for line in (training_line(report), verdict(report, shape))]
    routes = [routes_line(report) for report in reports if report.unique_tokens_without_routes is not None]
    for line in [*verdicts, *images, *routes, f"Next: {following}"]:
        console.print(line)


def open_files(options: InspectOptions, progress: WorkProgress) -> Iterator[TokenDataset]:
    """Yield the files in order; print once how messages become text, and notes on each file.

    Raises:
        InputError: a bad file, or messages without a tokenizer.
    """
    renderer, is_noted = options.renderer(), False
    for path in expanded(options.files):
        dataset = read_file(
            path,
            renderer,
            ReadOptions(format=options.format),
            keeps_cache=not options.no_cache,
            on_progress=partial(show_build, progress, path.name),
        )
        if dataset.facts.form and not is_noted:
            progress.console.print(dataset.facts.form)
            is_noted = True
        for note in dataset.facts.notes:
            progress.console.print(f"{path.name}: {note}")
        yield dataset


SUMMARY_COLUMNS = ("rows", "tokens", "with sharing", "most speedup")
REWARD_COLUMNS = ("reward", "spread", "one reward")
GAIN_COLUMNS = ("rows", "flat tokens", "unique tokens", "sharing", "token bound", "FLOP bound", "prompt only")
CUT_COLUMNS = ("set sharing", "set token bound", "set FLOP bound", "turns", "turns token bound", "turns FLOP bound")
SHAPE_COLUMNS = ("leaves", "forks", "depth", "levels", "segments", "median", "mean", "p90", "max")


def summary_table(reports: Sequence[FileReport]) -> Table:
    """Return the main figures, with columns of rewards if any file has rewards."""
    has_rewards = any(report.rewards for report in reports)
    title = "One tree per task: tokens without and with sharing, and the most that training can gain"
    if has_rewards:
        title += "; rewards: mean, spread, tasks in which all are the same"
    table = _table(title, (*SUMMARY_COLUMNS, *(REWARD_COLUMNS if has_rewards else ())))
    for report in reports:
        counts = (report.rows, report.flat_tokens, report.unique_tokens)
        cells = [stem_of(report), *(short(count) for count in counts), f"{report.flop_bound:.2f}x"]
        table.add_row(*cells, *(_reward_cells(report) if has_rewards else ()))
    return table


def detail_tables(reports: Sequence[FileReport], model_shape: str) -> list[Table]:
    """Return tables of sharing by each measure, of other cuts of the data, and of branching."""
    gains = _table(f"Sharing, one tree per task; best possible speedups (FLOP bound: {model_shape})", GAIN_COLUMNS)
    cuts = _table("Other cuts: one tree for the whole set; each assistant turn its own sample", CUT_COLUMNS)
    shapes = _table("Branching, one tree per task; segment lengths in tokens", SHAPE_COLUMNS)
    for report in reports:
        name, whole, turns, shape = stem_of(report), report.whole_set, report.turns, report.branching
        counts = (report.rows, report.flat_tokens, report.unique_tokens)
        ratios = (report.sharing, report.token_bound, report.flop_bound, report.prompt_only_bound)
        gains.add_row(name, *map(short, counts), *(f"{ratio:.2f}" for ratio in ratios))
        cut = (whole.sharing, whole.token_bound, whole.flop_bound)
        turn_bounds = (f"{turns.token_bound:.2f}", f"{turns.flop_bound:.2f}")
        cuts.add_row(name, *(f"{ratio:.2f}" for ratio in cut), short(turns.samples), *turn_bounds)
        sizes = (shape.num_leaves, shape.num_branch_points, shape.max_depth, shape.max_segments, shape.num_segments)
        lengths = (shape.median_segment_length, shape.mean_segment_length, shape.p90_segment_length)
        cells = [*map(short, sizes), *(short(round(length)) for length in lengths), short(shape.max_segment_length)]
        shapes.add_row(name, *cells)
    return [gains, cuts, shapes]


def short(count: int) -> str:
    """Return a count in at most five characters: 561, 4.7k for 4,700, 123k for 122,520, 2.63M for 2,626,431."""
    if count < 1000:
        return str(count)
    return f"{count / 1e3:.3g}k" if count < 999_500 else f"{count / 1e6:.3g}M"


def stem_of(report: FileReport) -> str:
    """Return the name of a file without its extensions."""
    return Path(report.file).name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".parquet")


def _table(title: str, columns: Sequence[str]) -> Table:
    table = figures_table(title, ("file", *columns))
    table.columns[0].max_width = 18
    return table


def _reward_cells(report: FileReport) -> list[str]:
    rewards = report.rewards
    if rewards is None:
        return ["-"] * len(REWARD_COLUMNS)
    equal = f"{rewards.equal_groups} of {rewards.groups}" if rewards.groups else "-"
    return [f"{rewards.mean:.3g}", f"{rewards.spread:.3g}", equal]


WORTH = 1.1
"""Speedup from which trees pay off; steps reach about 0.9 of the bound."""
_NEARLY_ALL = 0.95
_NUM_COPIES = 5
"""Copies that are listed."""


def verdict(report: FileReport, model_shape: str) -> str:
    """Return what trees can gain on a file at most, and why, in a sentence or two; then a note on its rewards.

    Example: two trajectories of 100 tokens that begin with the same 80 share 40% of their tokens.
    """
    because = _why_much(report) if report.flop_bound >= WORTH else _why_little(report)
    gain = f"{stem_of(report)}: trees can train it at most {report.flop_bound:.2f}x as fast ({model_shape}), because"
    rewards = report.rewards
    if rewards is None or not rewards.equal_groups:
        return f"{gain} {because}"
    return (
        f"{gain} {because} In {rewards.equal_groups:,} of {rewards.groups:,} tasks all rewards are the same, so "
        "group-relative advantages are 0 there."
    )


def training_line(report: FileReport) -> str:
    """Return how many tokens are trained, and which rows are copies.

    Example: "set: 120 of its 400 tokens are trained; 1 of 4 rows is a copy: 3 (of 1)".
    """
    trained = f"{stem_of(report)}: {report.trained_tokens:,} of its {report.flat_tokens:,} tokens are trained"
    if not report.copies:
        return f"{trained}; no row is a copy of another."
    shown = ", ".join(f"{row} (of {first})" for row, first in report.copies[:_NUM_COPIES])
    count = f"{len(report.copies):,} of {report.rows:,} rows {'is a copy' if len(report.copies) == 1 else 'are copies'}"
    return f"{trained}; {count}: {shown}{', ...' if len(report.copies) > _NUM_COPIES else ''}."


def image_line(report: FileReport, model_shape: str) -> str:
    """Return how many images a file has, and what trees gain with the vision tower counted.

    Example: 16 rows with the same image of 256 tokens have 16 images, of which 1 is computed.
    """
    found = report.images
    assert found is not None, "the file has images"
    counts = (
        f"{stem_of(report)}: {found.images:,} images, {found.distinct_in_file:,} distinct, of which trees compute "
        f"{found.distinct:,}; they take {found.tokens:,} of its tokens, {found.unique_tokens:,} with sharing"
    )
    if found.flop_bound is None:
        return f"{counts}; the vision tower is not counted, because no config.json next to the tokenizer has its sizes."
    return (
        f"{counts}. With the vision tower trees can train it at most {found.flop_bound:.2f}x as fast ({model_shape})."
    )


def routes_line(report: FileReport) -> str:
    """Return how much sharing the routed experts of a file leave.

    Example: two rows of 3 tokens that share 2, one of them with two routes, have sharing 0.17, and 0.33 without routes.
    """
    free = report.unique_tokens_without_routes
    assert free is not None, "the file has routes"
    return (
        f"{stem_of(report)}: sharing is {report.sharing:.2f} with the routed experts that training replays, and "
        f"{1 - free / report.flat_tokens:.2f} without them."
    )


def next_command(reports: Sequence[FileReport], options: InspectOptions) -> str:
    """Return the command to run next: `init` if trees pay off, else the search for what prevents sharing.

    It reads the files as this one did, and searches only once.
    """
    tokenizer = options.tokenizer
    read_as = "".join(
        f" --{name} {value}" for name in ("template", "format") if (value := getattr(options, name)) != "auto"
    )
    best = max(reports, key=lambda report: report.flop_bound)
    if best.flop_bound >= WORTH:
        return f"treering init {shlex.quote(best.file)} --model {_model_of(tokenizer)}{read_as}"
    files = " ".join(shlex.quote(report.file) for report in reports)
    with_tokenizer = "" if tokenizer is None else f" --tokenizer {shlex.quote(tokenizer)}"
    return f"treering inspect {files}{with_tokenizer}{read_as} {'--drafts' if options.why else '--why'}"


def _why_much(report: FileReport) -> str:
    share = f"{report.sharing:.0%} of its tokens also begin another trajectory of their task"
    if report.prompt_only_bound >= _NEARLY_ALL * report.token_bound:
        return f"{share}, nearly all of them in prompts."
    return f"{share}; sharing prompts alone would give {report.prompt_only_bound:.2f}x by tokens."


def _why_little(report: FileReport) -> str:
    if report.tasks < report.trajectories:
        return f"only {report.sharing:.1%} of its tokens also begin another trajectory of their task."
    alone = f"each of its {report.trajectories:,} trajectories is its own task, and a task is one tree"
    if report.whole_set.flop_bound < WORTH:
        return f"{alone}."
    return (
        f"{alone}; as one task they would give {report.whole_set.flop_bound:.2f}x: set "
        'train.layout = "joined", or give those that begin alike one task_id.'
    )


def _model_of(tokenizer: str | None) -> str:
    is_alone = tokenizer is not None and Path(tokenizer).is_dir() and not (Path(tokenizer) / "config.json").is_file()
    return "MODEL" if tokenizer is None or is_alone else shlex.quote(tokenizer)
