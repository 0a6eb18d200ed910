"""Claim: a pretrained model earns the plain loop's rewards in less time.

`python -m benchmarks real` fetches SmolLM2-135M-Instruct (`treering fetch smollm2`) and runs its parts. Each is kept in
`--folder` when it is done, so that the same command goes on where it was ended. Processor time counts, as other
processes may take the machine; wall time and load are reported next to it. The parts trl and vllm run in the
environments of `make trl-test` and `make vllm-test`, the latter on the weights that the former leaves.
"""

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.progress import OnProgress, silent
from benchmarks.common.timing import chosen
from benchmarks.common.timing import environment as common_environment
from benchmarks.real.agents import measure_agents, verifiers_python
from benchmarks.real.exact import distances, half_distances, profiles
from benchmarks.real.grpo import SIZE, compared, train_both
from benchmarks.real.hour import hour
from benchmarks.real.sft import WEIGHTS, measure_sft, recorded_agents
from benchmarks.real.tasks import TASKS
from treering.cli.demo import DemoSize
from treering.cli.display import PlainConsole
from treering.cli.fetch import fetched

NOTE = "hours on two cores with all parts and seeds; --only grpo,exact --seeds 1 names some"
TABLES = {
    "tasks": ("task", "temperature", "num_seeds", "processor_s", "processor_ratio", "token_ratio", "held_out_reward"),
    "exact": ("medians", "stock_over_tree"),
    "sft": ("name", "token_ratio", "processor_ratio", "loss_difference", "turns.num_equal", "turns.finish_reasons"),
    "agents": ("name", "held_out_reward", "flat_tokens", "computed_tokens", "token_ratio", "num_rollouts", "num_equal"),
}
NUM_HALF_SEEDS = 8
RUNS = (*product(TASKS, (1.0,)), ("sums", 0.7))
"""Tasks and temperatures of part grpo."""
HOSTED = ("trl", "vllm")
PARTS = ("grpo", "exact", "half", "profile", "sft", "agents", "hour", *HOSTED)


def measure(
    *,
    num_seeds: int = 3,
    only: Sequence[str] = (),
    num_prompts: int = SIZE.num_prompts,
    folder: Path = Path("runs/real"),
    on_progress: OnProgress = silent,
) -> dict[str, Any]:
    """Runs the parts that `folder` does not hold yet, and puts together all that it holds."""
    model, size = fetched(PlainConsole(quiet=True)), replace(SIZE, num_prompts=num_prompts)
    parts = chosen(only, PARTS)
    if "grpo" in parts:
        # Seed by seed, so that a run that is ended has whole ones.
        for seed, (task, temperature) in product(range(num_seeds), RUNS):
            name = f"{task}-{temperature:g}-{seed}"
            run = partial(
                train_both,
                folder / name,
                model,
                task,
                seed=seed,
                temperature=temperature,
                size=size,
                on_progress=on_progress,
            )
            kept(folder / f"grpo-{name}.json", run)
    if "exact" in parts:
        kept(folder / "exact.json", lambda: distances(model, num_seeds=num_seeds, on_progress=on_progress))
    if "half" in parts:
        for dtype in (torch.bfloat16, torch.float16):
            name = str(dtype).removeprefix("torch.")
            run = partial(half_distances, model, dtype, num_seeds=NUM_HALF_SEEDS, on_progress=on_progress)
            kept(folder / f"{name}.json", run)
    if "profile" in parts:
        kept(folder / "profile.json", lambda: profiles(model))
    if "sft" in parts:
        agents = recorded_agents()
        for weights in WEIGHTS:
            part = partial(measure_sft, folder / "sft", model, agents, weights, on_progress=on_progress)
            kept(folder / f"sft-{weights}.json", part)
    if "hour" in parts:
        kept(folder / "hour.json", lambda: hour(folder / "hour", model, size=size, on_progress=on_progress))
    hosted = [part for part in HOSTED if part in parts and not (folder / f"{part}.json").exists()]
    # 48 steps of 16 rollouts.
    small = replace(size, prompts_per_step=2)
    notes = [note for part in hosted for note in run_hosted(part, folder, model, small, on_progress)]
    if "agents" in parts and verifiers_python().is_file():
        kept(folder / "agents.json", lambda: measure_agents(folder / "agents", model, on_progress=on_progress))
    elif "agents" in parts:
        notes.append(f"agents is left out, as {verifiers_python()} is missing: make .venv-env/.installed")
    held = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))}
    runs = [report["found"] for name, report in held.items() if name.startswith("grpo-")]
    trained = {name[4:]: report["found"] for name, report in held.items() if name.startswith("sft-")}
    others = {name: report["found"] for name, report in held.items() if not name.startswith(("grpo-", "sft-"))}
    return {
        **({"tasks": compared(runs), "runs": runs} if runs else {}),
        **({"sft": trained} if trained else {}),
        **others,
        "notes": notes,
        "environment": common_environment(
            num_processors=os.cpu_count(),
            num_threads=torch.get_num_threads(),
            model="SmolLM2-135M-Instruct, float32",
            load_average={name: report["load_average"] for name, report in held.items()},
        ),
    }


def run_hosted(part: str, folder: Path, model: Path, size: DemoSize, on_progress: OnProgress) -> list[str]:
    """Does a part in its host's environment; a note where there is no such environment."""
    python = Path(f".venv-{part}/bin/python")
    if find_spec(part) is not None:
        work = import_module(f"benchmarks.real.{part}").measure
        kept(folder / f"{part}.json", lambda: work(folder / part, model, size=size, on_progress=on_progress))
    elif python.exists():
        options = ["--only", part, "--prompts", str(size.num_prompts), "--folder", str(folder)]
        subprocess.run([str(python), "-m", "benchmarks", "real", *options], check=True)
    else:
        return [f"{part} is left out, as {python} is missing: make .venv-{part}/.installed"]
    return []


def kept(file: Path, work: Callable[[], Any]) -> None:
    """Does a part unless its file is there, and writes it with the load before and after."""
    if file.exists():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    before = os.getloadavg()[0]
    report = {"found": work(), "load_average": [before, os.getloadavg()[0]]}
    file.write_text(json.dumps(report) + "\n", encoding="utf-8")
