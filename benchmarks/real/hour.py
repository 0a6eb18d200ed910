"""An hour of `treering train` that is killed in its middle: memory, seconds a step, and whether resuming is exact."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks.common.progress import OnProgress
from benchmarks.real.tasks import write_task
from treering import metrics
from treering.cli.demo import DemoSize, write_config
from treering.files.step_lines import read_rows
from treering.metrics import METRICS_FILE

SAVE_EVERY = "5min"
SETTLED = 1 / 3
"""Part of a run during which memory may grow: the first checkpoint is written, shapes are compiled."""
POLL_S = 1.0
BYTES_PER_MB = 2**20
SECONDS_PER_HOUR = 3600.0
TIMES = "time/"
ENDED_BY_SIGTERM = 128 + signal.SIGTERM


def hour(
    folder: Path, model: Path, *, size: DemoSize, num_minutes: float = 60.0, on_progress: OnProgress
) -> dict[str, Any]:
    """Train for half of the time, kill -9, resume for the other half, and end with SIGTERM."""
    own = write_task("sums", folder, model, size, seed=0, temperature=1.0)
    own["run"] = {"save_every": SAVE_EVERY, "keep": 2}
    config = write_config(folder, replace(size, num_epochs=100_000), own, side="treering", seed=0)
    file = folder / "treering" / METRICS_FILE
    half_s = num_minutes * 30.0
    first = watch(config, file, half_s, signal.SIGKILL, on_progress)
    before = list(read_rows(file))
    names = [each.name.removeprefix("step-") for each in (folder / "treering" / "checkpoints").glob("step-*")]
    resumed_at = max(int(name) for name in names if name.isdecimal())
    second = watch(config, file, half_s, signal.SIGTERM, on_progress)
    if second["exit_code"] != ENDED_BY_SIGTERM:
        raise RuntimeError(
            f"the resumed run ended with {second['exit_code']}, not by SIGTERM; see {folder / 'log.txt'}"
        )
    # The first row has the evaluation before any step, and no rollouts.
    after = [row for row in read_rows(file) if metrics.REWARD_MEAN in row]
    seconds = [each["processor_s"] for part in (first, second) for each in part["steps"]]
    third = len(seconds) // 3
    return {
        "num_minutes": num_minutes,
        "num_steps": after[-1]["step"],
        "resident_mb": {name: part["resident_mb"] for name, part in (("first", first), ("second", second))},
        "processor_s_per_step": {"first_third": median(seconds[:third]), "last_third": median(seconds[-third:])},
        "resumed": redone(before, after, first_step=resumed_at + 1),
        "reward_by_step": [row[metrics.REWARD_MEAN] for row in after],
        "held_out_reward": [row[metrics.EVAL_REWARD] for row in after if metrics.EVAL_REWARD in row],
        "thirds": [means(after[part * len(after) // 3 : (part + 1) * len(after) // 3]) for part in range(3)],
    }


def means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return means of some steps; a policy that sharpens shares and drafts more."""
    flat, computed = (sum(row.get(name, 0) for row in rows) for name in (metrics.NUM_BRANCH_TOKENS, metrics.NUM_TOKENS))
    named = {"reward": metrics.REWARD_MEAN, "num_sampled": metrics.NUM_SAMPLED, "acceptance": metrics.ACCEPTANCE}
    found = {name: mean(row.get(key, 0.0) for row in rows) for name, key in named.items()}
    return found | {
        "tokens_per_forward": mean(row[metrics.TOKENS_PER_FORWARD] for row in rows),
        "token_ratio": flat / max(1, computed),
    }


def watch(config: Path, file: Path, seconds: float, end: signal.Signals, on_progress: OnProgress) -> dict[str, Any]:
    """Run `treering train` for some seconds and end it by a signal; memory and processor time as the kernel counts."""
    known, steps, memory = last_step(file), list[dict[str, float]](), list[tuple[float, float]]()
    with (config.parent / "log.txt").open("ab") as log:
        command = [sys.executable, "-m", "treering", "train", str(config)]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        started = time.monotonic()
        last_s: float | None = None
        while (passed := time.monotonic() - started) < seconds and process.poll() is None:
            time.sleep(POLL_S)
            now_s, resident = usage(process.pid)
            memory.append((passed, resident))
            step = last_step(file)
            # A resumed run first removes the rows of the steps that it does again.
            if step > known:
                if last_s is not None:
                    steps.append({"step": step, "processor_s": now_s - last_s})
                last_s = now_s
                on_progress(f"{config.parent.name}: step {step}, {resident:.0f} MB, {passed / 60:.0f} min")
            known = step
        process.send_signal(end)
        code = process.wait()
    return {"steps": steps, "resident_mb": growth(memory), "exit_code": code}


def last_step(file: Path) -> int:
    """Return the step of the last row; 0 without rows."""
    return max((row["step"] for row in read_rows(file)), default=0)


def usage(process: int) -> tuple[float, float]:
    """Return the processor seconds and resident megabytes of a running process; zeros once it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0, 0.0
    # Fields 14, 15 and 24 of proc(5): user and system ticks, resident pages.
    ticks, pages = int(fields[11]) + int(fields[12]), int(fields[21])
    return ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE") / BYTES_PER_MB


def growth(memory: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return the highest resident megabytes, and their slope per hour by least squares once the start has settled."""
    settled = np.array(memory[int(len(memory) * SETTLED) :])
    slope = float(np.polyfit(settled[:, 0], settled[:, 1], 1)[0]) if len(settled) > 1 else 0.0
    return {"highest": max((each[1] for each in memory), default=0.0), "growth_per_hour": slope * SECONDS_PER_HOUR}


def redone(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], *, first_step: int
) -> dict[str, Any]:
    """Compare the steps that both halves did, in everything except times and memory."""
    earlier = {row["step"]: row for row in before if row["step"] >= first_step}
    later = {row["step"]: row for row in after if row["step"] in earlier}
    differing = sorted(
        {
            name
            for step, row in later.items()
            for name in {*row, *earlier[step]}
            if row.get(name) != earlier[step].get(name) and not name.startswith((TIMES, "memory/"))
        }
    )
    return {"num_steps": len(later), "differing": differing}
