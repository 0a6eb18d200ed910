"""Claim: a decode step comes near what memory allows, and drafts that are accepted pay at every batch size.

Qwen3-1.7B and 8B shapes with random weights in bfloat16. Measures passes by their tokens per row, against reading
weights, keys and values once at the rate of a copy; rollouts, plain and with recorded rollouts replayed as drafts, a
chosen share of them wrong; and transformers' compiled `generate`.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from types import MappingProxyType

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.gpu.budget import Cell, PartReport
from benchmarks.gpu.clock import Stopwatch
from benchmarks.gpu.engine.cases import EnginePlan, build, requests_of
from benchmarks.gpu.engine.drafts import ReplayDrafter
from benchmarks.gpu.engine.generate import seconds_per_token
from treering.engine.backends import BackendParts, make_backend
from treering.engine.batch.token_batch import TokenBatch
from treering.engine.decoder.decoder_weights import read_weights
from treering.engine.protocol import Request
from treering.engine.torch_engine import TorchEngine
from treering.model.tree_model import TreeModel
from treering.types import PromptId, TokenIds

GOALS = MappingProxyType({"over_floor": {"qwen3-8b": 1.5, "qwen3-1.7b": 2.5}, "most_rows": 16, "over_generate": 1.0})

COLUMNS = MappingProxyType(
    {
        "memory": ("bytes_per_s",),
        "verify": ("seconds", "over_floor"),
        "rollouts": ("plain_step_s", "over_floor", "by_acceptance"),
        "generate": ("step_s",),
    }
)
"""What is printed of a case, by its kind."""

COPY_BYTES = {"cuda": 2**30, "cpu": 2**24}
"""Copied to measure the rate of memory; many times a cache."""

NUM_RUNS = 3
"""Timed runs of the same rollouts, after one that warms up."""


def measure_engine(report: PartReport, plans: Sequence[EnginePlan], device: str, watch: Stopwatch) -> None:
    """Adds all cases of all plans to a report, passes and rollouts of each before its compiled baseline."""
    found = report.run("memory", lambda: {"kind": "memory", "bytes_per_s": copy_rate(device, watch)})
    rate = None if found is None else float(found["bytes_per_s"])
    for plan in plans:
        _measure_plan(report, plan, device, watch, rate)


def _measure_plan(report: PartReport, plan: EnginePlan, device: str, watch: Stopwatch, rate: float | None) -> None:
    models: list[PreTrainedModel] = []

    def model() -> PreTrainedModel:
        # Built by the first case that fits the budget, and kept for the others.
        if not models:
            models.append(build(plan, device))
        return models[0]

    def run(case: str, measure: Callable[[], Cell], expected_s: float | None = None) -> None:
        report.run(f"{plan.shape.name} {case}", measure, expected_s=expected_s)
        # Frees the cycles of a case before the next one needs their memory.
        gc.collect()

    for batch in plan.batches:
        run(f"verify {batch}", lambda b=batch: measure_verify(model(), plan, b, watch, rate))
        run(f"rollouts {batch}", lambda b=batch: measure_rollouts(model(), plan, b, rate))
    for batch in plan.generate_batches:
        run(f"generate {batch}", lambda b=batch: measure_generate(model(), plan, b), plan.generate_s)


def copy_rate(device: str, watch: Stopwatch) -> float:
    """Bytes per second that a copy reads and writes."""
    source = torch.zeros(COPY_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / watch.median(lambda: target.copy_(source))


def measure_verify(model: PreTrainedModel, plan: EnginePlan, batch: int, watch: Stopwatch, rate: float | None) -> Cell:
    """Seconds of a pass with its draws, by tokens per row, with `num_prompt` tokens before each row."""
    weights = read_weights(TreeModel.of(model), num_positions=plan.num_prompt + 2 * max(plan.tokens_per_row))
    backend = make_backend(weights, plan.num_slots, "auto")
    seconds = {}
    for count in plan.tokens_per_row:
        tokens = rows_of_tokens(backend, batch, plan.num_prompt, count)
        seconds[str(count)] = watch.median(lambda t=tokens: backend.decoder.run(t))
    first = seconds[str(plan.tokens_per_row[0])]
    floor = None if rate is None else plan.floor_bytes(batch, plan.num_prompt) / rate
    return {
        "kind": "verify",
        "model": plan.shape.name,
        "backend": backend.name,
        "batch": batch,
        "context": plan.num_prompt,
        "seconds": seconds,
        "relative": {count: value / first for count, value in seconds.items()},
        "floor_s": floor,
        "over_floor": None if floor is None else first / floor,
    }


def rows_of_tokens(backend: BackendParts, batch: int, context: int, tokens_per_row: int) -> TokenBatch:
    """A pass of that many tokens of each row after `context` others, as chains, in slots that are freed at once.

    Example: 2 rows of 3 tokens after 10 have positions 10, 11 and 12 and see 11, 12 and 13 slots.
    """
    starts = [backend.allocator.allocate(context + tokens_per_row) for _ in range(batch)]
    own_start = np.repeat(np.array(starts, np.int64), tokens_per_row)
    for start in starts:
        assert start is not None
        backend.allocator.free(start)
    positions = np.tile(np.arange(context, context + tokens_per_row), batch)
    nothing = np.zeros(positions.size, np.int64)
    return TokenBatch(
        tokens=nothing + 1,
        positions=positions,
        slots=own_start + positions,
        prefix_start=nothing,
        num_prefix=nothing,
        own_start=own_start,
        num_own=positions + 1,
        tree_start=nothing,
        tree_bits=nothing,
        wanted=np.arange(positions.size),
    )


def measure_rollouts(model: PreTrainedModel, plan: EnginePlan, batch: int, rate: float | None) -> Cell:
    """Rollouts of a batch: plain, then with drafts of every acceptance; a step's seconds against the memory floor."""
    requests = requests_of(plan, batch)
    num_slots, max_prefill = plan.num_slots_of(batch), plan.max_prefill(batch)
    engine = TorchEngine(model, max_batch=batch, max_tokens=num_slots, max_prefill=max_prefill)
    plain_s, step_s, recordings = timed_rollouts(engine, requests)
    drafter = ReplayDrafter(recordings, num_drafted=plan.num_drafted, vocab_size=plan.shape.vocab_size)
    engine.use_drafter(drafter)
    ways = [_drafted(engine, drafter, requests, acceptance, plain_s) for acceptance in plan.acceptances]
    floor = None if rate is None else plan.floor_bytes(batch, plan.num_prompt + plan.num_new // 2) / rate
    return {
        "kind": "rollouts",
        "model": plan.shape.name,
        "backend": engine.backend,
        "batch": batch,
        "num_new": plan.num_new,
        "num_drafted": plan.num_drafted,
        "plain_step_s": step_s,
        "plain_tokens_per_s": batch * plan.num_new / plain_s,
        "floor_s": floor,
        "over_floor": None if floor is None else step_s / floor,
        "by_acceptance": ways,
    }


def _drafted(
    engine: TorchEngine, drafter: ReplayDrafter, requests: Sequence[Request], acceptance: float, plain_s: float
) -> Cell:
    drafter.set_acceptance(acceptance)
    before = engine.stats
    seconds, step_s, _ = timed_rollouts(engine, requests)
    # Counts of all runs, the untimed first one included: they are the same.
    after = engine.stats
    return {
        "set": acceptance,
        "accepted": (after.num_accepted - before.num_accepted) / max(1, after.num_drafted - before.num_drafted),
        "tokens_per_step": (after.num_sampled - before.num_sampled) / (after.num_rows - before.num_rows),
        "speedup": plain_s / seconds,
        "step_s": step_s,
    }


def timed_rollouts(engine: TorchEngine, requests: Sequence[Request]) -> tuple[float, float, dict[PromptId, TokenIds]]:
    """Seconds of a run's decoding steps and of one step, medians of runs after one that warms up, and the rollouts.

    Prompts are not timed, because an engine without drafts computes them in the same way.
    """
    runs = [_steps_of(engine, requests) for _ in range(1 + NUM_RUNS)]
    timed = [steps for steps, _ in runs[1:]]
    total_s = statistics.median(sum(steps) for steps in timed)
    return total_s, statistics.median(step for steps in timed for step in steps), runs[-1][1]


def _steps_of(engine: TorchEngine, requests: Sequence[Request]) -> tuple[list[float], dict[PromptId, TokenIds]]:
    engine.submit(requests)
    steps: list[float] = []
    rollouts = []
    while engine.num_unfinished:
        before, start = engine.stats, time.perf_counter()
        rollouts += engine.step()
        # Tokens are on the host when a step returns, so the device has nothing left to do.
        if engine.stats.num_prefilled == before.num_prefilled:
            steps.append(time.perf_counter() - start)
    return steps, {rollout.prompt_id: rollout.tokens for rollout in rollouts}


def measure_generate(model: PreTrainedModel, plan: EnginePlan, batch: int) -> Cell:
    """Seconds of a step of compiled `generate` with a static cache."""
    return {
        "kind": "generate",
        "model": plan.shape.name,
        "batch": batch,
        "step_s": seconds_per_token(model, batch, plan.num_prompt, plan.num_generated),
    }
