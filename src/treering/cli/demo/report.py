"""What the demo measured, as fields and as one table."""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table

from treering.cli.demo.policy import WarmStart
from treering.cli.demo.run import Comparison, DemoSize, Side
from treering.cli.train.summary import RlTotals, totals
from treering.extras import versions_of
from treering.tree.stats import work_bounds
from treering.types import read_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """Both runs. Seconds are wall time over all steps; ratios are plain over Treering."""

    seed: int
    size: DemoSize
    num_parameters: int
    warm_steps: int
    """Supervised steps before both runs."""
    warm_accuracy: float
    """Share of right answers after the warm start."""
    plain: RlTotals
    treering: RlTotals
    rollout_ratio: float
    train_ratio: float
    step_ratio: float
    token_bound: float
    """Best possible ratio of training by tokens."""
    flop_bound: float
    """Best possible ratio of training by counted FLOPs."""
    share_of_flop_bound: float
    first_difference: int | None
    """First step at which any token of the two runs differs; None if none does."""
    num_steps: int
    machine: str
    num_threads: int
    """Training threads."""
    engine_threads: dict[Side, int]
    """Sampling threads."""
    versions: dict[str, str]


def make_report(
    start: WarmStart, folder: Path, size: DemoSize, threads: Mapping[Side, int], compared: Comparison, *, seed: int
) -> DemoReport:
    """The report of two finished runs; `folder` holds the model that both started from."""
    plain, ours = totals(compared.reports["plain"]), totals(compared.reports["treering"])
    best = work_bounds(compared.flat, compared.tree, read_shape(folder))
    train_ratio = plain.train_s / ours.train_s
    return DemoReport(
        seed=seed,
        size=size,
        num_parameters=start.model.num_parameters(),
        warm_steps=start.num_steps,
        warm_accuracy=start.accuracy,
        plain=plain,
        treering=ours,
        rollout_ratio=plain.rollout_s / ours.rollout_s,
        train_ratio=train_ratio,
        step_ratio=plain.seconds / ours.seconds,
        token_bound=best.token_bound,
        flop_bound=best.flop_bound,
        share_of_flop_bound=train_ratio / best.flop_bound,
        first_difference=compared.first_difference,
        num_steps=len(compared.reports["plain"]),
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        num_threads=torch.get_num_threads(),
        engine_threads=dict(threads),
        versions=versions_of(("torch", "transformers", "numpy", "numba")),
    )


def as_table(report: DemoReport) -> Table:
    """The comparison for a terminal."""
    plain, ours, size = report.plain, report.treering, report.size
    first = "none" if report.first_difference is None else f"step {report.first_difference}"
    title = f"{report.num_steps} steps of GRPO from one start, {size.num_epochs} epochs over {size.num_prompts} prompts"
    table = Table(title=title, title_justify="left")
    table.add_column()
    for name in ("plain", "treering", "ratio"):
        table.add_column(name, justify="right")
    table.add_row("rollout, seconds", f"{plain.rollout_s:.1f}", f"{ours.rollout_s:.1f}", f"{report.rollout_ratio:.2f}x")
    table.add_row("training, seconds", f"{plain.train_s:.1f}", f"{ours.train_s:.1f}", f"{report.train_ratio:.2f}x")
    table.add_row("weights and history, seconds", f"{plain.update_s:.2f}", f"{ours.update_s:.2f}", "")
    table.add_row("whole step, seconds", f"{plain.seconds:.1f}", f"{ours.seconds:.1f}", f"{report.step_ratio:.2f}x")
    table.add_section()
    table.add_row("tokens per forward", f"{plain.tokens_per_forward:.2f}", f"{ours.tokens_per_forward:.2f}", "")
    table.add_row("drafted tokens accepted", "", f"{ours.acceptance:.0%}", "")
    table.add_row("tokens trained", f"{plain.unique_tokens:,}", f"{ours.unique_tokens:,}", f"{report.token_bound:.2f}x")
    table.add_row("sharing", "", f"{ours.sharing:.2f}", "")
    table.add_row("best possible training by counted FLOPs", "", "", f"{report.flop_bound:.2f}x")
    table.add_row("share of that bound", "", "", f"{report.share_of_flop_bound:.0%}")
    table.add_section()
    table.add_row("reward, first -> last epoch", _reward(plain), _reward(ours), "")
    table.add_row("first step with a different token", "", first, "")
    table.caption = (
        f"{report.num_parameters:,} parameters, {size.max_batch} rollouts at one time on both sides, by "
        f"{report.engine_threads['plain']} and {report.engine_threads['treering']} threads; warm start "
        f"{report.warm_steps} steps"
    )
    return table


def _reward(total: RlTotals) -> str:
    first, last = total.first_reward, total.last_reward
    assert first is not None, "every step has rollouts"
    assert last is not None, "every step has rollouts"
    return f"{first:.2f} -> {last:.2f}"
