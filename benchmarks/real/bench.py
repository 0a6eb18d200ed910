"""Claim: a pretrained model earns the plain loop's rewards in less time.

`python -m benchmarks real` fetches SmolLM2-135M-Instruct (`treering fetch smollm2`) and runs its parts. Each is kept in
`--folder` when it is done, so that the same command goes on where it was ended. Processor time counts, as other
processes may take the machine; wall time and load are reported next to it.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.progress import OnProgress, silent
from benchmarks.common.timing import chosen
from benchmarks.common.timing import environment as common_environment
from benchmarks.real.exact import distances, profiles
from benchmarks.real.grpo import SIZE, compared, train_both
from benchmarks.real.tasks import TASKS
from treering.cli.display import LogConsole
from treering.cli.fetch import SMOLLM2, fetched

NOTE = "hours on two cores with all parts and seeds; --only grpo,exact --seeds 1 names some"
TABLES = {
    "tasks": ("task", "temperature", "num_seeds", "processor_s", "processor_ratio", "token_ratio", "held_out_reward"),
    "exact": ("medians", "stock_over_tree"),
}
PARTS = ("grpo", "exact", "profile")


def measure(
    *,
    num_seeds: int = 3,
    only: Sequence[str] = (),
    num_prompts: int = SIZE.num_prompts,
    folder: Path = Path("runs/real"),
    on_progress: OnProgress = silent,
) -> dict[str, Any]:
    """Runs the parts that `folder` does not hold yet, and puts together all that it holds."""
    model, size = fetched(SMOLLM2, LogConsole(quiet=True)), replace(SIZE, num_prompts=num_prompts)
    parts = chosen(only, PARTS)
    if "grpo" in parts:
        for seed, task in product(range(num_seeds), TASKS):
            target = folder / f"{task}-{seed}"
            run = partial(
                train_both, target, model, task, seed=seed, temperature=1.0, size=size, on_progress=on_progress
            )
            kept(folder / f"grpo-{task}-{seed}.json", run)
    if "exact" in parts:
        kept(folder / "exact.json", lambda: distances(model, num_seeds=num_seeds, on_progress=on_progress))
    if "profile" in parts:
        kept(folder / "profile.json", lambda: profiles(model))
    held = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))}
    runs = [report["found"] for name, report in held.items() if name.startswith("grpo-")]
    others = {name: report["found"] for name, report in held.items() if not name.startswith("grpo-")}
    return {
        **({"tasks": compared(runs), "runs": runs} if runs else {}),
        **others,
        "environment": common_environment(
            num_processors=os.cpu_count(),
            num_threads=torch.get_num_threads(),
            model="SmolLM2-135M-Instruct, float32",
            load_average={name: report["load_average"] for name, report in held.items()},
        ),
    }


def kept(file: Path, work: Callable[[], Any]) -> None:
    """Does a part unless its file is there, and writes it with the load before and after."""
    if file.exists():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    before = os.getloadavg()[0]
    report = {"found": work(), "load_average": [before, os.getloadavg()[0]]}
    file.write_text(json.dumps(report) + "\n", encoding="utf-8")
