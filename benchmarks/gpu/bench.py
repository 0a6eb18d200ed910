"""All that is measured on a CUDA device, in one run under one time budget: engine, attention, the loop, models.

`make gpu` runs this after the tests that need a device, in the machine's own python, which has torch and transformers
but little else. `TRITON_INTERPRET=1 python3 -m benchmarks.gpu.bench --device cpu --size tiny` runs the same code
without a device, to check that it works; such figures claim nothing, so a file is written only if named. The engine
comes before attention and models and has most of the time: its cases at 1 and 16 rows take three minutes, half of which
its baseline spends compiling. Every part measures its most important cases first; `--only` runs some parts alone. On a
device every part has its own process.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from benchmarks.common.tables import in_words
from benchmarks.gpu.attention import bench as gpu_attention
from benchmarks.gpu.attention.cases import DENSE_LENGTHS, TINY_LENGTHS, full_cases, tiny_cases
from benchmarks.gpu.budget import Budget, Cell, PartReport
from benchmarks.gpu.clock import Stopwatch, environment
from benchmarks.gpu.data import FOLDER, Workload
from benchmarks.gpu.model import bench as gpu_model
from benchmarks.gpu.model.cases import full_plans, tiny_plans
from benchmarks.gpu.model.ways import all_ways
from benchmarks.gpu.workloads import generated_workload, set_workloads
from treering.data import AgentSpec
from treering.errors import ConfigError, TreeringError, UnsupportedError

Size = Literal["full", "tiny"]
Part = Literal["engine", "attention", "loop", "images", "model"]
PARTS: tuple[Part, ...] = get_args(Part)

RESULTS = Path(__file__).resolve().parents[1] / "results"
SHARES: dict[Part, float] = {
    "engine": 0.45,
    "attention": 0.3,
    "loop": 0.25,
    "images": 0.2,
    "model": 1.0,
}
"""Share of the seconds left when a part begins; the last part of a run has all of them."""

BUDGET_S = 300.0

GRACE_S = 60.0
"""A part whose process runs this long past its budget hangs, and is ended."""

SPEC = AgentSpec(num_tasks=3, num_trials=8, num_system_tokens=600, num_turns=12, num_action_tokens=96)
"""Trees that stand in for missing bench sets."""

TINY_SPEC = AgentSpec(
    num_tasks=2,
    num_trials=2,
    num_system_tokens=20,
    num_task_tokens=5,
    num_turns=2,
    num_action_tokens=6,
    num_observation_tokens=6,
)
"""About 200 flat tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to run.

    Attributes:
        device: "cuda", or "cpu" to check that the code works.
        size: "full", or "tiny" for machines without a device.
        parts: which parts, in order.
        budget_s: seconds for all parts together.
        data: folder with carried bench sets; without it trees are generated.
        out: folder for JSON files; None writes none.
    """

    device: str = "cuda"
    size: Size = "full"
    parts: Sequence[Part] = PARTS
    budget_s: float = BUDGET_S
    data: Path = FOLDER
    out: Path | None = None

    def __post_init__(self) -> None:
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UnsupportedError(
                "this benchmark measures CUDA devices and torch finds none: run `make gpu` on a machine with one, or "
                "see that the code works with "
                "`TRITON_INTERPRET=1 python3 -m benchmarks.gpu.bench --device cpu --size tiny`"
            )
        if self.device == "cpu" and self.out is not None and self.out.resolve() == RESULTS:
            raise ConfigError(f"{RESULTS} holds what devices have measured, --device cpu is none: name another folder")


def run(settings: Settings) -> dict[Part, Cell]:
    """Runs the parts within their budgets, prints a table of each, and returns their reports."""
    budget = Budget(settings.budget_s)
    # Carried trees have thousands of tokens, which take minutes in an interpreter.
    sets = [generated_workload(TINY_SPEC)] if settings.size == "tiny" else set_workloads(settings.data, SPEC)
    reports: dict[Part, Cell] = {}
    for part in settings.parts:
        try:
            module = _module(part)
        except ModuleNotFoundError as error:
            print(f"\n{part}: skipped, {error.name} is not installed", flush=True)
            continue
        seconds = _share_s(budget, part, settings.parts)
        print(f"\n{part}: at most about {seconds:.0f} s", flush=True)
        report = PartReport(
            part,
            seconds,
            environment=environment(settings.device, size=settings.size, sets=[some.name for some in sets]),
            goals=dict(module.GOALS),
            file=None if settings.out is None else settings.out / f"gpu-{part}.json",
        )
        MEASURE[part](report, settings, sets)
        report.write()
        reports[part] = report.as_json()
        _print(part, module.COLUMNS, reports[part])
    return reports


def run_apart(parts: Sequence[Part], budget: Budget, arguments: Sequence[str]) -> dict[Part, int]:
    """Exit statuses of all parts, each of which runs in its own process with these arguments.

    After an error in a kernel every call to the device fails in that process, and a kernel may hang; other parts must
    not be affected.
    """
    statuses: dict[Part, int] = {}
    for part in parts:
        seconds = _share_s(budget, part, parts)
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu.bench",
            *arguments,
            "--only",
            part,
            "--budget-s",
            f"{seconds:.0f}",
        ]
        try:
            statuses[part] = subprocess.run(command, timeout=seconds + GRACE_S).returncode
        except subprocess.TimeoutExpired:
            print(f"{part}: ended, since it hung; what it had measured is on file", flush=True)
            statuses[part] = 1
    return statuses


def _share_s(budget: Budget, part: Part, parts: Sequence[Part]) -> float:
    return budget.share_s(1.0 if part == parts[-1] else SHARES[part])


def _measure_engine(report: PartReport, settings: Settings, sets: Sequence[Workload]) -> None:
    from benchmarks.gpu.engine import bench, cases

    plans = cases.tiny_plans() if settings.size == "tiny" else cases.full_plans()
    bench.measure_engine(report, plans, settings.device, _watch(settings))


def _measure_attention(report: PartReport, settings: Settings, sets: Sequence[Workload]) -> None:
    tiny = settings.size == "tiny"
    cases, lengths = (tiny_cases(sets), TINY_LENGTHS) if tiny else (full_cases(sets), DENSE_LENGTHS)
    gpu_attention.measure_attention(report, cases, lengths, _watch(settings), gpu_attention.measured_backends())


def _watch(settings: Settings) -> Stopwatch:
    device = settings.device
    return Stopwatch(device=device, min_runs=1, max_runs=1) if settings.size == "tiny" else Stopwatch(device=device)


def _measure_loop(report: PartReport, settings: Settings, sets: Sequence[Workload]) -> None:
    from benchmarks.gpu.engine import cases
    from benchmarks.gpu.loop import measure_loop
    from benchmarks.loop.runs import RunSize

    tiny = settings.size == "tiny"
    plan = cases.tiny_plans()[0] if tiny else cases.full_plans()[1]
    size = RunSize(num_prompts=4, prompts_per_step=2, group_size=2, num_steps=3) if tiny else RunSize()
    measure_loop(report, size, plan, sets[-1], settings.device)


def _measure_images(report: PartReport, settings: Settings, sets: Sequence[Workload]) -> None:
    from benchmarks.gpu.images import measure_images
    from benchmarks.images.cases import DEFAULT, QWEN2_5_VL_3B, small

    measured = small(DEFAULT) if settings.size == "tiny" else QWEN2_5_VL_3B
    measure_images(report, small(DEFAULT), measured, settings.device)


def _measure_models(report: PartReport, settings: Settings, sets: Sequence[Workload]) -> None:
    plans = tiny_plans(sets) if settings.size == "tiny" else full_plans(sets)
    gpu_model.measure_models(report, plans, settings.device, all_ways())


MEASURE: dict[Part, Callable[[PartReport, Settings, Sequence[Workload]], None]] = {
    "engine": _measure_engine,
    "attention": _measure_attention,
    "loop": _measure_loop,
    "images": _measure_images,
    "model": _measure_models,
}


def _module(part: Part) -> Any:
    """The goals of a part and the columns of its cases; a part imports what it needs when it is asked for."""
    return import_module(f"benchmarks.gpu.{part}" if part in ("loop", "images") else f"benchmarks.gpu.{part}.bench")


def _print(part: Part, columns: Mapping[str, Sequence[str]], report: Cell) -> None:
    """One line per case, then the goals."""
    print(f"\n{part} on {report['environment']['device']}")
    for case in report["cases"]:
        shown = columns[case["kind"]]
        print(f"{case['case']:44} {in_words({name: case[name] for name in shown})}")
    print(f"goals: {in_words(report['goals'])}")


def main() -> None:
    """Reads the arguments and runs; exits with 1 where a case failed, after all others have run."""
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.gpu.bench", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=get_args(Size), default="full")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, metavar="S", help=f"(default {BUDGET_S:.0f})")
    parser.add_argument("--data", type=Path, default=FOLDER, metavar="FOLDER", help=f"bench sets (default {FOLDER})")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for JSON (with CUDA and full: benchmarks/results)")
    given = parser.parse_args()
    measured = given.device == "cuda" and given.size == "full"
    out = given.out or (RESULTS if measured else None)
    if out is not None and not out.is_dir():
        parser.error(f"--out needs an existing folder, got {out}: create it first")
    try:
        settings = Settings(
            device=given.device,
            size=given.size,
            parts=[part for part in PARTS if part in given.only],
            budget_s=given.budget_s,
            data=given.data,
            out=out,
        )
        if settings.device == "cuda" and len(settings.parts) > 1:
            sys.exit(max(map(abs, run_apart(settings.parts, Budget(settings.budget_s), sys.argv[1:]).values())))
        reports = run(settings)
    except TreeringError as error:
        parser.error(str(error))
    errors = [f"{error['case']}: {error['error']}" for report in reports.values() for error in report["errors"]]
    if errors:
        sys.exit("\n".join(["some cases failed, the others are measured:", *errors]))


if __name__ == "__main__":
    main()
