"""Drafting: tokens per second of the engine with drafts from history against the same engine without them.

A policy that has learnt something samples each prompt a second time; its history holds the rollouts of the first. The
weights have not moved in between, which is the most that history can know of a policy. Finished siblings are not
remembered, and the drafter's acceptance estimates come from a third draw. One engine runs all ways, because two engines
of one kind differ by some percent themselves. Rows with the same tokens are computed once, with drafts and without, so
a ratio shows the gain from drafts alone; the engine that computes every row for itself is measured as well. Drafters
have their defaults, and the engine's measured costs. Each way counts at its best number of threads: long drafts use two
threads, a single token per row does not.
"""

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

from benchmarks.common.progress import OnProgress
from benchmarks.common.timing import OnRun
from benchmarks.engine.cases import Policy
from benchmarks.engine.generate import generate
from benchmarks.engine.runs import Best, Rollouts, count_differing, count_tokens, fastest, run_all, thread_counts
from treering.engine.protocol import EngineStats, Request
from treering.engine.torch_engine import TorchEngine
from treering.history.draft.drafter import Drafter
from treering.history.store.store import HistoryStore
from treering.train.loop.compute import num_threads as threads
from treering.types import TokenIds

BATCH_SIZES = (1, 4, 8, 16, 32)

REMEMBERED_DRAW, MEASURED_DRAW, LEARNING_DRAW = range(3)


def measure_drafting(
    policy: Policy, *, num_runs: int, on_progress: OnProgress, batch_sizes: Sequence[int] = BATCH_SIZES
) -> list[dict[str, Any]]:
    """One result per batch size, each way with the number of threads that it is fastest with.

    Speeds are each side's own tokens over its median of wall time: of `generate`, of the engine without drafts
    (`plain`), the same where every row is computed for itself though others have the same tokens (`each`), and with
    drafts. Ratios are medians over rounds, each of which runs all. `num_differing` are rollouts whose tokens
    differ with drafts.
    """
    remembered = run_all(TorchEngine(policy.model), policy.requests(draw=REMEMBERED_DRAW))
    results = []
    for size in batch_sizes:
        on_progress(f"drafting, batch {size}: warming up")
        store = remember(remembered)
        results.append(_measure_size(policy, size, store, num_runs, partial(_tell, on_progress, size)))
    return results


def remember(rollouts: Rollouts) -> HistoryStore:
    """A published history of rollouts, each under its prompt."""
    store = HistoryStore()
    for (prompt_id, _, _), tokens in rollouts.items():
        store.add(prompt_id, [tokens], version=0)
    store.publish()
    return store


class DraftingSide:
    """A drafter in an engine that others use too; it knows the same before every run."""

    def __init__(self, policy: Policy, store: HistoryStore, engine: TorchEngine, num_threads: int) -> None:
        """Lets the drafter learn from a draw that is not measured, with costs measured on `num_threads` threads."""
        self._drafter, self._engine, self._num_threads = Drafter(store), engine, num_threads
        engine.use_drafter(self._drafter)
        with threads(num_threads):
            run_all(engine, policy.requests(draw=LEARNING_DRAW))
        self._learnt = self._drafter.state()

    def run(self, requests: Sequence[Request]) -> Rollouts:
        """All rollouts."""
        self._drafter.load_state(self._learnt)
        self._engine.use_drafter(self._drafter)
        with threads(self._num_threads):
            return run_all(self._engine, requests)

    def run_counted(self, requests: Sequence[Request]) -> tuple[Rollouts, EngineStats]:
        """All rollouts, and what the engine counted meanwhile."""
        before = self._engine.stats
        rollouts = self.run(requests)
        return rollouts, self._engine.stats.since(before)


def _run_plain(engine: TorchEngine, requests: Sequence[Request]) -> Rollouts:
    """All rollouts, without drafts."""
    engine.use_drafter(None)
    return run_all(engine, requests)


def _run_each(engine: TorchEngine, requests: Sequence[Request]) -> Rollouts:
    """The same, every row computed for itself."""
    engine.shares_rows = False
    rollouts = _run_plain(engine, requests)
    engine.shares_rows = True
    return rollouts


def _measure_size(policy: Policy, size: int, store: HistoryStore, num_runs: int, on_run: OnRun) -> dict[str, Any]:
    engine, counts = TorchEngine(policy.model, max_batch=size), thread_counts()
    sides = {count: DraftingSide(policy, store, engine, count) for count in counts}
    requests = policy.requests(draw=MEASURED_DRAW)
    # One run of each way before the timed ones: to be warm, and to be counted.
    before, expected, after = engine.stats, _run_plain(engine, requests), engine.stats
    generated = _generate(policy, requests, size)
    counted = {count: side.run_counted(requests) for count, side in sides.items()}
    ways = {
        "generate": partial(_generate, policy, requests, size),
        "plain": partial(_run_plain, engine, requests),
        "each": partial(_run_each, engine, requests),
    }
    best = fastest(
        {(name, count): way for name, way in ways.items() for count in counts}
        | {("drafting", count): partial(side.run, requests) for count, side in sides.items()},
        num_runs,
        on_run,
    )
    plain, each, drafting = best["plain"], best["each"], best["drafting"]
    num_tokens = count_tokens(expected)
    rollouts, stats = counted[drafting.num_threads]
    more = count_tokens(rollouts) / num_tokens
    return {
        "batch_size": size,
        "num_rollouts": len(expected),
        "num_tokens": num_tokens,
        "generate_num_threads": best["generate"].num_threads,
        "generate_tokens_per_s": sum(tokens.size for tokens in generated) / best["generate"].median_s,
        "plain_num_threads": plain.num_threads,
        "plain_tokens_per_s": num_tokens / plain.median_s,
        "plain_tokens_per_forward": after.since(before).tokens_per_forward,
        "each_num_threads": each.num_threads,
        "each_tokens_per_s": num_tokens / each.median_s,
        "each_ratio": _ratio(each, plain),
        "drafting": {
            "num_threads": drafting.num_threads,
            "tokens_per_s": count_tokens(rollouts) / drafting.median_s,
            "ratio": _ratio(plain, drafting, more),
            "ratio_to_each": _ratio(each, drafting, more),
            "tokens_per_forward": stats.tokens_per_forward,
            "acceptance": stats.acceptance,
            "drafted_per_forward": stats.num_drafted / stats.num_rows,
            "num_differing": count_differing(rollouts, expected),
        },
    }


def _ratio(slow: Best, fast: Best, num_tokens: float = 1.0) -> float:
    """How many times as fast the second is, the median over rounds, with that many tokens for each of the first's."""
    return median(num_tokens * own / other for own, other in zip(slow.seconds, fast.seconds, strict=True))


def _generate(policy: Policy, requests: Sequence[Request], batch_size: int) -> list[TokenIds]:
    return generate(
        policy.model,
        [request.prompt for request in requests],
        batch_size=batch_size,
        max_tokens=policy.max_tokens,
        stop_tokens=policy.task.stop_tokens,
    )


def _tell(on_progress: OnProgress, size: int, done: int, total: int) -> None:
    on_progress(f"drafting, batch {size}: run {done} of {total}")
