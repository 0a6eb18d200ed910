"""Claim: where a policy repeats itself, drafts from its own history beat every drafter of vLLM's that needs no model.

`python -m benchmarks vllm`, in the environment of `make vllm-test`, trains a small policy that has memorised three
solutions of each of 11 problems. vLLM samples 16 rollouts of each at temperature 1 in a second epoch, with the first
one's as history; with "other history" each problem has the solutions of another one as its history. Figures are
processor seconds of one process with one thread. vLLM's CPU build samples wrongly with drafts (vllm #55005); the
correction of the tests is used.
"""

import multiprocessing
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.progress import OnProgress, silent
from benchmarks.common.timing import check_runs, environment
from benchmarks.vllm.policy import save_policy
from benchmarks.vllm.runs import Case, measure_case
from treering.extras import require

NOTE = "about twenty minutes, ten of which train the small policy"
TABLES = {
    "cases": (*("num_rows", "method", "tokens_per_row_and_step", "accepted_share", "propose_us_per_row", "cpu_s"),),
}

NUM_PROBLEMS, GROUP_SIZE = 11, 16
METHODS = ("none", "ngram", "suffix", "history", "contract", "other history")
ROWS = (16, 64)


def measure(
    *,
    num_runs: int = 1,
    only: list[str] | None = None,
    num_rows: tuple[int, ...] = ROWS,
    options: str = "",
    policy: Path | None = None,
    on_progress: OnProgress = silent,
) -> dict[str, Any]:
    """Every method with every number of rows, on a policy that `save_policy` saved, or a new one.

    `options` are lines of the plugin's TOML file.
    """
    require("python -m benchmarks vllm", "vllm")
    check_runs(num_runs)
    notes = []
    methods = [method for method in METHODS if only is None or method in only]
    if "suffix" in methods and find_spec("arctic_inference") is None:
        methods.remove("suffix")
        notes.append("suffix is left out: arctic-inference is not installed beside vLLM (docs/vllm.md says how)")
    with tempfile.TemporaryDirectory() as folder:
        saved = policy or Path(folder) / "policy"
        if policy is None:
            on_progress("warm start of the policy, about a quarter of an hour")
            _alone(_save, saved)
        cases = []
        for rows in num_rows:
            for method in methods:
                on_progress(f"{method}, {rows} rows")
                case = Case(
                    method=method,
                    num_rows=rows,
                    num_epochs=1 if method in ("none", "other history") else 2,
                    options=options,
                )
                cases.append(_median_of([_measure(case, saved) for _ in range(num_runs)]))
    facts = environment(clock="process time", threads=1)
    return {"cases": cases, "notes": [*notes, *_misses(cases)], "environment": facts}


def _measure(case: Case, policy: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = _alone(measure_case, case, policy, Path(folder), NUM_PROBLEMS, GROUP_SIZE)
    return found


def _median_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    middle = median(run["cpu_s"] for run in runs)
    return min(runs, key=lambda run: abs(float(run["cpu_s"]) - middle))


def _misses(cases: list[dict[str, Any]]) -> list[str]:
    """A line per goal that these figures miss."""
    found, by = [], {(case["method"], case["num_rows"]): case for case in cases}
    for (method, rows), case in by.items():
        none, suffix = by.get(("none", rows)), by.get(("suffix", rows))
        ratio = case["cpu_s"] / none["cpu_s"] if none else 0.0
        if method == "history" and ratio > 0.6:
            found.append(f"{rows} rows: {ratio:.2f}x of the seconds without drafts, the goal is 0.6")
        if method == "other history" and ratio > 1.05:
            found.append(f"{rows} rows: {ratio:.2f}x of the seconds without drafts, with other problems' history")
        if method == "history" and suffix is not None:
            gain = case["tokens_per_row_and_step"] / suffix["tokens_per_row_and_step"]
            if gain < 1.2:
                found.append(f"{rows} rows: {gain:.2f}x the tokens of suffix, the goal is 1.2")
            if case["propose_us_per_row"] > suffix["propose_us_per_row"]:
                found.append(f"{rows} rows: drafting takes longer than suffix")
    return found


def _alone(work: Callable[..., Any], *arguments: Any) -> Any:
    """Runs a function in a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def _save(folder: Path) -> float:
    return save_policy(folder, NUM_PROBLEMS, lambda words: print(words, flush=True))
