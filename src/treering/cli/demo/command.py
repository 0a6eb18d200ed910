"""`treering demo`: trains one small policy by GRPO twice, with a plain loop and with Treering's, and compares."""

import json
from dataclasses import asdict
from itertools import count
from pathlib import Path

from rich.console import Console
from transformers.utils import logging as transformers_logging

from treering.cli.demo.policy import ENOUGH, MAX_STEPS, WarmStart, demo_task, warm_start
from treering.cli.demo.report import DemoReport, as_table, make_report
from treering.cli.demo.run import START_FOLDER, Comparison, DemoSize, best_threads, compare
from treering.cli.display.log_console import LogConsole, note_doing
from treering.cli.display.progress import StepLines, WorkProgress, note_compiling, warnings_as_lines
from treering.cli.display.run_display import RunDisplay
from treering.cli.run_folder import locked
from treering.cli.signals import advising
from treering.errors import InputError
from treering.files.atomic import write_text
from treering.files.writing import writing
from treering.history.draft.kernel import propose
from treering.report.run import LOCK_FILE
from treering.train.loop.checkpoint import num_tensor_bytes, told_why
from treering.tree.build import fill_forest

DEFAULT_FOLDER = Path("runs/demo")
REPORT_FILE = "demo.json"


def run(out: Path | None, seed: int, json_output: bool) -> None:
    """Trains both ways with a live display on stderr and prints one table, or JSON, to stdout.

    Args:
        out: new or empty folder for the runs; None is the first free one of `runs/demo`, `runs/demo-2` and so on.
        seed: of weights, prompts, their order and the noise.
        json_output: JSON instead of the table.

    Raises:
        InputError: `out` already holds files.
        StateError: another process uses it, or it cannot be written.
    """
    out = _free_folder() if out is None else out
    console = LogConsole()
    advice = f"the demo starts anew in another folder; treering train {out}/treering.toml goes on with one run"
    with advising(advice), locked(out), warnings_as_lines(console), console.telling("preparing"):
        _check_empty(out)
        report = measure(out, DemoSize(), seed=seed, console=console)
    if json_output:
        print(json.dumps(asdict(report), indent=2))
        return
    Console().print(as_table(report))
    console.print(
        f"everything is in {out}: configuration, metrics, checkpoints and every epoch's rollouts of both runs\n"
        f"look at both on one page: treering report {out} --open\n"
        f"go on with either: treering train {out}/treering.toml rl.num_epochs={report.size.num_epochs + 2}",
        soft_wrap=True,
    )


def measure(out: Path, size: DemoSize, *, seed: int, console: Console, enough: float = ENOUGH) -> DemoReport:
    """Makes the policy, trains it both ways in the folder `out`, and writes the report there."""
    # Its own progress bars would flicker through ours.
    transformers_logging.disable_progress_bar()
    start = _warm_start(out, size, seed=seed, console=console, enough=enough)
    note_doing(console, "timing the engine")
    threads = best_threads(start.model, size.max_batch)
    with RunDisplay(title=f"{out}/treering", num_steps=size.num_steps, first_step=0, console=console) as display:
        compared = compare(
            out,
            size,
            threads,
            seed=seed,
            on_step=lambda so_far: _show(display, so_far),
        )
    report = make_report(start, out / START_FOLDER, size, threads, compared, seed=seed)
    with writing(out / REPORT_FILE):
        write_text(out / REPORT_FILE, json.dumps(asdict(report), indent=2) + "\n")
    return report


def _warm_start(out: Path, size: DemoSize, *, seed: int, console: Console, enough: float) -> WarmStart:
    task = demo_task(size.num_prompts, seed)
    note_doing(console, "warm start")
    note_compiling(console, fill_forest, propose)
    console.print(f"warm start on solved sums until a share of {enough} of others is right", soft_wrap=True)
    lines = StepLines(num_steps=MAX_STEPS, first_step=0, console=console, title="warm start")
    with WorkProgress(console) as progress:

        def show(step: int, accuracy: float) -> None:
            words = f"right {accuracy:.2f} of {enough} wanted"
            progress.show(f"warm start: step {step}, {words}")
            if not console.is_terminal:
                lines.show(step, words)

        start = warm_start(task, seed=seed, enough=enough, on_step=show)
    num_bytes = num_tensor_bytes(start.model.state_dict())
    with writing(out / START_FOLDER, num_bytes), told_why(out / "start.unfinished", num_bytes):
        start.model.save_pretrained(out / START_FOLDER)
    console.print(
        f"{start.model.num_parameters():,} parameters, {start.num_steps} steps, {start.accuracy:.2f} right; now both "
        f"loops from here: {size.num_epochs} epochs, {size.prompts_per_step} x {size.group_size} rollouts a step",
        soft_wrap=True,
    )
    return start


def _show(display: RunDisplay, compared: Comparison) -> None:
    plain, ours = compared.reports["plain"], compared.reports["treering"]
    ratio = sum(each.phases.step_s for each in plain) / sum(each.phases.step_s for each in ours)
    note = f"{ratio:.2f}x as fast as the plain loop, which takes its turn after each step"
    display.show({"step": ours[-1].step, **ours[-1].values()}, note=note)


def _check_empty(out: Path) -> None:
    if any(path.name != LOCK_FILE for path in out.iterdir()):
        raise InputError(f"--out needs a new or empty folder, and {out} holds files; name another one")


def _free_folder() -> Path:
    folders = (DEFAULT_FOLDER if n == 1 else DEFAULT_FOLDER.with_name(f"{DEFAULT_FOLDER.name}-{n}") for n in count(1))
    return next(folder for folder in folders if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())))
