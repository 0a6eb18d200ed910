"""The tables of `treering inspect`: what trees save, and with `--more` every other figure."""

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from treering.cli.display.tables import figures_table
from treering.cli.inspect.file_report import FileReport
from treering.cli.inspect.why import as_table

SUMMARY_COLUMNS = ("rows", "tokens", "with sharing", "most speedup")
REWARD_COLUMNS = ("reward", "spread", "one reward")
GAIN_COLUMNS = ("rows", "flat tokens", "unique tokens", "sharing", "token bound", "FLOP bound", "prompt only")
CUT_COLUMNS = ("set sharing", "set token bound", "set FLOP bound", "turns", "turns token bound", "turns FLOP bound")
SHAPE_COLUMNS = ("leaves", "forks", "depth", "levels", "segments", "median", "mean", "p90", "max")


def summary_table(reports: Sequence[FileReport]) -> Table:
    """What people ask first; columns of rewards where any file has some."""
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
    """What sharing gives by each measure, other cuts of the data, and how trees branch."""
    gains = _table(f"Sharing, one tree per task; best possible speedups (FLOP bound: {model_shape})", GAIN_COLUMNS)
    cuts = _table("Other cuts: one tree for the whole set; each assistant turn its own sample", CUT_COLUMNS)
    shapes = _table("Branching, one tree per task; segment lengths in tokens", SHAPE_COLUMNS)
    for report in reports:
        gains.add_row(*_gain_cells(report))
        cuts.add_row(*_cut_cells(report))
        shapes.add_row(*_shape_cells(report))
    return [gains, cuts, shapes]


def cause_tables(reports: Sequence[FileReport]) -> list[Table]:
    """Where sharing is lost; none without `--why`."""
    return [as_table(stem_of(report), report.unique_tokens, report.why) for report in reports if report.why]


def short(count: int) -> str:
    """A count in at most five characters: 561 as it is, 4,700 as 4.7k, 122,520 as 123k, 2,626,431 as 2.63M."""
    if count < 1000:
        return str(count)
    return f"{count / 1e3:.3g}k" if count < 999_500 else f"{count / 1e6:.3g}M"


def stem_of(report: FileReport) -> str:
    """The name of a file without its endings."""
    return Path(report.file).name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".parquet")


def _table(title: str, columns: Sequence[str]) -> Table:
    table = figures_table(title, ("file", *columns))
    table.columns[0].max_width = 18
    return table


def _gain_cells(report: FileReport) -> list[str]:
    counts = (report.rows, report.flat_tokens, report.unique_tokens)
    ratios = (report.sharing, report.token_bound, report.flop_bound, report.prompt_only_bound)
    return [stem_of(report), *(short(count) for count in counts), *(f"{ratio:.2f}" for ratio in ratios)]


def _cut_cells(report: FileReport) -> list[str]:
    whole, turns = report.whole_set, report.turns
    ratios = (whole.sharing, whole.token_bound, whole.flop_bound)
    cells = [stem_of(report), *(f"{ratio:.2f}" for ratio in ratios), short(turns.samples)]
    return [*cells, f"{turns.token_bound:.2f}", f"{turns.flop_bound:.2f}"]


def _shape_cells(report: FileReport) -> list[str]:
    shape = report.branching
    counts = (shape.num_leaves, shape.num_branch_points, shape.max_depth, shape.max_segments)
    lengths = (shape.median_segment_length, shape.mean_segment_length, shape.p90_segment_length)
    cells = [stem_of(report), *(short(count) for count in (*counts, shape.num_segments))]
    return [*cells, *(short(round(length)) for length in lengths), short(shape.max_segment_length)]


def _reward_cells(report: FileReport) -> list[str]:
    rewards = report.rewards
    if rewards is None:
        return ["-"] * len(REWARD_COLUMNS)
    equal = f"{rewards.equal_groups} of {rewards.groups}" if rewards.groups else "-"
    return [f"{rewards.mean:.3g}", f"{rewards.spread:.3g}", equal]
