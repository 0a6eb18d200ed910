"""Drafting: tokens per second of the engine with drafts from history against the same engine without them.

A policy that has learnt something samples each prompt a second time; its memory holds the rollouts of the first. The
weights have not moved in between, which is the most that history can know of a policy. Rollouts end where they end,
finished siblings are not remembered, and what the drafter knows of its own acceptance comes from a third draw. One
engine runs all ways, with one drafter or another or none, because two engines of one kind differ by some percent
themselves. Drafters have their defaults, and the engine's measured costs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Literal

from benchmarks.engine_cases import OnProgress, Policy
from benchmarks.engine_generate import generate
from benchmarks.engine_runs import Rollouts, Way, count_differing, count_tokens, run_all, wall_rounds
from benchmarks.timing import OnRun
from treering.engine.protocol import EngineStats
from treering.engine.request import Request
from treering.engine.torch_engine import TorchEngine
from treering.history.draft import Drafter
from treering.history.store import HistoryStore
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

    tokens_per_s: float
    ratio: float
    """Over the engine without drafts: the median over rounds, each of which runs both."""
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
    generate_tokens_per_s: float
    plain_tokens_per_s: float
    plain_tokens_per_forward: float
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
        engine = TorchEngine(policy.model, max_batch=size)
        sides = {history: DraftingSide(policy, remember(remembered, history), engine) for history in histories}
        results.append(_measure_size(policy, engine, size, sides, num_runs, partial(_tell, on_progress, size)))
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


class DraftingSide:
    """A drafter in an engine that others use too, which knows the same before every run."""

    def __init__(self, policy: Policy, store: HistoryStore, engine: TorchEngine) -> None:
        """Lets the drafter learn from a draw that is not measured."""
        self._drafter, self._engine = Drafter(store), engine
        engine.use_drafter(self._drafter)
        run_all(engine, policy.requests(draw=LEARNING_DRAW))
        self._learnt = self._drafter.state()

    def run(self, requests: Sequence[Request]) -> Rollouts:
        """All rollouts."""
        self._drafter.load_state(self._learnt)
        self._engine.use_drafter(self._drafter)
        return run_all(self._engine, requests)

    def run_counted(self, requests: Sequence[Request]) -> tuple[Rollouts, EngineStats]:
        """All rollouts, and what the engine counted meanwhile."""
        before = self._engine.stats
        rollouts = self.run(requests)
        return rollouts, self._engine.stats.since(before)


def _measure_size(
    policy: Policy,
    engine: TorchEngine,
    size: int,
    sides: Mapping[History, DraftingSide],
    num_runs: int,
    on_run: OnRun,
) -> DraftingResult:
    requests = policy.requests(draw=MEASURED_DRAW)
    ways: dict[str, Way] = {
        "generate": partial(_generate, policy, requests, size),
        "plain": partial(run_plain, engine, requests),
        **{history: partial(side.run, requests) for history, side in sides.items()},
    }
    # Of each way one run before the timed ones: to be warm, and to be counted.
    before, expected, counts = engine.stats, run_plain(engine, requests), engine.stats
    generated = _generate(policy, requests, size)
    counted = {history: side.run_counted(requests) for history, side in sides.items()}
    seconds = wall_rounds(ways, num_runs, on_run)
    drafted = {
        history: _drafted(rollouts, stats, expected, seconds[history], seconds["plain"])
        for history, (rollouts, stats) in counted.items()
    }
    return DraftingResult(
        batch_size=size,
        num_rollouts=len(expected),
        num_tokens=count_tokens(expected),
        generate_tokens_per_s=sum(tokens.size for tokens in generated) / median(seconds["generate"]),
        plain_tokens_per_s=count_tokens(expected) / median(seconds["plain"]),
        plain_tokens_per_forward=counts.since(before).tokens_per_forward,
        drafting=drafted[OWN],
        controls={history: drafted[history] for history in CONTROLS if history in drafted},
    )


def _drafted(
    rollouts: Rollouts, stats: EngineStats, expected: Rollouts, seconds: list[float], plain_seconds: list[float]
) -> DraftedResult:
    num_tokens, num_expected = count_tokens(rollouts), count_tokens(expected)
    pairs = zip(seconds, plain_seconds, strict=True)
    return DraftedResult(
        tokens_per_s=num_tokens / median(seconds),
        ratio=median(num_tokens / own / (num_expected / plain) for own, plain in pairs),
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


def _tell(on_progress: OnProgress, size: int, done: int, total: int) -> None:
    on_progress(f"drafting, batch {size}: run {done} of {total}")
