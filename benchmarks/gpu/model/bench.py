"""Claim: a whole step on trees comes near its FLOP bound against tuned varlen packing, and loses nothing without trees.

Qwen3-1.7B and 8B shapes with random weights in bfloat16: a sweep of sharing, and samples of the bench sets. Every way
to train chooses its own micro-batch; each workload is compared with its fastest baseline.
"""

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.common.timing import Clock, Step, cuda_seconds, interleaved_seconds, wall_seconds
from benchmarks.gpu.budget import Cell, PartReport, in_words
from benchmarks.gpu.data import Workload
from benchmarks.gpu.flops import peak_tflops
from benchmarks.gpu.model.cases import ModelPlan, build_on_device, count
from benchmarks.gpu.model.gradient import check_gradients
from benchmarks.gpu.model.steps import BASELINES, TREE, BuildStep
from benchmarks.gpu.model.varlen import varlen_implementation
from treering.errors import UnsupportedError
from treering.model.context import tree_attention

GOALS = MappingProxyType({"share_of_flop_bound": 0.9, "loss_without_sharing": 0.02, "mfu": 0.5})

MAX_LAG = 1.3
"""A baseline whose first run took this much longer than the fastest one's runs only once."""

LONG_ROUND_S = 8.0
"""If a round of all ways takes longer, there are two rounds instead of three."""

ROOM = 1.3
"""A model starts only if this many times the bytes of its weights and gradients are free."""


def measure_models(report: PartReport, plans: Sequence[ModelPlan], device: str, ways: Mapping[str, BuildStep]) -> None:
    """Adds all workloads of all plans to a report; checks the first model's gradients before anything is timed.

    A model that does not fit is skipped, by name. A later plan of the same shape uses the choices of the first.
    """
    report.run(f"{plans[0].shape.name} gradient", lambda: check_gradients(plans[0], device, ways))
    chosen: dict[str, dict[str, int]] = {}
    for plan in plans:
        reason = _lack_of_room(plan, device)
        if reason is None:
            _measure_plan(report, plan, device, ways, chosen)
            continue
        for workload in plan.workloads:
            report.skip(f"{plan.shape.name} {workload.name}", reason)


def _lack_of_room(plan: ModelPlan, device: str) -> str | None:
    free = free_bytes(device)
    if free is None or ROOM * plan.weight_bytes <= free:
        return None
    return f"weights and gradients take {plan.weight_bytes:,} bytes, {free:,} are free"


def _measure_plan(
    report: PartReport,
    plan: ModelPlan,
    device: str,
    ways: Mapping[str, BuildStep],
    chosen: dict[str, dict[str, int]],
) -> None:
    models: list[PreTrainedModel] = []

    def model() -> PreTrainedModel:
        # Built by the first case that fits the budget, and kept for the others.
        if not models:
            models.append(build_on_device(plan, device))
        return models[0]

    def tune() -> Cell:
        found = choose_tokens(model(), plan, ways, _clock(device))
        chosen[plan.shape.name] = found["chosen"]
        return {"kind": "tuning", "model": plan.shape.name, **found, **attention_in_words(model())}

    if plan.shape.name not in chosen:
        report.run(f"{plan.shape.name} tuning", tune)
    tokens = chosen.get(plan.shape.name, {})
    for workload in plan.workloads:
        name = f"{plan.shape.name} {workload.name}"
        if TREE not in tokens or len(tokens) == 1:
            report.skip(name, "its model was not tuned")
            continue
        report.run(name, lambda w=workload: measure_workload(w, plan, _steps(model(), w, ways, tokens), tokens, device))


def _steps(
    model: PreTrainedModel, workload: Workload, ways: Mapping[str, BuildStep], tokens: Mapping[str, int]
) -> dict[str, Step]:
    return {way: ways[way](model, workload, most) for way, most in tokens.items()}


def choose_tokens(model: PreTrainedModel, plan: ModelPlan, ways: Mapping[str, BuildStep], clock: Clock) -> Cell:
    """The fastest micro-batch of each way on the plan's first workload, and the seconds of all of them.

    The first option of a way runs twice, once to warm up. Options that run out of memory or are refused are listed.
    """
    seconds: dict[str, dict[str, float]] = {}
    left_out: dict[str, str] = {}
    for way, build in ways.items():
        for tokens in plan.token_options:
            step = build(model, plan.workloads[0], tokens)
            try:
                if way not in seconds:
                    step()
                seconds.setdefault(way, {})[str(tokens)] = clock(step)
            except (torch.OutOfMemoryError, UnsupportedError) as error:
                left_out[f"{way} {tokens}"] = in_words(error)
            model.zero_grad()
    chosen = {way: int(min(times, key=times.__getitem__)) for way, times in seconds.items() if times}
    return {"seconds": seconds, "left_out": left_out, "chosen": chosen}


def attention_in_words(model: PreTrainedModel) -> Cell:
    """The attention of Treering and of the packed baseline, and the reason."""
    with tree_attention(model) as active:
        return {
            "tree_backend": active.backend,
            "tree_backend_reason": active.reason,
            "varlen_implementation": varlen_implementation(),
        }


def measure_workload(
    workload: Workload, plan: ModelPlan, steps: Mapping[str, Step], chosen: Mapping[str, int], device: str
) -> Cell:
    """One workload: seconds and memory of every way, against the FLOP bound and the fastest baseline.

    The first round measures memory and finds the slow baselines, whose only run it is.
    """
    counts, clock = count(workload, plan.shape), _clock(device)
    peaks: dict[str, int | None] = {}
    first = {name: _watched(lambda s=step: clock(s), device, name, peaks) for name, step in steps.items()}
    fastest = min(first[name] for name in steps if name in BASELINES)
    again = {name: step for name, step in steps.items() if name == TREE or first[name] <= MAX_LAG * fastest}
    num_runs = 2 if sum(first.values()) > LONG_ROUND_S else 3
    seconds = {name: [once] for name, once in first.items()} | interleaved_seconds(again, num_runs, clock)
    compared = compare(seconds, counts)
    peak = peak_tflops(torch.cuda.get_device_name()) if device == "cuda" else None
    return {
        "kind": "workload",
        "model": plan.shape.name,
        "workload": workload.name,
        "checkpointed": plan.checkpointed,
        "max_tokens": dict(chosen),
        **counts,
        **compared,
        "mfu": None if peak is None else compared["tree_tflops"] / peak,
        "seconds": seconds,
        "peak_bytes": peaks,
    }


def compare(seconds: Mapping[str, list[float]], counts: Mapping[str, float]) -> Cell:
    """Medians of tree and fastest baseline, the speedup, its share of bounds, and the loss where nothing is shared.

    Example: tree 1.0 s, baselines 4.0 and 3.6 s and a FLOP bound of 4 are a speedup of 3.6, 90 % of the bound.
    """
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    baseline = min((name for name in medians if name in BASELINES), key=medians.__getitem__)
    speedup = medians[baseline] / medians[TREE]
    return {
        "baseline": baseline,
        "baseline_s": medians[baseline],
        "tree_s": medians[TREE],
        "speedup": speedup,
        "share_of_flop_bound": speedup / counts["flop_bound"],
        "share_of_scored_flop_bound": speedup / counts["scored_flop_bound"],
        "loss_without_sharing": medians[TREE] / medians[baseline] - 1.0 if counts["sharing"] == 0.0 else None,
        "tree_tflops": counts["tree_scored_flops"] / medians[TREE] / 1e12,
        "baseline_tflops": counts["flat_scored_flops"] / medians[baseline] / 1e12,
    }


def free_bytes(device: str) -> int | None:
    """Bytes free on the device after unused memory is released; None for a CPU."""
    if device != "cuda":
        return None
    gc.collect()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def _watched(run: Callable[[], float], device: str, name: str, peaks: dict[str, int | None]) -> float:
    """Seconds of a run; writes the peak of allocated bytes, weights included, into `peaks`."""
    if device != "cuda":
        peaks[name] = None
        return run()
    torch.cuda.reset_peak_memory_stats()
    seconds = run()
    peaks[name] = int(torch.cuda.max_memory_allocated())
    return seconds


def _clock(device: str) -> Clock:
    return cuda_seconds if device == "cuda" else wall_seconds


def print_table(report: Cell) -> None:
    """One line per workload."""
    print(f"\nmodels on {report['environment']['device']}: medians of steps, forward and backward")
    for case in report["cases"]:
        if case["kind"] == "workload":
            print(f"{case['case']:28} {_in_words(case)}")
        elif case["kind"] == "tuning":
            print(f"{case['case']:28} micro-batches of {case['chosen']} tokens, attention by {case['tree_backend']}")
        else:
            print(f"{case['case']:28} gradients: {case['errors']}")
    goals: dict[str, Any] = report["goals"]
    print(
        f"goals: >= {goals['share_of_flop_bound']:.0%} of the FLOP bound at >= {goals['mfu']:.0%} MFU, "
        f"<= {goals['loss_without_sharing']:.0%} lost where nothing is shared"
    )


def _in_words(case: Cell) -> str:
    loss = case["loss_without_sharing"]
    tail = "" if loss is None else f", {loss:+.1%} time without sharing"
    peak = case["peak_bytes"].get(TREE), case["peak_bytes"].get(case["baseline"])
    memory = "" if None in peak else f", {peak[0] / 2**30:.1f} of {peak[1] / 2**30:.1f} GiB"
    mfu = "" if case["mfu"] is None else f" ({case['mfu']:.0%} MFU)"
    return (
        f"sharing {case['sharing']:.2f}: {case['speedup']:.2f}x of {case['flop_bound']:.2f}x "
        f"({case['share_of_flop_bound']:.0%}) over {case['baseline']}, {case['tree_tflops']:.0f} TFLOP/s{mfu}"
        f"{memory}{tail}"
    )
