"""Drafting: tokens per second of the engine with drafts from history against the same engine without them.

A policy that has learnt something samples each prompt a second time; its memory holds the rollouts of the first. The
weights have not moved in between, which is the most that history can know of a policy. Rollouts end where they end,
finished siblings are not remembered, and what the drafter knows of its own acceptance comes from a third draw. One
engine runs all ways, with one drafter or another or none, because two engines of one kind differ by some percent
themselves. Rows with the same tokens are computed once, with drafts and without, so that a ratio tells what drafts
bring beside that; the engine without drafts where every row is computed for itself is measured as well. Drafters have
their defaults, and the engine's measured costs. Each way runs with one thread and with more, and the number that is
best for it counts: long drafts keep two threads busy that a token a row does not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Literal, NamedTuple

from benchmarks.common.timing import OnRun
from benchmarks.engine.cases import OnProgress, Policy
from benchmarks.engine.generate import generate
from benchmarks.engine.runs import Rollouts, Way, count_differing, count_tokens, run_all, wall_rounds
from benchmarks.engine.speed import thread_counts
from treering.engine.protocol import EngineStats
from treering.engine.request import Request
from treering.engine.torch_engine import TorchEngine
from treering.history.draft.drafter import Drafter
from treering.history.store.store import HistoryStore
from treering.train.loop.compute import num_threads as threads
from treering.types import TokenIds

BATCH_SIZES = (1, 4, 8, 16, 32)
CONTROL_BATCH_SIZE = 8

REMEMBERED_DRAW, MEASURED_DRAW, LEARNING_DRAW = range(3)

Control = Literal["another", "none"]
"""another: history holds another prompt's rollouts in the place of the prompt's own. none: it is empty, so that drafts
come from the running siblings and the rollout itself."""

History = Literal["own", Control]
OWN: Literal["own"] = "own"
CONTROLS: tuple[Control, ...] = ("another", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedResult:
    """The engine with drafts from one history."""

    num_threads: int
    """That it is fastest with."""
    tokens_per_s: float
    ratio: float
    """Over the engine without drafts: the median over rounds, each of which runs both."""
    ratio_to_each: float
    """Over the engine without drafts where every row is computed for itself, though others have the same tokens."""
    tokens_per_forward: float
    """That a rollout gains."""
    acceptance: float
    """Share of drafted tokens that were accepted."""
    drafted_per_forward: float
    """Drafted tokens per rollout."""
    num_differing: int
    """Rollouts whose tokens are others than without drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingResult:
    """One batch size; speeds are each side's own tokens over its median of wall time, rollouts being the same ones."""

    batch_size: int
    num_rollouts: int
    num_tokens: int
    """Of the engine without drafts; `generate` draws others, of a similar number."""
    generate_num_threads: int
    generate_tokens_per_s: float
    plain_num_threads: int
    plain_tokens_per_s: float
    plain_tokens_per_forward: float
    each_num_threads: int
    each_tokens_per_s: float
    """Without drafts, every row computed for itself."""
    each_ratio: float
    """Of the engine without drafts over that."""
    drafting: DraftedResult
    """From the prompt's own history."""
    controls: dict[Control, DraftedResult]
    """From the other histories; {} but at one batch size."""


def measure_drafting(
    policy: Policy,
    *,
    num_runs: int,
    on_progress: OnProgress,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    control_batch_size: int = CONTROL_BATCH_SIZE,
) -> list[DraftingResult]:
    """One result per batch size, one of them with controls."""
    remembered = run_all(TorchEngine(policy.model), policy.requests(draw=REMEMBERED_DRAW))
    results = []
    for size in batch_sizes:
        on_progress(f"drafting, batch {size}: warming up")
        histories = (OWN, *CONTROLS) if size == control_batch_size else (OWN,)
        stores = {history: remember(remembered, history) for history in histories}
        results.append(_measure_size(policy, size, stores, num_runs, partial(_tell, on_progress, size)))
    return results


def remember(rollouts: Rollouts, history: History) -> HistoryStore:
    """A published history of rollouts, each under its own prompt or under the one before; or an empty one."""
    store = HistoryStore()
    if history == "none":
        return store
    prompt_ids = list(dict.fromkeys(prompt_id for prompt_id, _, _ in rollouts))
    under = dict(zip(prompt_ids, prompt_ids, strict=True))
    if history == "another":
        under = dict(zip(prompt_ids, prompt_ids[-1:] + prompt_ids[:-1], strict=True))
    for (prompt_id, _, _), tokens in rollouts.items():
        store.add(under[prompt_id], [tokens], version=0)
    store.publish()
    return store


def run_plain(engine: TorchEngine, requests: Sequence[Request]) -> Rollouts:
    """All rollouts, without drafts."""
    engine.use_drafter(None)
    return run_all(engine, requests)


def run_each(engine: TorchEngine, requests: Sequence[Request]) -> Rollouts:
    """The same, every row computed for itself."""
    engine.use_duplicate_rows("each")
    rollouts = run_plain(engine, requests)
    engine.use_duplicate_rows("auto")
    return rollouts


class DraftingSide:
    """A drafter in an engine that others use too, which knows the same before every run."""

    def __init__(self, policy: Policy, store: HistoryStore, engine: TorchEngine, num_threads: int) -> None:
        """Lets the drafter learn from a draw that is not measured, and what passes take with so many threads."""
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


class Best(NamedTuple):
    """A way with the number of threads that it is fastest with."""

    num_threads: int
    seconds: list[float]  # of each round


def fastest(ways: Mapping[tuple[str, int], Way], num_runs: int, on_run: OnRun) -> dict[str, Best]:
    """Of the ways by name and number of threads, which take turns, the best number for each name, by the median."""
    rounds = wall_rounds({_name(*setting): way for setting, way in ways.items()}, num_runs, on_run)
    best: dict[str, Best] = {}
    for name, count in ways:
        seconds = rounds[_name(name, count)]
        if name not in best or median(seconds) < median(best[name].seconds):
            best[name] = Best(count, seconds)
    return best


def _measure_size(
    policy: Policy, size: int, stores: Mapping[History, HistoryStore], num_runs: int, on_run: OnRun
) -> DraftingResult:
    engine, counts = TorchEngine(policy.model, max_batch=size), thread_counts()
    sides = {
        (history, count): DraftingSide(policy, store, engine, count)
        for history, store in stores.items()
        for count in counts
    }
    requests = policy.requests(draw=MEASURED_DRAW)
    # Of each way one run before the timed ones: to be warm, and to be counted.
    before, expected, after = engine.stats, run_plain(engine, requests), engine.stats
    generated = _generate(policy, requests, size)
    counted = {setting: side.run_counted(requests) for setting, side in sides.items()}
    best = fastest(
        {
            **{
                ("generate", count): partial(_with, count, partial(_generate, policy, requests, size))
                for count in counts
            },
            **{("plain", count): partial(_with, count, partial(run_plain, engine, requests)) for count in counts},
            **{("each", count): partial(_with, count, partial(run_each, engine, requests)) for count in counts},
            **{setting: partial(side.run, requests) for setting, side in sides.items()},
        },
        num_runs,
        on_run,
    )
    plain, each = best["plain"], best["each"]
    drafted = {
        history: _drafted(*counted[history, best[history].num_threads], expected, best[history], plain, each)
        for history in stores
    }
    return DraftingResult(
        batch_size=size,
        num_rollouts=len(expected),
        num_tokens=count_tokens(expected),
        generate_num_threads=best["generate"].num_threads,
        generate_tokens_per_s=sum(tokens.size for tokens in generated) / median(best["generate"].seconds),
        plain_num_threads=plain.num_threads,
        plain_tokens_per_s=count_tokens(expected) / median(plain.seconds),
        plain_tokens_per_forward=after.since(before).tokens_per_forward,
        each_num_threads=each.num_threads,
        each_tokens_per_s=count_tokens(expected) / median(each.seconds),
        each_ratio=_ratio(each, plain),
        drafting=drafted[OWN],
        controls={history: drafted[history] for history in CONTROLS if history in drafted},
    )


def _ratio(slow: Best, fast: Best, num_tokens: float = 1.0) -> float:
    """How many times as fast the second is, in the median over rounds, with so many tokens for each of the first's."""
    return median(num_tokens * own / other for own, other in zip(slow.seconds, fast.seconds, strict=True))


def _drafted(
    rollouts: Rollouts, stats: EngineStats, expected: Rollouts, best: Best, plain: Best, each: Best
) -> DraftedResult:
    num_tokens = count_tokens(rollouts)
    more = num_tokens / count_tokens(expected)
    return DraftedResult(
        num_threads=best.num_threads,
        tokens_per_s=num_tokens / median(best.seconds),
        ratio=_ratio(plain, best, more),
        ratio_to_each=_ratio(each, best, more),
        tokens_per_forward=stats.tokens_per_forward,
        acceptance=stats.acceptance,
        drafted_per_forward=stats.num_drafted / stats.num_rows,
        num_differing=count_differing(rollouts, expected),
    )


def _generate(policy: Policy, requests: Sequence[Request], batch_size: int) -> list[TokenIds]:
    return generate(
        policy.model,
        [request.prompt for request in requests],
        batch_size=batch_size,
        max_tokens=policy.max_tokens,
        stop_tokens=policy.task.stop_tokens,
    )


def _with(num_threads: int, way: Way) -> None:
    with threads(num_threads):
        way()


def _name(name: str, num_threads: int) -> str:
    return f"{name}, {num_threads} threads"


def _tell(on_progress: OnProgress, size: int, done: int, total: int) -> None:
    on_progress(f"drafting, batch {size}: run {done} of {total}")
