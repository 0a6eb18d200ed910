"""Claim: where drafts cannot help, a drafter in the engine costs less than 3 %; measured in pairs, on one engine.

Two cases: no history (a first epoch), and rollouts that are new each time (temperature 2.5: earlier text does not
recur) with the prompt's own history. Each pair is a run with the drafter and one without, next to each other and in
alternating order (with, without, without, with, ...), so that other load on the machine affects both alike; it counts
CPU time. The drafter has its defaults, the state learnt from another draw, and the engine's measured costs.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, Literal

from benchmarks.common.progress import OnProgress
from benchmarks.common.timing import check_runs, process_seconds
from benchmarks.engine.cases import Policy
from benchmarks.engine.drafting import LEARNING_DRAW, MEASURED_DRAW, REMEMBERED_DRAW, remember
from benchmarks.engine.runs import Rollouts, count_differing, run_all
from treering.engine.protocol import Request
from treering.engine.torch_engine import TorchEngine
from treering.history.draft.drafter import Drafter

Case = Literal["none", "creative"]
CASES: tuple[Case, ...] = ("none", "creative")
NUM_PAIRS = 15
BATCH_SIZE = 8
CREATIVE_TEMPERATURE = 2.5


def measure_controls(
    policy: Policy,
    *,
    on_progress: OnProgress,
    num_pairs: int = NUM_PAIRS,
    batch_size: int = BATCH_SIZE,
    cases: Sequence[Case] = CASES,
) -> dict[Case, dict[str, Any]]:
    """By case, how many times as fast the engine is with a drafter, pair by pair: median, lowest and highest.

    Raises:
        InputError: fewer than one pair.
    """
    check_runs(num_pairs)
    engine = TorchEngine(policy.model, max_batch=batch_size)
    results = {}
    for case in cases:
        on_progress(f"drafting where it may not help: {case}, {num_pairs} pairs")
        results[case] = _measure(engine, policy, case, num_pairs)
    return results


def paired_ratios(drafted: Callable[[], None], plain: Callable[[], None], num_pairs: int) -> list[float]:
    """Seconds of `plain` over those of `drafted`, in neighbouring runs that change their order."""
    ratios = []
    for number in range(num_pairs):
        steps = (drafted, plain) if number % 2 == 0 else (plain, drafted)
        seconds = {step: process_seconds(step) for step in steps}
        ratios.append(seconds[plain] / seconds[drafted])
    return ratios


def _measure(engine: TorchEngine, policy: Policy, case: Case, num_pairs: int) -> dict[str, Any]:
    requests = {draw: _requests(policy, case, draw) for draw in (REMEMBERED_DRAW, MEASURED_DRAW, LEARNING_DRAW)}
    engine.use_drafter(None)
    remembered = run_all(engine, requests[REMEMBERED_DRAW])
    drafter = Drafter(remember({} if case == "none" else remembered))
    engine.use_drafter(drafter)
    run_all(engine, requests[LEARNING_DRAW])
    learnt = drafter.state()

    def run_drafted() -> Rollouts:
        drafter.load_state(learnt)
        engine.use_drafter(drafter)
        return run_all(engine, requests[MEASURED_DRAW])

    def run_plain() -> Rollouts:
        engine.use_drafter(None)
        return run_all(engine, requests[MEASURED_DRAW])

    expected, before = run_plain(), engine.stats
    rollouts = run_drafted()
    stats = engine.stats.since(before)
    ratios = paired_ratios(partial(_discard, run_drafted), partial(_discard, run_plain), num_pairs)
    return {
        "ratio": median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "num_pairs": num_pairs,
        "num_rollouts": len(expected),
        "tokens_per_forward": stats.tokens_per_forward,
        "acceptance": stats.acceptance,
        "drafted_per_forward": stats.num_drafted / stats.num_rows,
        "num_differing": count_differing(rollouts, expected),
    }


def _requests(policy: Policy, case: Case, draw: int) -> list[Request]:
    requests = policy.requests(draw=draw)
    if case != "creative":
        return requests
    return [
        replace(request, sampling=request.sampling.changed(temperature=CREATIVE_TEMPERATURE)) for request in requests
    ]


def _discard(run: Callable[[], Rollouts]) -> None:
    run()
