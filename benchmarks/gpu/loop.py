"""Claim: the loop on a device samples and trains faster than plain sampling and flat training there.

Two cases: GRPO of the demo's policy on sums, which learns, so that its drafts come from its own history; and a step of
a large shape, whose rollouts have recorded lengths and whose drafts are right as often as set.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.gpu.budget import Cell, PartReport
from benchmarks.gpu.data import Workload
from benchmarks.gpu.engine.cases import TEMPERATURE, EnginePlan, build
from benchmarks.gpu.engine.drafts import ReplayDrafter
from benchmarks.loop.runs import LoopRun, RunSize, Start, Variant, configuration, make_start, run_loop
from treering.engine.protocol import Request, Sampling
from treering.engine.torch_engine import TorchEngine
from treering.objectives import sft
from treering.train.step import backward
from treering.tree.forest import Forest
from treering.types import PromptId, TokenIds

VARIANTS = (
    Variant(name="plain"),
    Variant(name="trees", layout="tree"),
    Variant(name="trees and drafts", layout="tree", drafts="on"),
)

GOALS: Cell = {}
COLUMNS = MappingProxyType(
    {"sums": ("speedup", "variants"), "recorded": ("speedup", "sampled_per_s", "trained_per_s", "num_differing")}
)
"""What is printed of a case, by its kind."""

ACCEPTANCE = 0.8
"""Share of drafted tokens that are right: epochs of a policy that learns have 0.7 to 0.9."""

NUM_DRAFTED = 7
MAX_ROWS = 64
"""Rollouts of a step of the large shape, about: whole groups."""


def measure_loop(report: PartReport, size: RunSize, plan: EnginePlan, recorded: Workload, device: str) -> None:
    """Adds both cases to a report."""
    report.run("sums", lambda: measure_sums(size, device))
    report.run(f"{plan.shape.name} {recorded.name}", lambda: measure_recorded(plan, recorded, device))


def measure_sums(size: RunSize, device: str, start: Start | None = None) -> Cell:
    """Every variant from one start: seconds of steps after the first epoch, tokens per second, and rewards."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = start or make_start(folder / "start", size.num_prompts, seed=0, on_progress=print)
        rows = {}
        for variant in VARIANTS:
            config = configuration(start, size, variant, seed=0, run_dir=folder / variant.name, device=device)
            rows[variant.name] = _sums_row(run_loop(config), size)
    plain = rows["plain"]["step_s"]
    return {"kind": "sums", "variants": rows, "speedup": {name: plain / row["step_s"] for name, row in rows.items()}}


def _sums_row(run: LoopRun, size: RunSize) -> Cell:
    timed = run.reports[size.steps_per_epoch :]
    updates = [report.update for report in timed if report.update is not None]
    return {
        "step_s": run.step_s(size.steps_per_epoch),
        "sampled_per_s": sum(r.engine.num_sampled for r in timed) / sum(r.phases.rollout_s for r in timed),
        "trained_per_s": sum(update.num_branch_tokens for update in updates) / sum(r.phases.train_s for r in timed),
        "tokens_per_forward": statistics.mean(report.engine.tokens_per_forward for report in timed),
        "rewards": [report.rollouts.reward_mean for report in run.reports],
    }


def measure_recorded(plan: EnginePlan, recorded: Workload, device: str) -> Cell:
    """One step of sampling, training and new weights, plain and with drafts and trees.

    Rollouts have the lengths of the recorded responses, and prompts are the recorded ones; the tokens are drawn.
    """
    model = build(plan, device)
    groups = requests_of_groups(recorded)
    requests = [request for group in groups for request in group]
    most = sum(request.prompt.size + request.sampling.max_tokens + 32 for request in requests)
    engine = TorchEngine(model, max_batch=len(requests), max_tokens=most)
    plain_s, rollouts = _sampled(engine, requests, device)
    drafter = ReplayDrafter(rollouts, num_drafted=NUM_DRAFTED, vocab_size=plan.shape.vocab_size)
    drafter.set_acceptance(ACCEPTANCE)
    engine.use_drafter(drafter)
    drafted_s, again = _sampled(engine, requests, device)
    sequences = [[np.concatenate([each.prompt, rollouts[each.prompt_id]]) for each in group] for group in groups]
    flat_s = _trained_s(model, [[branch] for group in sequences for branch in group], groups, device)
    tree_s = _trained_s(model, sequences, groups, device)
    update_s = _timed(lambda: engine.update_weights(engine.version + 1), device)
    flat_tokens = sum(branch.size for group in sequences for branch in group)
    sampled = sum(tokens.size for tokens in rollouts.values())
    return {
        "kind": "recorded",
        "model": plan.shape.name,
        "lengths_of": recorded.name,
        "num_rollouts": len(requests),
        "num_sampled": sampled,
        "flat_tokens": flat_tokens,
        "unique_tokens": sum(Forest.from_sequences(group).num_tokens for group in sequences),
        "num_differing": sum(not np.array_equal(rollouts[name], again[name]) for name in rollouts),
        "sampled_per_s": {"plain": sampled / plain_s, "drafts": sampled / drafted_s},
        "trained_per_s": {"flat": flat_tokens / flat_s, "trees": flat_tokens / tree_s},
        "update_s": update_s,
        "step_s": {"plain": plain_s + flat_s + update_s, "treering": drafted_s + tree_s + update_s},
        "speedup": (plain_s + flat_s + update_s) / (drafted_s + tree_s + update_s),
    }


def requests_of_groups(recorded: Workload) -> list[list[Request]]:
    """The first groups of a workload as requests: each branch up to its first trained token is a prompt.

    Example: a branch of 9 tokens whose last 4 are trained is a prompt of 5 and a rollout of 4.
    """
    masks = iter(recorded.masks)
    groups: list[list[Request]] = []
    num_rows = 0
    for number, group in enumerate(recorded.groups):
        starts = [max(1, int(np.argmax(mask != 0))) for mask in (next(masks) for _ in group)]
        if groups and num_rows + len(group) > MAX_ROWS:
            continue
        num_rows += len(group)
        groups.append(
            [
                Request(
                    prompt_id=f"{number}/{row}",
                    prompt=branch[:start],
                    sampling=Sampling(max_tokens=max(1, branch.size - start), temperature=TEMPERATURE),
                )
                for row, (branch, start) in enumerate(zip(group, starts, strict=True))
            ]
        )
    return groups


def _sampled(engine: TorchEngine, requests: list[Request], device: str) -> tuple[float, dict[PromptId, TokenIds]]:
    """Seconds and tokens of all rollouts, after a run that warms up."""
    found: dict[PromptId, TokenIds] = {}

    def run() -> None:
        found.update({rollout.prompt_id: rollout.tokens for rollout in engine.generate(requests)})

    run()
    return _timed(run, device), found


def _trained_s(model: PreTrainedModel, trees: list[list[TokenIds]], groups: list[list[Request]], device: str) -> float:
    """Seconds of a gradient of the sampled tokens, after a run that warms up."""
    starts = [request.prompt.size for group in groups for request in group]
    sizes = [branch.size for tree in trees for branch in tree]
    masks = [np.arange(size) >= start for size, start in zip(sizes, starts, strict=True)]
    model.train()

    def run() -> None:
        model.zero_grad()
        backward(model, [Forest.from_sequences(tree) for tree in trees], sft(masks), "auto")

    run()
    seconds = _timed(run, device)
    model.zero_grad()
    model.eval()
    return seconds


def _timed(run: Callable[[], object], device: str) -> float:
    """Wall time until the device has nothing left to do."""
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
