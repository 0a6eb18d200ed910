"""Claim: rollouts that were sampled early, with their own noise, stay mostly the same one update later.

`python -m benchmarks rehearsal` fetches SmolLM2-135M-Instruct (`treering fetch smollm2`) and runs its parts. Each is
kept in `--folder` when it is done, so that the same command goes on where it was ended. Its figures are counts of
tokens and passes, which no other process changes, but for `--only workers`: seconds of a step with one rollout worker
(needs `treering[ray]`), each process on one thread.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.common.progress import OnProgress, silent
from benchmarks.common.timing import chosen
from benchmarks.common.timing import environment as common_environment
from benchmarks.real.bench import kept
from benchmarks.real.tasks import write_task
from benchmarks.rehearsal.change import NUM_UPDATES, RATES, Policy, of_rate
from treering.cli.demo import DemoSize, write_config
from treering.cli.display import PlainConsole
from treering.cli.fetch import fetched
from treering.cli.train import open_training
from treering.config import RlConfig, load
from treering.engine.torch_engine import TorchEngine

NOTE = "an hour on two cores; each part is kept when it is done, and --only change, passes or workers names one"
TABLES = {
    "change": ("trained", "rate", "one_update_later", "entropy_nats"),
    "passes": ("num_forwards", "ratio", "kept_share", "equal_rewards"),
    "harmless": ("case", "mode", "num_forwards", "ratio", "num_rehearsed", "kept_share"),
    "simulated": ("change", "prefill_ms", "kept_share", "speedup_over_sync", "throughput_of_bound"),
    "workers": ("name", "step_s", "train_s", "throughput", "num_kept", "num_equal_rollouts", "weight_difference"),
}
PARTS = ("change", "passes", "harmless", "simulated", "workers")
HARMLESS = {
    "learning rate 1e-4": ["optim.learning_rate=1e-4"],
    "one row": ["engine.max_batch=1"],
    "32 rollouts in 8 rows": ["engine.max_batch=8"],
}
"""Where rehearsals cannot help: nearly every rollout changes soon, no row is idle, or few are."""
SIMULATED = ((0.0, 0.002), (2e-7, 0.002), (2e-6, 0.002), (2.1e-5, 0.02), (2.1e-4, 0.02), (8.3e-4, 0.02), (0.3, 0.02))
"""Chances of a change, and milliseconds of prefill a token."""
NUM_SIMULATED_SEEDS = 3
SIZE = DemoSize(num_prompts=24, prompts_per_step=4, group_size=8, num_epochs=1, max_batch=32)


def measure(
    *, only: Sequence[str] = (), seed: int = 0, folder: Path = Path("runs/rehearsal"), on_progress: OnProgress = silent
) -> dict[str, Any]:
    """Run the parts that `folder` does not hold yet, and put together all that it holds."""
    model = fetched(PlainConsole(quiet=True))
    parts = chosen(only, PARTS)
    if "change" in parts:
        start = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
        for kind, rate in RATES:
            on_progress(f"chance of a change: {kind} at {rate:g}, {NUM_UPDATES} updates")
            file = folder / f"change-{kind}-{rate:g}.json"
            kept(file, lambda own=(kind, rate): of_rate(Policy(model, start, *own, seed)))
    if "passes" in parts:
        kept(folder / "passes.json", lambda: passes(folder, model, seed=seed, on_progress=on_progress))
    if "harmless" in parts:
        kept(folder / "harmless.json", lambda: harmless(folder, model, seed=seed, on_progress=on_progress))
    if "simulated" in parts:
        kept(folder / "simulated.json", lambda: [simulated(*case, on_progress) for case in SIMULATED])
    if "workers" in parts:
        kept(folder / "workers.json", lambda: workers(folder, model, seed=seed, on_progress=on_progress))
    held = {file.stem: json.loads(file.read_text(encoding="utf-8"))["found"] for file in sorted(folder.glob("*.json"))}
    names = {f"change-{kind}-{rate:g}": {"trained": kind, "rate": rate} for kind, rate in RATES}
    changes = [own | held[name] for name, own in names.items() if name in held]
    return {
        **({"change": changes} if changes else {}),
        **{name: held[name] for name in PARTS[1:] if name in held},
        "environment": common_environment(model="SmolLM2-135M-Instruct, float32", num_threads=torch.get_num_threads()),
    }


def passes(folder: Path, model: Path, *, seed: int, on_progress: OnProgress) -> dict[str, Any]:
    """Count the forward passes of an epoch of GRPO on sums as text, without drafts, by `rl.rehearse`."""
    found: dict[str, Any] = {}
    for name in ("off", "on"):
        reports = _run(folder / f"passes-{name}", model, [f"rl.rehearse={name}"], max_tokens=128, seed=seed)
        on_progress(f"passes: {len(reports)} steps, rehearse={name}")
        found[name] = {
            "num_forwards": [report.engine.num_forwards for report in reports],
            "num_sampled": [report.engine.num_sampled for report in reports],
            "rewards": [report.rollouts.reward_mean for report in reports],
            "num_kept": sum(report.engine.num_kept for report in reports),
            "num_rehearsed": sum(report.engine.num_rehearsed for report in reports),
        }
    total = {name: sum(own["num_forwards"]) for name, own in found.items()}
    return {
        "num_forwards": total,
        "ratio": total["off"] / total["on"],
        "kept_share": found["on"]["num_kept"] / max(1, found["on"]["num_rehearsed"]),
        "equal_rewards": found["on"]["rewards"] == found["off"]["rewards"],
        "steps": found,
    }


def harmless(folder: Path, model: Path, *, seed: int, on_progress: OnProgress) -> list[dict[str, Any]]:
    """Count the passes of three steps by `rl.rehearse`, where "auto" has the price of a GPU."""
    rows = []
    for case, settings in HARMLESS.items():
        base = 0
        for mode in ("off", "auto", "on"):
            run = folder / f"harmless-{case.replace(' ', '-')}-{mode}"
            with patch.object(TorchEngine, "row_price", 0.4):
                own = [f"rl.rehearse={mode}", *settings]
                reports = _run(run, model, own, max_tokens=24, seed=seed, size=replace(SIZE, num_prompts=12))
            total = {
                name: sum(getattr(report.engine, name) for report in reports)
                for name in ("num_forwards", "num_rehearsed", "num_verified", "num_kept")
            }
            base = base or total["num_forwards"]
            kept_share = total["num_kept"] / max(1, total["num_verified"])
            ratio = total["num_forwards"] / base
            rows.append({"case": case, "mode": mode, **total, "kept_share": kept_share, "ratio": ratio})
            on_progress(f"harmless: {case}, rehearse={mode}")
    return rows


def simulated(change: float, prefill_ms: float, on_progress: OnProgress) -> dict[str, Any]:
    """Run `treering simulate --rehearse`."""
    on_progress(f"simulated: chance of a change {change:g}")
    options = [
        "--rehearse",
        f"{change:g}",
        "--prefill",
        f"{prefill_ms:g}",
        "--seeds",
        str(NUM_SIMULATED_SEEDS),
        "--json",
    ]
    command = [sys.executable, "-m", "treering", "simulate", *options]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    (row,) = (row for row in report["policies"] if row["policy"] == "rehearsed")
    return {"change": change, "prefill_ms": prefill_ms, **row}


def workers(folder: Path, model: Path, *, seed: int, on_progress: OnProgress) -> list[dict[str, Any]]:
    """Time the steps of the same epoch with one rollout worker and the trainer next to it, without the first two."""
    found, runs = [], []
    for name, settings in {
        "synchronous": ["rl.rehearse=off"],
        "rehearsed": ["rl.rehearse=on"],
        "staleness 1": ["rl.rehearse=off", "rl.staleness=1"],
    }.items():
        own = [*settings, "runtime.workers=1", "engine.num_threads=1"]
        runs.append(folder / f"workers-{name.replace(' ', '-')}")
        reports = _run(runs[-1], model, own, max_tokens=64, seed=seed)
        on_progress(f"workers: {len(reports)} steps, {name}")
        steps = reports[2:]
        found.append(
            {
                "name": name,
                "step_s": median(report.phases.step_s for report in steps),
                "step_s_of_steps": [report.phases.step_s for report in reports],
                "train_s": median(report.phases.train_s for report in steps),
                "num_sampled": [report.engine.num_sampled for report in reports],
                "num_kept": sum(report.engine.num_kept for report in reports),
                "num_rehearsed": sum(report.engine.num_rehearsed for report in reports),
                "rewards": [report.rollouts.reward_mean for report in reports],
            }
        )
    speeds = [sum(row["num_sampled"][2:]) / sum(row["step_s_of_steps"][2:]) for row in found]
    return [
        row | {"throughput": speed / speeds[-1]} | difference(runs[0], run)
        for row, speed, run in zip(found, speeds, runs, strict=True)
    ]


def difference(first: Path, second: Path) -> dict[str, float]:
    """Return how many rollouts of two runs have the same tokens, and the largest difference of their last weights."""
    lines = [sorted(each.glob("treering/rollouts/*.jsonl")) for each in (first, second)]
    rows = [[json.loads(line) for file in own for line in file.read_text("utf-8").splitlines()] for own in lines]
    tokens = [{(row["step"], row["task_id"], row["trial"]): row["tokens"] for row in own} for own in rows]
    files = [max(each.glob("treering/checkpoints/*/model.safetensors")) for each in (first, second)]
    one, other = (load_file(file) for file in files)
    return {
        "num_equal_rollouts": sum(tokens[1].get(key) == own for key, own in tokens[0].items()),
        "weight_difference": max((one[name] - other[name]).abs().max().item() for name in one),
    }


def _run(
    folder: Path, model: Path, settings: Sequence[str], *, max_tokens: int, seed: int, size: DemoSize = SIZE
) -> list[Any]:
    """Run an epoch of GRPO on sums as text, without drafts; return the reports of its steps."""
    own = write_task("sums", folder, model, size, seed=seed, temperature=1.0)
    del own["eval"]  # type: ignore[attr-defined]
    own["optim"]["learning_rate"] = 1e-6  # type: ignore[index]
    own["sampling"]["max_tokens"] = max_tokens  # type: ignore[index]
    file = write_config(folder, size, own, side="treering", seed=seed)
    config = load(RlConfig, file, ["history.drafts=off", *settings])
    with open_training(config, config_dir=folder, console=PlainConsole(quiet=True)) as run:
        return list(run.steps)
