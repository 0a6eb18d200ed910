"""`treering inspect`: how much trajectory files share, and the best speedup that allows. It counts and never times."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from treering.cli.data_notes import data_notes
from treering.cli.display.progress import WorkProgress, note_compiling
from treering.cli.inspect.why import WhyReport, as_table, explain_tasks
from treering.data import FormatName, RenderedTrajectory, Renderer, by_task, read_trajectories
from treering.tree.build import lay_out
from treering.tree.forest import Forest
from treering.tree.repeats import find_repeats
from treering.tree.stats import Branching, branching, flat_work, tree_work, work_bounds
from treering.types import ModelShape, find_shape

GAIN_COLUMNS = ("rows", "flat tokens", "unique tokens", "sharing", "token bound", "FLOP bound", "prompt only")
CUT_COLUMNS = ("set sharing", "set token bound", "set FLOP bound", "turns", "turns token bound", "turns FLOP bound")
SHAPE_COLUMNS = ("leaves", "forks", "depth", "levels", "segments", "median", "mean", "p90", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeSetReport:
    """All trajectories of a file in one forest, across tasks."""

    unique_tokens: int
    sharing: float
    token_bound: float
    flop_bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnsReport:
    """Each assistant turn as a sample: the tokens from the start of its trajectory to the end of the turn."""

    samples: int
    flat_tokens: int
    unique_tokens: int
    token_bound: float
    flop_bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReport:
    """One file with one tree per task; figures are sums over tasks, bounds are best possible speedups."""

    file: str
    trajectories: int
    tasks: int
    flat_tokens: int
    unique_tokens: int
    sharing: float
    token_bound: float
    flop_bound: float
    prompt_only_bound: float
    """Token bound if only prompts, the tokens before the first trained one, are merged."""
    whole_set: WholeSetReport
    turns: TurnsReport
    branching: Branching
    why: WhyReport | None = None
    """Where sharing is lost; None without `--why`."""


def inspect_files(
    paths: Sequence[Path],
    tokenizer_dir: Path | None,
    model_shape: str,
    template: Literal["plain", "hf"] = "plain",
    num_causes: int = 0,
    format: FormatName = "auto",
) -> list[FileReport]:
    """Reads, renders and measures trajectory files, with progress on stderr.

    With `num_causes` above 0, each report lists that many places where sharing is lost. `format` is that of the
    records in every file.

    Raises:
        InputError: a bad file, or messages without a tokenizer.
        ConfigError: an unknown model shape.

    Example: a file with `[5, 6, 7]` and `[5, 6, 8]` of one task reports 6 flat tokens, 4 unique ones and sharing 0.33.
    """
    shape = find_shape(model_shape)
    renderer = Renderer(tokenizer=tokenizer_dir, template=template)
    reports: list[FileReport] = []
    console = Console(stderr=True)
    with WorkProgress(console) as progress:
        for number, path in enumerate(paths):
            progress.show(f"{path.name}: reading", number / len(paths))
            trajectories = read_trajectories(path, format)
            progress.show(f"{path.name}: tokenizing", (number + 1 / 3) / len(paths))
            rendered = renderer.render(trajectories)
            for note in data_notes(trajectories, rendered):
                progress.console.print(f"{path.name}: {note}", soft_wrap=True)
            progress.show(f"{path.name}: merging", (number + 2 / 3) / len(paths))
            if number == 0:
                note_compiling(progress.console, lay_out, *([find_repeats] if num_causes else []))
            reports.append(measure(str(path), rendered, shape, tokenizer_dir, num_causes))
    return reports


def measure(
    file: str,
    trajectories: Sequence[RenderedTrajectory],
    shape: ModelShape,
    tokenizer_dir: Path | None = None,
    num_causes: int = 0,
) -> FileReport:
    """The report of rendered trajectories, one or more, under the name `file`."""
    tasks = by_task(trajectories)
    forests = [Forest.from_sequences([t.tokens for t in task]) for task in tasks]
    flat, tree = flat_work(_lengths(trajectories)), tree_work(forests)
    bounds = work_bounds(flat, tree, shape)
    why = explain_tasks(trajectories, tasks, forests, tokenizer_dir, num_causes) if num_causes else None
    return FileReport(
        file=file,
        trajectories=len(trajectories),
        tasks=len(tasks),
        flat_tokens=flat.num_tokens,
        unique_tokens=tree.num_tokens,
        sharing=1.0 - tree.num_tokens / flat.num_tokens,
        token_bound=bounds.token_bound,
        flop_bound=bounds.flop_bound,
        prompt_only_bound=flat.num_tokens / sum(_num_prompt_shared_tokens(task) for task in tasks),
        whole_set=_whole_set(trajectories, shape),
        turns=_turns(tasks, shape),
        branching=branching(*forests),
        why=why,
    )


def as_json(reports: Sequence[FileReport]) -> str:
    """The reports as one JSON object `{"files": [...]}`."""
    return json.dumps({"files": [asdict(report) for report in reports]}, indent=2, allow_nan=False)


def as_tables(reports: Sequence[FileReport], model_shape: str) -> list[Table]:
    """The reports as tables: what sharing gives, other cuts of the data, how trees branch; with `--why`, the causes."""
    gains = _table(f"Sharing, one tree per task; best possible speedups (FLOP bound: {model_shape})", GAIN_COLUMNS)
    cuts = _table("Other cuts: one tree for the whole set; each assistant turn its own sample", CUT_COLUMNS)
    shapes = _table("Branching, one tree per task; segment lengths in tokens", SHAPE_COLUMNS)
    for report in reports:
        gains.add_row(*_gain_cells(report))
        cuts.add_row(*_cut_cells(report))
        shapes.add_row(*_shape_cells(report))
    causes = [as_table(_stem(report), report.unique_tokens, report.why) for report in reports if report.why]
    return [gains, cuts, shapes, *causes]


def run(
    files: list[Path],
    tokenizer: Path | None,
    model_shape: str,
    template: Literal["plain", "hf"],
    json_output: bool,
    num_causes: int = 0,
    format: FormatName = "auto",
) -> None:
    """Prints the reports of `files` to stdout, as JSON or as tables."""
    reports = inspect_files(files, tokenizer, model_shape, template, num_causes, format)
    if json_output:
        print(as_json(reports))
        return
    console = Console()
    for table in as_tables(reports, model_shape):
        console.print(table)


def _lengths(trajectories: Sequence[RenderedTrajectory]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array([trajectory.tokens.size for trajectory in trajectories], dtype=np.int64)


def _num_prompt_shared_tokens(task: Sequence[RenderedTrajectory]) -> int:
    prompts = Forest.from_sequences([t.tokens[: t.num_prompt_tokens] for t in task if t.num_prompt_tokens])
    return prompts.num_tokens + sum(t.tokens.size - t.num_prompt_tokens for t in task)


def _whole_set(trajectories: Sequence[RenderedTrajectory], shape: ModelShape) -> WholeSetReport:
    flat = flat_work(_lengths(trajectories))
    tree = tree_work([Forest.from_sequences([t.tokens for t in trajectories])])
    bounds = work_bounds(flat, tree, shape)
    return WholeSetReport(
        unique_tokens=tree.num_tokens,
        sharing=1.0 - tree.num_tokens / flat.num_tokens,
        token_bound=bounds.token_bound,
        flop_bound=bounds.flop_bound,
    )


def _turns(tasks: Sequence[Sequence[RenderedTrajectory]], shape: ModelShape) -> TurnsReport:
    # Samples of one trajectory are prefixes of its last one, so only the last adds tokens to the tree.
    trained = [[t for t in task if t.turn_ends.size] for task in tasks]
    tree = tree_work(Forest.from_sequences([t.tokens[: t.turn_ends[-1]] for t in task]) for task in trained)
    lengths = np.concatenate([np.empty(0, np.int32), *(t.turn_ends for task in trained for t in task)])
    flat = flat_work(lengths)
    bounds = work_bounds(flat, tree, shape)
    return TurnsReport(
        samples=lengths.size,
        flat_tokens=flat.num_tokens,
        unique_tokens=tree.num_tokens,
        token_bound=bounds.token_bound,
        flop_bound=bounds.flop_bound,
    )


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("file", no_wrap=True, overflow="ellipsis", max_width=18)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _gain_cells(report: FileReport) -> list[str]:
    counts = (report.trajectories, report.flat_tokens, report.unique_tokens)
    ratios = (report.sharing, report.token_bound, report.flop_bound, report.prompt_only_bound)
    return [_stem(report), *(_short(count) for count in counts), *(f"{ratio:.2f}" for ratio in ratios)]


def _cut_cells(report: FileReport) -> list[str]:
    whole, turns = report.whole_set, report.turns
    ratios = (whole.sharing, whole.token_bound, whole.flop_bound)
    cells = [_stem(report), *(f"{ratio:.2f}" for ratio in ratios), _short(turns.samples)]
    return [*cells, f"{turns.token_bound:.2f}", f"{turns.flop_bound:.2f}"]


def _shape_cells(report: FileReport) -> list[str]:
    shape = report.branching
    counts = (shape.num_leaves, shape.num_branch_points, shape.max_depth, shape.max_segments)
    lengths = (shape.median_segment_length, shape.mean_segment_length, shape.p90_segment_length)
    cells = [_stem(report), *(_short(count) for count in (*counts, shape.num_segments))]
    return [*cells, *(_short(round(length)) for length in lengths), _short(shape.max_segment_length)]


def _short(count: int) -> str:
    """A count in at most five characters: 561 as it is, 4,700 as 4.7k, 122,520 as 123k, 2,626,431 as 2.63M."""
    if count < 1000:
        return str(count)
    return f"{count / 1e3:.3g}k" if count < 999_500 else f"{count / 1e6:.3g}M"


def _stem(report: FileReport) -> str:
    return Path(report.file).name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".parquet")
