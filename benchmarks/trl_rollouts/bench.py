"""Claim: over a run of three epochs, drafts where they pay never cost more than 3 % of sampling, and gain in long runs.

`python -m benchmarks trl_rollouts` trains the demo's policy with TRL's GRPOTrainer. Each call samples the same prompts
under the same weights and noise with `HistoryRollouts(drafts="auto")`, with `drafts="off"`, and once more without as a
control, in turns, in process time, history and loading the drafter included. Short runs are repeated, and the median
counts. The policy's learning is compared with TRL's own `generate` over six seeds.
"""

import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.common.progress import OnProgress, silent
from benchmarks.common.timing import check_runs, environment
from benchmarks.trl_rollouts.runs import RunSize, measure_drafts, measure_learning
from treering.extras import require

NOTE = "about fifteen minutes, two of which train the small policy"
TABLES = {
    "runs": ("num_prompts", "batch", "off_s", "auto_s", "ratio", "control_ratio", "epochs"),
    "learning": ("name", "last_mean", "last_stdev"),
}

SEED = 0
NUM_SEEDS = 6
SHORT_PROMPTS, LONG_PROMPTS = 24, 384
SIZES = (
    *(RunSize(batch=batch, num_prompts=SHORT_PROMPTS) for batch in (4, 8, 16, 64)),
    *(RunSize(batch=batch, num_prompts=LONG_PROMPTS) for batch in (4, 16)),
)
LEAST_RATIO = 0.97


def measure(
    *,
    num_runs: int = 3,
    sizes: tuple[RunSize, ...] = SIZES,
    num_seeds: int = NUM_SEEDS,
    on_progress: OnProgress = silent,
) -> dict[str, Any]:
    """Runs of the given sizes, short ones `num_runs` times, and learning over `num_seeds` seeds, or none for 0."""
    require("python -m benchmarks trl_rollouts", "torch", "transformers", "trl")
    check_runs(num_runs)
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder) / "policy"
        on_progress("warm start of the policy, about a minute")
        _alone(_save_policy, policy)
        runs = []
        for size in sizes:
            on_progress(f"{size.num_prompts} prompts, batch {size.batch}")
            times = num_runs if size.num_prompts == SHORT_PROMPTS else 1
            found = [_alone(measure_drafts, policy, size, SEED) for _ in range(times)]
            runs.append(sorted(found, key=lambda run: float(run["ratio"]))[len(found) // 2])
        learning = _learning(policy, num_seeds, on_progress)
    slow = [run for run in runs if run["ratio"] < LEAST_RATIO]
    notes = [f"batch {run['batch']}: {run['ratio']:.2f}x is below {LEAST_RATIO}" for run in slow]
    facts = environment(clock="process time", threads=1)
    return {"runs": runs, "learning": learning, "notes": notes, "environment": facts}


def _learning(policy: Path, num_seeds: int, on_progress: OnProgress) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for way in ("generate", "engine") if num_seeds else ():
        rewards = []
        for seed in range(num_seeds):
            on_progress(f"learning with {way}: seed {seed}")
            rewards.append(_alone(measure_learning, policy, SHORT_PROMPTS, seed, way))
        last = [epochs[-1] for epochs in rewards]
        found[way] = {"rewards": rewards, "last_mean": mean(last), "last_stdev": stdev(last) if num_seeds > 1 else 0.0}
    return found


def _alone(work: Callable[..., Any], *arguments: Any) -> Any:
    """Runs a function in a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def _save_policy(folder: Path) -> None:
    from treering.cli.demo import demo_task, warm_start

    start = warm_start(demo_task(SHORT_PROMPTS), seed=SEED, on_step=lambda step, accuracy: None)
    start.model.save_pretrained(folder)
