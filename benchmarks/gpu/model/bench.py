"""Claim: a step on trees is near its FLOP bound against the fastest that people run, and loses nothing without trees.

Qwen3-1.7B and 8B shapes with random weights in bfloat16: a sweep of sharing, and samples of the bench sets. Stock code
is measured padded and packed, with its layers as they are, compiled and by Liger, with a head in large chunks and with
Liger's; the tree step with the same layers. Every way chooses its own micro-batch; each workload is compared with its
fastest baseline.
"""

import gc
import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from transformers import PreTrainedModel

from benchmarks.common.timing import Clock, Step, cuda_seconds, wall_seconds
from benchmarks.gpu.budget import Cell, PartReport, in_words
from benchmarks.gpu.data import Workload
from benchmarks.gpu.flops import peak_tflops
from benchmarks.gpu.model.cases import ModelPlan, build_on_device, count
from benchmarks.gpu.model.gradient import check_gradients
from benchmarks.gpu.model.kernels import profile_step
from benchmarks.gpu.model.steps import MicroBatch
from benchmarks.gpu.model.varlen import varlen_implementation
from benchmarks.gpu.model.ways import Way
from treering.extras import is_installed
from treering.model.context import tree_attention
from treering.model.layers import Layers, set_layers

GOALS = MappingProxyType({"share_of_flop_bound": 0.9, "loss_without_sharing": 0.0, "mfu": 0.5})

COLUMNS = MappingProxyType(
    {
        "gradient": ("errors",),
        "tuning": ("chosen", "tree_backend", "varlen_implementation"),
        "way": ("seconds", "peak_bytes", "profile"),
        "workload": (
            *("sharing", "speedup", "flop_bound", "share_of_flop_bound", "tree", "baseline", "tree_tflops", "mfu"),
            "loss_without_sharing",
        ),
    }
)
"""What is printed of a case, by its kind."""

MAX_LAG = 1.15
"""A way this many times slower than the fastest of its kind on the first workload is not run on the others."""

NUM_RUNS = 2
"""After the run that shows the way's memory; steps of seconds vary by less than a percent."""

Choice = tuple[MicroBatch, float]
"""A way's micro-batch and its seconds on the first workload."""


def measure_models(report: PartReport, plans: Sequence[ModelPlan], device: str, ways: Mapping[str, Way]) -> None:
    """Adds all workloads of all plans to a report; checks the first model's gradients before anything is timed."""
    report.run(f"{plans[0].shape.name} gradient", lambda: check_gradients(plans[0], device))
    for plan in plans:
        # Frees the cycles of the last model before the next one needs their memory.
        gc.collect()
        chosen: dict[str, Choice] = {}
        for layers in plan.layers:
            _measure_layers(report, plan, device, ways, layers, chosen)
        for workload in plan.workloads:
            _compare(report, plan, workload, device)


def _measure_layers(
    report: PartReport,
    plan: ModelPlan,
    device: str,
    ways: Mapping[str, Way],
    layers: Layers,
    chosen: dict[str, Choice],
) -> None:
    """Tunes the ways with such layers, then runs those on all workloads that are not far behind."""
    if layers == "liger" and not is_installed("liger_kernel"):
        report.skip(f"{plan.shape.name} liger", "liger-kernel is not installed")
        return
    of_layers = {name: way for name, way in ways.items() if way.layers == layers}
    models: list[PreTrainedModel] = []

    def tune() -> Cell:
        models.append(build_on_device(plan, device))
        set_layers(models[0], layers)
        found, left_out = choose_tokens(models[0], plan, of_layers, _clock(device))
        chosen.update(found)
        return {
            "kind": "tuning",
            "model": plan.shape.name,
            "chosen": found,
            "left_out": left_out,
            **attention_in_words(models[0]),
        }

    if report.run(f"{plan.shape.name} {layers} tuning", tune) is None:
        return
    for number, workload in enumerate(plan.workloads):
        # All ways have a row on the first workload.
        kept = {
            name: way
            for name, way in of_layers.items()
            if name in chosen and (number == 0 or not _lags(name, chosen, ways))
        }
        for name, way in kept.items():
            step = way.step(models[0], workload, chosen[name][0])
            report.run(
                f"{plan.shape.name} {workload.name} {name}",
                lambda s=step, n=name, w=workload: {
                    "kind": "way",
                    "model": plan.shape.name,
                    "workload": w.name,
                    "way": n,
                    "is_tree": ways[n].is_tree,
                    "max_tokens": chosen[n][0],
                    **measure_way(s, plan.shape.vocab_size, device),
                    "flops": count(w, plan.shape)["tree_scored_flops" if ways[n].is_tree else "flat_scored_flops"],
                },
            )


def _lags(name: str, chosen: Mapping[str, Choice], ways: Mapping[str, Way]) -> bool:
    """Whether a way is far behind the fastest so far that shares, or does not share, as it does."""
    fastest = min(seconds for other, (_, seconds) in chosen.items() if ways[other].is_tree == ways[name].is_tree)
    return chosen[name][1] > MAX_LAG * fastest


def choose_tokens(
    model: PreTrainedModel, plan: ModelPlan, ways: Mapping[str, Way], clock: Clock
) -> tuple[dict[str, Choice], dict[str, str]]:
    """The fastest micro-batch of each way on the plan's first workload, and what was left out and why.

    Treering's ways may choose by memory, as they do by default. Every option runs twice, once to warm up: the first
    choice by memory also measures it. A stock way that fails is left out; the tree step must run.
    """
    chosen: dict[str, Choice] = {}
    left_out: dict[str, str] = {}
    for name, way in ways.items():
        options: tuple[MicroBatch, ...] = plan.token_options
        for tokens in (*options, "auto") if way.rows in ("tree", "chains") else options:
            step = way.step(model, plan.workloads[0], tokens)
            try:
                step()
                seconds = clock(step)
            except Exception as error:
                if way.is_tree and not isinstance(error, torch.OutOfMemoryError):
                    raise
                left_out[f"{name}, {tokens}"] = in_words(error)
                continue
            finally:
                model.zero_grad()
            if name not in chosen or seconds < chosen[name][1]:
                chosen[name] = tokens, seconds
    return chosen, left_out


def attention_in_words(model: PreTrainedModel) -> Cell:
    """The attention of Treering and of the packed baseline, and the reason."""
    with tree_attention(model) as active:
        return {
            "tree_backend": active.backend,
            "tree_backend_reason": active.reason,
            "varlen_implementation": varlen_implementation(),
        }


def measure_way(step: Step, vocab_size: int, device: str) -> Cell:
    """Seconds of each run, the peak of allocated bytes, weights included, and the groups of kernels of one more."""
    is_cuda = device == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    step()
    peak = int(torch.cuda.max_memory_allocated()) if is_cuda else None
    seconds = [_clock(device)(step) for _ in range(NUM_RUNS)]
    return {"seconds": seconds, "peak_bytes": peak, "profile": profile_step(step, vocab_size) if is_cuda else None}


def _compare(report: PartReport, plan: ModelPlan, workload: Workload, device: str) -> None:
    """Adds the comparison of a workload's ways, where the tree step and a baseline were measured."""
    name = f"{plan.shape.name} {workload.name}"
    rows = [case for case in report.cases if case["kind"] == "way" and case["case"].startswith(f"{name} ")]
    if {row["is_tree"] for row in rows} != {True, False}:
        report.skip(name, "the tree step or all baselines were not measured")
        return
    counts = count(workload, plan.shape)
    report.run(
        name,
        lambda: {
            "kind": "workload",
            "model": plan.shape.name,
            "workload": workload.name,
            "checkpointed": plan.checkpointed,
            **counts,
            **compare(rows, counts, peak_tflops(torch.cuda.get_device_name()) if device == "cuda" else None),
        },
        expected_s=0.0,
    )


def compare(rows: Sequence[Cell], counts: Mapping[str, float], peak: float | None) -> Cell:
    """The fastest tree step against the fastest baseline by medians, its share of bounds, and the loss without sharing.

    Example: tree 1.0 s, baselines 4.0 and 3.6 s and a FLOP bound of 4 are a speedup of 3.6, 90 % of the bound.
    """
    tree, baseline = (
        min((row for row in rows if row["is_tree"] == shares), key=lambda row: statistics.median(row["seconds"]))
        for shares in (True, False)
    )
    tree_s, baseline_s = (statistics.median(row["seconds"]) for row in (tree, baseline))
    speedup = baseline_s / tree_s
    rates = tree["flops"] / tree_s / 1e12, baseline["flops"] / baseline_s / 1e12
    return {
        "tree": tree["way"],
        "tree_s": tree_s,
        "baseline": baseline["way"],
        "baseline_s": baseline_s,
        "speedup": speedup,
        "share_of_flop_bound": speedup / counts["flop_bound"],
        "share_of_scored_flop_bound": speedup / counts["scored_flop_bound"],
        "loss_without_sharing": tree_s / baseline_s - 1.0 if counts["sharing"] == 0.0 else None,
        "tree_tflops": rates[0],
        "baseline_tflops": rates[1],
        "mfu": None if peak is None else rates[0] / peak,
        "baseline_mfu": None if peak is None else rates[1] / peak,
        "peak_bytes": [tree["peak_bytes"], baseline["peak_bytes"]],
    }


def _clock(device: str) -> Clock:
    return cuda_seconds if device == "cuda" else wall_seconds
