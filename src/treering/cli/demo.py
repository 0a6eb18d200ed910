"""Run `treering demo`: train one policy by GRPO twice, with a plain loop and with Treering's, and compare.

The policy is a small model trained on the spot; with --real it is a pretrained model that learns sums as text.
"""

import json
import os
import platform
import random
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from treering.cli.display import (
    PlainConsole,
    RunDisplay,
    figures_table,
    note_compiling,
    step_figures,
    warnings_as_lines,
)
from treering.cli.fetch import fetched
from treering.cli.models import build_model
from treering.cli.run_folder import locked
from treering.cli.signals import advising
from treering.cli.toml import pair, section
from treering.cli.train import open_training
from treering.cli.train_report import RlRun, RlTotals, totals
from treering.config import RlConfig, load
from treering.config.model import ModelConfig
from treering.config.optim import OptimOptions
from treering.config.sft_config import SftOptions
from treering.engine.protocol import Request, Sampling
from treering.engine.torch_engine import TorchEngine
from treering.errors import InputError
from treering.extras import versions_of
from treering.files.writing import write_text, writing
from treering.history.draft.drafter import Drafter
from treering.history.draft.kernel import propose
from treering.history.store.store import HistoryStore
from treering.report.content import forest_of, trained_groups
from treering.report.rollout_views import tokens_of
from treering.report.run_data import DEMO_FILE, LOCK_FILE, SIDES, Side
from treering.rl.step_report import RlStepReport
from treering.rl.tasks.sums import ChainedSums
from treering.train.loop.checkpoint import num_tensor_bytes, raising_disk_errors
from treering.train.loop.compute import fitting_threads
from treering.train.loop.sft_loop import SftLoop
from treering.tree.radix import fill_forest
from treering.tree.stats import Work, flat_work, tree_work, work_bounds
from treering.types import read_shape

DEFAULT_FOLDER = Path("runs/demo")
MODEL = ModelConfig()
MAX_NUMBER = 9
"""Largest number in a sum; small enough for this model to learn in a minute."""
MAX_ROLLOUT_TOKENS = 64
"""Longest rollout; the longest right response has 35 tokens."""
ENOUGH = 0.4
"""Accuracy at which the warm start ends. Accuracy rises steeply here and often ends nearer 0.6."""
MAX_STEPS = 600
"""Most supervised steps."""
_SUMS_PER_STEP = 32
_CHECK_EVERY = 25
_NUM_CHECKED = 128
OnStep = Callable[[int, float], None]
"""Called after each step with its number and the last measured accuracy."""
START_FOLDER = "start"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WarmStart:
    """Policy after its supervised warm start."""

    model: PreTrainedModel
    num_steps: int
    """Supervised steps."""
    accuracy: float
    """Share of right answers to sums outside the training data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSize:
    """Amount of training."""

    num_prompts: int = 128
    prompts_per_step: int = 32
    group_size: int = 16
    num_epochs: int = 5
    max_batch: int = 8
    """Rollouts that run at a time, on both sides."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one pass over the prompts."""
        return -(-self.num_prompts // self.prompts_per_step)

    @property
    def num_steps(self) -> int:
        """Steps of a run."""
        return self.num_epochs * self.steps_per_epoch


REAL = DemoSize(num_prompts=32, prompts_per_step=4, group_size=8, num_epochs=3, max_batch=32)
"""Size of --real: about a quarter of an hour on two cores."""
Sections: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Settings of `treering train` by section."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoStart:
    """Start of both runs."""

    folder: Path
    """Folder of the model."""
    sections: Sections
    """Settings of this model and its task."""
    warm_steps: int = 0
    """Supervised steps before both runs."""
    warm_accuracy: float | None = None
    """Share of right answers after them; None without them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """Report on both runs. Seconds are wall time over all steps; ratios are plain over Treering."""

    seed: int
    size: DemoSize
    num_parameters: int
    warm_steps: int
    """Supervised steps before both runs."""
    warm_accuracy: float | None
    """Share of right answers after them; None without them."""
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
    """Threads of training and sampling."""
    versions: dict[str, str]


def run(out: Path | None, seed: int, json_output: bool, *, real: bool = False) -> None:
    """Train both ways with a live display on stderr; print one table, or JSON, to stdout.

    Raises:
        InputError: `out` already holds files, or the model cannot be fetched.
        StateError: another process uses `out`, or it is not writable.
    """
    out = _free_folder() if out is None else out
    console = PlainConsole(stderr=True)
    advice = f"the demo starts over in another folder; treering train {out}/treering.toml continues one run"
    with advising(advice), locked(out), warnings_as_lines(console):
        if any(path.name != LOCK_FILE for path in out.iterdir()):
            raise InputError(f"--out needs a new or empty folder, but {out} holds files; name another")
        report = (
            measure_real(out, REAL, seed=seed, console=console)
            if real
            else measure(out, DemoSize(), seed=seed, console=console)
        )
    if json_output:
        print(json.dumps(asdict(report), indent=2))
        return
    PlainConsole().print(as_table(report))
    console.print(
        f"everything is in {out}: configuration, metrics, checkpoints and every epoch's rollouts of both runs\n"
        f"look at both on one page: treering report {out} --open\n"
        f"continue either run: treering train {out}/treering.toml rl.num_epochs={report.size.num_epochs + 2}"
    )


def measure(out: Path, size: DemoSize, *, seed: int, console: Console, enough: float = ENOUGH) -> DemoReport:
    """Create the policy, train it both ways in the folder `out`, and write the report there."""
    # Transformers' progress bars would disturb ours.
    transformers_logging.disable_progress_bar()
    start = _warm_start(out, size, seed=seed, console=console, enough=enough)
    return _measure_from(start, out, size, seed=seed, console=console)


def measure_real(out: Path, size: DemoSize, *, seed: int, console: Console) -> DemoReport:
    """Measure with the model that `treering fetch smollm2` fetches, on sums as text."""
    transformers_logging.disable_progress_bar()
    start = write_real_task(out, fetched(console), size, seed=seed)
    console.print(
        f"both loops from {start.folder}: {size.num_epochs} epochs over {size.num_prompts} sums in words, "
        f"{size.prompts_per_step} x {size.group_size} rollouts a step; about a quarter of an hour on two cores"
    )
    return _measure_from(start, out, size, seed=seed, console=console)


def _measure_from(start: DemoStart, out: Path, size: DemoSize, *, seed: int, console: Console) -> DemoReport:
    """Train one model in `out/plain` and `out/treering`, step by step in turn, and report on both."""
    steps: dict[Side, list[RlStepReport]] = {side: [] for side in SIDES}
    flat = tree = Work(num_tokens=0, num_pairs=0)
    first_difference = None
    display = RunDisplay(title=f"{out}/treering", num_steps=size.num_steps, first_step=0, console=console)
    with display, ExitStack() as stack:
        runs: dict[Side, RlRun] = {}
        for side in SIDES:
            config = load(RlConfig, write_config(out, size, start.sections, side=side, seed=seed))
            quiet = PlainConsole(quiet=True)
            runs[side] = stack.enter_context(open_training(config, config_dir=out, console=quiet))
        model = runs["plain"].loop.model
        for pair in zip(*(run.steps for run in runs.values()), strict=True):
            for side, report in zip(SIDES, pair, strict=True):
                steps[side].append(report)
            plain, ours = (runs[side].loop.latest for side in SIDES)
            flat += flat_work(np.array([tokens_of(each).size for group in trained_groups(plain) for each in group]))
            tree += tree_work(forest_of(group) for group in trained_groups(ours))
            tokens = [[tokens_of(each).tolist() for each in latest] for latest in (plain, ours)]
            if first_difference is None and tokens[0] != tokens[1]:
                first_difference = pair[-1].step
            ratio = sum(each.phases.step_s for each in steps["plain"]) / sum(
                each.phases.step_s for each in steps["treering"]
            )
            note = f"{ratio:.2f}x as fast as the plain loop, which runs its own step in turn"
            display.show(pair[-1].step, f"{step_figures(pair[-1].values())} {note}")
    plain_total, our_total = (totals(steps[side]) for side in SIDES)
    best = work_bounds(flat, tree, read_shape(start.folder))
    train_ratio = plain_total.train_s / our_total.train_s
    demo_report = DemoReport(
        seed=seed,
        size=size,
        num_parameters=sum(weight.numel() for weight in model.parameters()),
        warm_steps=start.warm_steps,
        warm_accuracy=start.warm_accuracy,
        plain=plain_total,
        treering=our_total,
        rollout_ratio=plain_total.rollout_s / our_total.rollout_s,
        train_ratio=train_ratio,
        step_ratio=plain_total.seconds / our_total.seconds,
        token_bound=best.token_bound,
        flop_bound=best.flop_bound,
        share_of_flop_bound=train_ratio / best.flop_bound,
        first_difference=first_difference,
        num_steps=len(steps["plain"]),
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        num_threads=fitting_threads(model) or torch.get_num_threads(),
        versions=versions_of(("torch", "transformers", "numpy", "numba")),
    )
    with writing(out / DEMO_FILE):
        write_text(out / DEMO_FILE, json.dumps(asdict(demo_report), indent=2) + "\n")
    return demo_report


def _warm_start(out: Path, size: DemoSize, *, seed: int, console: Console, enough: float) -> DemoStart:
    task = demo_task(size.num_prompts)
    note_compiling(console, fill_forest, propose)
    console.print(f"warm start on solved sums until {enough:.0%} of other sums are right")
    title = "warm start"
    with RunDisplay(title=title, num_steps=MAX_STEPS, first_step=0, console=console, unit=title) as display:

        def show(step: int, accuracy: float) -> None:
            display.show(step, f"accuracy {accuracy:.2f}, target {enough}")

        start = warm_start(task, seed=seed, enough=enough, on_step=show)
    num_bytes = num_tensor_bytes(start.model.state_dict())
    with writing(out / START_FOLDER, num_bytes), raising_disk_errors(out / "start.unfinished", num_bytes):
        start.model.save_pretrained(out / START_FOLDER)
    console.print(
        f"{start.model.num_parameters():,} parameters, {start.num_steps} steps, {start.accuracy:.2f} right; now both "
        f"loops from here: {size.num_epochs} epochs, {size.prompts_per_step} x {size.group_size} rollouts a step"
    )
    return DemoStart(
        folder=out / START_FOLDER,
        sections=sums_sections(size),
        warm_steps=start.num_steps,
        warm_accuracy=start.accuracy,
    )


def _free_folder() -> Path:
    folders = (DEFAULT_FOLDER if n == 1 else DEFAULT_FOLDER.with_name(f"{DEFAULT_FOLDER.name}-{n}") for n in count(1))
    return next(folder for folder in folders if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())))


def demo_task(num_prompts: int) -> ChainedSums:
    """Return the prompts that both loops train on."""
    return ChainedSums(num_prompts, max_number=MAX_NUMBER)


def warm_start(task: ChainedSums, *, seed: int, enough: float = ENOUGH, on_step: OnStep) -> WarmStart:
    """Train on solved sums outside the task until the policy gets a share of `enough` held-out sums right.

    Example: with seed 0 it takes 225 steps of 32 sums to an accuracy of 0.38, and 275 to 0.84.
    """
    model = build_model(MODEL, num_ids=task.vocab_size, seed=seed, folder=None)
    checked = task.held_out(_NUM_CHECKED)
    solved = checked.held_out(MAX_STEPS * _SUMS_PER_STEP).solutions()
    loop = SftLoop(
        model,
        solved,
        optim=OptimOptions(learning_rate=3e-3, warmup_steps=20, weight_decay=0.01, betas=(0.9, 0.99)),
        options=SftOptions(trees_per_step=_SUMS_PER_STEP, seed=seed),
    )
    accuracy = 0.0
    while loop.num_steps_done < MAX_STEPS and accuracy < enough:
        loop.step()
        if loop.num_steps_done % _CHECK_EVERY == 0:
            accuracy = measure_accuracy(model, checked)
        on_step(loop.num_steps_done, accuracy)
    return WarmStart(model=model, num_steps=loop.num_steps_done, accuracy=accuracy)


def measure_accuracy(model: PreTrainedModel, task: ChainedSums) -> float:
    """Return the share of a task's prompts that one sampled rollout each gets right.

    The engine drafts from its own history, so that all code is compiled before either loop is timed.
    """
    store = HistoryStore()
    engine = TorchEngine(model, Drafter(store), max_batch=16, num_threads=1, costs="none")
    sampling = Sampling(max_tokens=MAX_ROLLOUT_TOKENS, stop_tokens=task.stop_tokens)
    prompts = {prompt.prompt_id: prompt for prompt in task.prompts}
    rewards = []
    for rollout in engine.generate(
        Request(prompt_id=prompt.prompt_id, prompt=prompt.tokens, sampling=sampling) for prompt in task.prompts
    ):
        rewards.append(task.reward(prompts[rollout.prompt_id], rollout))
        store.add(rollout.prompt_id, [rollout.tokens], version=0)
    store.publish()
    return sum(rewards) / len(rewards)


def sums_sections(size: DemoSize) -> Sections:
    """Return the settings of the small policy and its sums."""
    return {
        "model": {"path": START_FOLDER},
        "task": {"kind": "sums", "max_prompts": size.num_prompts, "max_number": MAX_NUMBER},
        "sampling": {"max_tokens": MAX_ROLLOUT_TOKENS},
        "optim": {"learning_rate": 2e-4, "betas": [0.9, 0.99]},
        "run": {"save_every": size.steps_per_epoch},
    }


PROMPTS_FILE, REWARDS_FILE = "prompts.jsonl", "rewards.py"
_REWARD = '''"""Reward of the demo; treering train reads this file again when it continues a run."""


def number_alone(prompt, text):
    """Return 1.0 for only the right number, 0.2 for only a wrong number or the right one among words, else 0.0."""
    words = text.replace(".", " ").replace(",", " ").split()
    if words == [prompt.answer]:
        return 1.0
    return 0.2 if prompt.answer in words or (len(words) == 1 and words[0].isdigit()) else 0.0
'''


def sums_in_words(count: int, seed: int) -> list[dict[str, str]]:
    """Return distinct lines of a file of prompts.

    Example: one is {"prompt_id": "7 + 5", "prompt": "What is 7 + 5? Answer with only the number.", "answer": "12"}.
    """
    pairs = random.Random(seed).sample([(a, b) for a in range(1, 10) for b in range(1, 10)], count)
    return [
        {"prompt_id": f"{a} + {b}", "prompt": f"What is {a} + {b}? Answer with only the number.", "answer": str(a + b)}
        for a, b in pairs
    ]


def write_real_task(out: Path, model: Path, size: DemoSize, *, seed: int) -> DemoStart:
    """Write sums as text and their reward for the model in a folder."""
    with writing(out):
        lines = [json.dumps(line) for line in sums_in_words(size.num_prompts, seed)]
        (out / PROMPTS_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
        (out / REWARDS_FILE).write_text(_REWARD, encoding="utf-8")
    return DemoStart(
        folder=model,
        sections={
            "model": {"path": str(model.absolute())},
            "task": {"kind": "prompts", "file": PROMPTS_FILE, "reward": f"{REWARDS_FILE}:number_alone"},
            "sampling": {"max_tokens": 24},
            "optim": {"learning_rate": 3e-6},
            # A checkpoint with its optimizer takes 1.6 GB.
            "run": {"save_every": size.num_steps, "keep": 1},
        },
    )


def write_config(out: Path, size: DemoSize, own: Sections, *, side: Side, seed: int) -> Path:
    """Write the configuration of one side for `treering train`; the sides differ in two settings."""
    ours = side == "treering"
    sections: dict[str, Mapping[str, Any]] = {
        **own,
        "rl": {
            "num_epochs": size.num_epochs,
            "prompts_per_step": size.prompts_per_step,
            "group_size": size.group_size,
            "layout": "tree" if ours else "packed",
            "seed": seed,
        },
        "engine": {"max_batch": size.max_batch},
        "history": {"drafts": "on", "min_acceptance": 0.4} if ours else {"drafts": "off"},
        "run": {"dir": str(out / side), **own["run"]},
    }
    file = out / f"{side}.toml"
    with writing(file):
        text = [section(name, [pair(*each) for each in settings.items()]) for name, settings in sections.items()]
        file.write_text("".join(text), encoding="utf-8")
    return file


def as_table(report: DemoReport) -> Table:
    """Return the comparison as a table for the terminal."""
    plain, ours, size = report.plain, report.treering, report.size
    rewards = [f"{total.first_reward:.2f} -> {total.last_reward:.2f}" for total in (plain, ours)]
    first = "none" if report.first_difference is None else f"step {report.first_difference}"
    rows = [
        ("rollout, seconds", f"{plain.rollout_s:.1f}", f"{ours.rollout_s:.1f}", f"{report.rollout_ratio:.2f}x"),
        ("training, seconds", f"{plain.train_s:.1f}", f"{ours.train_s:.1f}", f"{report.train_ratio:.2f}x"),
        ("weights and history, seconds", f"{plain.update_s:.2f}", f"{ours.update_s:.2f}", ""),
        ("whole step, seconds", f"{plain.seconds:.1f}", f"{ours.seconds:.1f}", f"{report.step_ratio:.2f}x"),
        ("tokens per forward", f"{plain.tokens_per_forward:.2f}", f"{ours.tokens_per_forward:.2f}", ""),
        ("drafted tokens accepted", "", f"{ours.acceptance:.0%}", ""),
        ("tokens trained", f"{plain.unique_tokens:,}", f"{ours.unique_tokens:,}", f"{report.token_bound:.2f}x"),
        ("best possible training by counted FLOPs", "", "", f"{report.flop_bound:.2f}x"),
        ("share of that bound", "", "", f"{report.share_of_flop_bound:.0%}"),
        ("reward, first -> last epoch", *rewards, ""),
        ("first step with a different token", "", first, ""),
    ]
    title = f"{report.num_steps} steps of GRPO from one start, {size.num_epochs} epochs over {size.num_prompts} prompts"
    table = figures_table(title, ("", "plain", "treering", "ratio"), rows)
    warm = f"; warm start {report.warm_steps} steps" if report.warm_steps else ""
    table.caption = (
        f"{report.num_parameters:,} parameters, {size.max_batch} rollouts at a time on both sides, "
        f"{report.num_threads} threads{warm}"
    )
    return table
