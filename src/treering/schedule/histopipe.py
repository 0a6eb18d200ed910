"""HistoPipe: a search for the placement with the least simulated makespan, and policies by name."""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treering.errors import ConfigError
from treering.schedule.calibration import PRIOR_SIGMA, CalibratedLengths
from treering.schedule.cluster import Cluster, Shape, is_among, shape_of
from treering.schedule.placement import Fifo, Placement, PlacementPolicy, assign_workers
from treering.schedule.policy import Assignment, AssignmentRequest, Forecast, SchedulePolicy
from treering.schedule.simulator import bound_s, simulate, with_training
from treering.schedule.traces import Trace, TraceStep
from treering.schedule.turns import even_turns

_MAX_WORKERS = 32
_MIN_WORKERS = 8
_MAX_ROLLOUTS = 4096
"""Larger clusters and steps are simulated by a sample: fewer workers, with their share of the rollouts."""

_STEPS_PER_TURN = 4
"""Simulated steps for each step that runs at the same time; with fewer, start and end count too much."""

_NUM_DRAWS = 5
"""Sampled traces: the first selects candidates, the others evaluate the best of them, whose results on the first are
biased by the selection."""

_NUM_FINALISTS = 5

_USUAL_TRAINING = 0.07
"""Assumed update time if none is known, as a share of a step's work, about as in RhymeRL (section 3). If updates took
no time, running steps at the same time would seem free."""

_CLEARLY = 1.005
"""The present placement stays if its makespan is at most this many times the best one, or shorter on any sampled
trace, because a change costs a step and predictions are uncertain."""

_CLOSE = 0.98
"""Lower bound over makespan at which the search stops."""

_SHARES = (0.05, 0.1, 0.2, 0.3, 0.45)
"""Shares of long rollouts to try first."""

_WORKER_SHARES = (0.3, 0.45, 0.55, 0.65, 0.8)
"""Shares of workers for long rollouts to try first."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SearchProblem:
    """A small enough cluster, and traces with sampled lengths, to simulate candidates on."""

    cluster: Cluster
    traces: tuple[Trace, ...]


def search_problem(request: AssignmentRequest, calibrated: CalibratedLengths, *, seed: int) -> SearchProblem:
    """Make the search problem of a request: its forecasts, corrected, repeated to enough steps, with sampled errors.

    An update time of 0 counts as unknown.
    """
    cluster = request.cluster
    enough = max(round(cluster.num_workers * _MAX_ROLLOUTS / request.forecasts[0].num_rollouts), _MIN_WORKERS)
    num_workers = min(cluster.num_workers, enough, _MAX_WORKERS)
    small = replace(cluster, num_workers=num_workers)
    num_steps = _STEPS_PER_TURN * (cluster.staleness + 1)
    ahead = [request.forecasts[i % len(request.forecasts)] for i in range(num_steps)]
    sampled = [_sampled(forecast, num_workers / cluster.num_workers) for forecast in ahead]
    random = np.random.default_rng(seed)
    traces = [_drawn(sampled, calibrated, cluster.max_tokens, random) for _ in range(_NUM_DRAWS)]
    if small.latency.training_s == 0:
        small = with_training(small, traces[0], _USUAL_TRAINING)
    return SearchProblem(cluster=small, traces=tuple(traces))


def search(problem: SearchProblem, present: Placement | None = None) -> Placement:
    """Return the placement with the least simulated makespan; the present one, unless another is clearly better.

    The search simulates the plain placements on the first trace. Unless one comes close to the lower bound, it adds
    a coarse grid of long-rollout workers and the neighbours of the grid's best. Then it simulates the best few on the
    other traces. Earlier candidates win ties.
    """
    candidates = _Candidates(problem)
    candidates.add([] if present is None else [present])
    candidates.add(plain_placements(problem.cluster))
    if candidates.of_bound() < _CLOSE:
        candidates.add(_grid(problem.cluster))
        for width in (2, 1):
            candidates.add(_around(candidates.best_with_long_workers(), problem.cluster, width))
    return candidates.winner(present)


def plain_placements(cluster: Cluster) -> list[Placement]:
    """Return the placements without long-rollout workers, simplest first."""
    turns = range(1, min(cluster.staleness + 1, cluster.num_workers) + 1)
    found = [Placement(name=_name("longest first", turn), num_turns=turn, stealing="queued") for turn in turns]
    if cluster.staleness == 0:
        return found
    groups = Placement(name="equal groups", placing="equal_counts")
    found.append(groups)
    if cluster.rebalancing == "running":
        found.append(replace(found[0], name="longest first, tails gathered", moving="consolidate"))
        found.append(replace(groups, name="equal groups, moves", moving="drain"))
    return found


class _Candidates:
    def __init__(self, problem: SearchProblem) -> None:
        self._problem = problem
        self._first: dict[Placement, float] = {}

    def add(self, placements: Iterable[Placement]) -> None:
        for placement in placements:
            if placement not in self._first:
                self._first[placement] = self._makespan(placement, self._problem.traces[0])

    def of_bound(self) -> float:
        """Return the lower bound over the least makespan so far, on the first trace."""
        return bound_s(self._problem.traces[0], self._problem.cluster) / min(self._first.values())

    def best_with_long_workers(self) -> Placement | None:
        found = [placement for placement in self._first if placement.num_long_workers]
        return min(found, key=self._first.__getitem__, default=None)

    def winner(self, present: Placement | None) -> Placement:
        finalists = sorted(self._first, key=self._first.__getitem__)[:_NUM_FINALISTS]
        finalists += [present] if present is not None and present not in finalists else []
        others = self._problem.traces[1:]
        makespans = {placement: [self._makespan(placement, trace) for trace in others] for placement in finalists}
        best = min(makespans, key=lambda placement: sum(makespans[placement]))
        if present is None or _is_clearly_less(makespans[best], makespans[present]):
            return best
        return present

    def _makespan(self, placement: Placement, trace: Trace) -> float:
        return simulate(PlacementPolicy(placement), trace, workers=self._problem.cluster).makespan_s


def _is_clearly_less(some: Sequence[float], others: Sequence[float]) -> bool:
    return all(one < other for one, other in zip(some, others, strict=True)) and _CLEARLY * sum(some) < sum(others)


def _name(base: str, num_turns: int) -> str:
    return base if num_turns == 1 else f"{base}, {num_turns} turns"


def _grid(cluster: Cluster) -> list[Placement]:
    turns = min(cluster.staleness + 1, cluster.num_workers)
    return [
        placement
        for share in _SHARES
        for worker_share in _WORKER_SHARES
        for placement in _with_long_workers(cluster, turns, share, round(worker_share * (cluster.num_workers // turns)))
    ]


def _with_long_workers(cluster: Cluster, num_turns: int, share: float, num_long: int) -> list[Placement]:
    """Return the placement, or none if the long or the other rollouts would have no worker."""
    num_workers = cluster.num_workers // num_turns
    if not (1 <= num_long < num_workers and 0 < share < 1):
        return []
    name = _name(f"{num_long / num_workers:.0%} of workers for the longest {share:.0%}", num_turns)
    return [Placement(name=name, num_turns=num_turns, long_share=share, num_long_workers=num_long)]


def _around(best: Placement | None, cluster: Cluster, width: int) -> list[Placement]:
    if best is None:
        return []
    shares = [round(best.long_share * (1 + 0.15 * change), 4) for change in (-width, 0, width)]
    counts = [best.num_long_workers + change for change in (-width, 0, width)]
    around = [_with_long_workers(cluster, best.num_turns, share, count) for share in shares for count in counts]
    variants = []
    if best.stealing == "off":
        variants.append(replace(best, name=f"{best.name}, stealing", stealing="queued"))
    if best.moving == "off" and cluster.rebalancing == "running":
        variants.append(replace(best, name=f"{best.name}, moves", moving="drain"))
    return [*chain.from_iterable(around), *variants]


def rescaled(placement: Placement, num_workers: int, num_simulated: int) -> Placement:
    """Return the placement for a cluster of another size, with the same share of long-rollout workers."""
    if num_workers == num_simulated or not placement.num_long_workers:
        return placement
    now, before = num_workers // placement.num_turns, num_simulated // placement.num_turns
    return replace(placement, num_long_workers=min(max(round(placement.num_long_workers * now / before), 1), now - 1))


def _sampled(forecast: Forecast, share: float) -> Forecast:
    """Return a share of the predictions, evenly spaced in rank; if it is 1, all of them in their order."""
    if share == 1:
        return forecast
    num = max(round(share * forecast.num_rollouts), 1)
    ranks = ((np.arange(num) + 0.5) * forecast.num_rollouts / num).astype(np.int64)
    chosen = np.argsort(forecast.lengths, kind="stable")[ranks]
    return Forecast(
        lengths=forecast.lengths[chosen],
        prompts=forecast.prompts[chosen],
        num_turns=None if forecast.num_turns is None else forecast.num_turns[chosen],
        wait_s=None if forecast.wait_s is None else forecast.wait_s[chosen],
    )


def _drawn(
    ahead: Sequence[Forecast], calibrated: CalibratedLengths, max_tokens: int, random: np.random.Generator
) -> Trace:
    steps = []
    for predicted in ahead:
        likeliest = calibrated.lengths(predicted.lengths, max_tokens)
        lengths = np.rint(calibrated.draw(predicted.lengths, max_tokens, random)).astype(np.int64)
        forecast = replace(predicted, lengths=likeliest, prompts=np.arange(likeliest.size))
        turns = None
        if predicted.num_turns is not None and predicted.wait_s is not None:
            turns = even_turns(lengths, predicted.num_turns, predicted.wait_s)
        steps.append(TraceStep(lengths=lengths, forecast=forecast, turns=turns))
    return Trace(steps=tuple(steps), max_tokens=max_tokens)


class HistoPipe(SchedulePolicy):
    """Searches a family of placements for the least simulated makespan of the next steps.

    The paper's alternating equal groups (RhymeRL, arXiv 2508.18588, section 6.2) are one of them. Others are longest
    first, turns of disjoint workers, and workers that run only the longest rollouts. The best placement depends on
    whether total work or the longest rollout dominates. Predictions are corrected by the errors of earlier ones.

    Example:
        >>> policy = HistoPipe()
        >>> assignment = policy.assign(request)                                                     # doctest: +SKIP
        >>> policy.choices                                                                          # doctest: +SKIP
        ('longest first, 2 turns',)
    """

    def __init__(self, *, sigma: float = PRIOR_SIGMA, search_every: int = 4, seed: int = 0) -> None:
        """Make a policy for one run.

        Args:
            sigma: spread of log(length / prediction) until the first step has ended.
            search_every: steps until the next search, doubled after each search that keeps the placement. A search also
                runs at the first step after a finished one, and when the latency is outside the range that the present
                placement was found for.
            seed: seed of the sampled lengths.

        Raises:
            ConfigError: `sigma` is below 0, or `search_every` below 1.
        """
        if not sigma >= 0 or search_every < 1:
            raise ConfigError(
                f"sigma must be at least 0 and search_every at least 1, got sigma={sigma} and "
                f"search_every={search_every}; correct them"
            )
        self._calibrated = CalibratedLengths(sigma)
        self._search_every = self._interval = search_every
        self._seed = seed
        self._placement: Placement | None = None
        self._found: Placement | None = None
        self._num_workers = 0
        self._searched_at = 0
        self._has_learnt = False
        self._shapes: list[Shape] = []
        """Shapes of the latencies that the present placement was found for."""
        self._choices: list[str] = []

    @property
    def name(self) -> str:
        """Name in configurations."""
        return "histopipe"

    @property
    def choices(self) -> tuple[str, ...]:
        """The placement used for each step so far."""
        return tuple(self._choices)

    def learn(self, step: int, predicted: NDArray[np.float64], lengths: NDArray[np.int64]) -> None:
        """Update the correction of predictions by a finished step."""
        self._calibrated.learn(predicted, lengths)

    def assign(self, request: AssignmentRequest) -> Assignment:
        """Place the step by the present placement, after a search for a better one if a search is due."""
        placement = self._current(request)
        self._choices.append(placement.name)
        forecast, cluster = request.forecasts[0], request.cluster
        lengths = self._calibrated.lengths(forecast.lengths, cluster.max_tokens)
        return assign_workers(
            placement, lengths, forecast.prompts, step=request.step, cluster=cluster, wait_s=forecast.wait_s
        )

    def _current(self, request: AssignmentRequest) -> Placement:
        is_due = request.step >= self._searched_at + self._interval
        is_first_learnt = self._calibrated.has_learnt and not self._has_learnt
        shape = shape_of(request.cluster.latency, request.cluster.num_slots)
        is_other = not is_among(shape, self._shapes)
        if self._placement is None or is_due or is_first_learnt or is_other:
            problem = search_problem(request, self._calibrated, seed=self._seed)
            num_workers = problem.cluster.num_workers
            # A placement found for a sample of another size does not apply to this sample.
            before = self._found if num_workers == self._num_workers else None
            self._found = search(problem, before)
            is_same = self._found == before
            if not is_same:
                self._interval = self._search_every
            elif is_due:
                self._interval *= 2
            self._num_workers = num_workers
            self._placement = rescaled(self._found, request.cluster.num_workers, num_workers)
            self._searched_at = request.step
            self._shapes = [*self._shapes, shape] if is_same else [shape]
            self._has_learnt = self._calibrated.has_learnt
        return self._placement

    def state(self) -> dict[str, Any]:
        """Return the present placement, and the step of the latest search."""
        placements = {"plan": self._placement, "found": self._found}
        known = {name: asdict(placement) for name, placement in placements.items() if placement is not None}
        numbers = {
            "planned_for": self._searched_at,
            "interval": self._interval,
            "num_workers": self._num_workers,
            "shapes": [list(shape) for shape in self._shapes],
        }
        return {**known, **numbers, "has_learnt": self._has_learnt}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the placement from a `state`."""
        self._placement, self._found = (
            Placement(**state[name]) if name in state else None for name in ("plan", "found")
        )
        self._searched_at, self._interval = state["planned_for"], state["interval"]
        self._num_workers, self._has_learnt = state["num_workers"], state["has_learnt"]
        self._shapes = [(shape[0], shape[1]) for shape in state.get("shapes", [])]


POLICIES: Mapping[str, Callable[[], SchedulePolicy]] = MappingProxyType(
    {
        "fifo": Fifo,
        "longest_first": lambda: PlacementPolicy(Placement(name="longest_first")),
        "histopipe": HistoPipe,
    }
)
"""Policy factories. All of them move work, not results."""


def make_policy(name: str) -> SchedulePolicy:
    """Make the policy of that name.

    Raises:
        ConfigError: the name is unknown.

    Example: `make_policy("histopipe").name` is "histopipe".
    """
    if name not in POLICIES:
        near = difflib.get_close_matches(name, POLICIES, n=1) or ["histopipe"]
        raise ConfigError(f"a schedule must be one of {', '.join(POLICIES)}, got {name!r}; did you mean {near[0]!r}?")
    return POLICIES[name]()
