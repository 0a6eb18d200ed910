"""Simulate synchronous runs in which idle rows rehearse the next step: sample it early, with its own noise.

When the weights of a step arrive, its rehearsed tokens are verified as a prefill, and decoding goes on from the first
that changed. A worker rehearses only when it has nothing else to start, so no rollout waits for a rehearsal.

    W workers   R rollouts of a step   N rollouts of the next one   K steps
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from treering.arrays import Float64Array, Int64Array
from treering.errors import ConfigError, InputError
from treering.schedule.calibration import CalibratedLengths
from treering.schedule.cluster import Cluster, without_moves
from treering.schedule.histopipe import plain_placements, rescaled, search, search_problem
from treering.schedule.placement import Placement, assign_workers, longest_first
from treering.schedule.policy import AssignmentRequest
from treering.schedule.rehearsed_step import DoneStep, RehearsalCosts, early_rollouts, run_with_rehearsals
from treering.schedule.simulated_step import StepRollouts
from treering.schedule.simulator import NUM_FORECASTS, Timeline, longest_s, queued_rollouts, work_s
from treering.schedule.traces import Trace, TraceStep

CHUNK = 512
"""Rehearsed tokens of a rollout that a pass verifies; those after a change in the same pass are wasted."""

_NUM_DRAWS = 2
"""Number of sampled traces on which each candidate is simulated."""

_ROW_SHARES = (0.02, 0.06, 0.25, 1.0)
"""Shares of a worker's slots to try as the limit of rows that rehearse while it decodes the present step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalPlacement:
    """How every step is placed, and how many rows rehearse the next one.

    Example: `RehearsalPlacement(placement=placement, num_rows=8)`: at most 8 rows of a worker rehearse while it decodes
    rollouts of the present step, and all of its rows afterwards.
    """

    placement: Placement
    """Placement of a step's rollouts by their expected remaining tokens."""
    num_rows: int | None = None
    """Most rows that rehearse on a worker that decodes the present step. 0: only idle workers rehearse; None: none."""

    @property
    def name(self) -> str:
        """Name in reports."""
        rows = "nothing rehearsed" if self.num_rows is None else f"{self.num_rows} rows rehearse"
        return f"{self.placement.name}, {rows}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RehearsedTimeline(Timeline):
    """Timeline of a run with rehearsals; a span ends with a worker's last rollout or rehearsal.

    Example: a step of 1,000 tokens of which 700 were rehearsed and 600 kept decodes 400.
    """

    num_rehearsed: Int64Array
    """int64 [K]: tokens of each step that were sampled early."""
    num_verified: Int64Array
    """int64 [K]: rehearsed tokens that were verified, in chunks of `CHUNK`, up to the first change of each rollout."""
    num_kept: Int64Array
    """int64 [K]: rehearsed tokens before the first change."""
    num_decoded: Float64Array
    """float64 [K]: tokens decoded by the weights of the step."""


def draw_changes(trace: Trace, change: float, *, seed: int) -> list[Int64Array]:
    """Draw the number of tokens before the first change for each rollout: an int64 [R] for each step.

    Raises:
        ConfigError: the chance is not between 0 and 1.

    Example: a chance of 0.001 keeps 632 of 1,000 tokens on average; 0 keeps all and 1 none.
    """
    if not 0 <= change <= 1:
        raise ConfigError(f"the chance that a token changes must be between 0 and 1, got {change!r}; correct it")
    random = np.random.default_rng(seed)
    if change == 0:
        return [step.lengths for step in trace.steps]
    return [np.minimum(random.geometric(change, step.num_rollouts) - 1, step.lengths) for step in trace.steps]


def expected_kept(change: float, num_tokens: Int64Array) -> Float64Array:
    """Return the expected number of tokens before the first change among `num_tokens` rehearsed ones, float64 [N]."""
    if change == 0:
        return num_tokens.astype(np.float64)
    return np.asarray((1.0 - change) * (1.0 - (1.0 - change) ** num_tokens) / change, np.float64)


def rehearsed_bound_s(trace: Trace, cluster: Cluster, changes: Sequence[Int64Array]) -> float:
    """Return a lower bound on the seconds of any synchronous run with rehearsals, for these first changes.

    The bound is the larger of two. The first decodes every token once, early or not, at the best batch size, and adds
    the last update. The second sums load, longest rollout and update over the steps: a rollout is decoded again from
    its first change, and rehearsed only as far as the step before had time for.

    Example: steps of one rollout of 100 tokens at 1 s take 100 + 0 + 100 + ... s without changes, and 100 s each if the
    first token always changes; updates are free.
    """
    latency = cluster.latency
    token_s = float(latency.token_s(cluster.num_slots)[1:].min())
    saved_s = max(0.0, token_s - latency.prefill_s)
    work = sum(work_s(step, cluster) for step in trace.steps) + latency.training_s
    total = before = 0.0
    for number, (step, unchanged) in enumerate(zip(trace.steps, changes, strict=True)):
        # A longer step shortens the next one by no more than itself, so the shortest steps give the least sum.
        kept = np.minimum(unchanged, before / token_s)
        sampling = float((step.lengths * token_s - kept * saved_s).max()) if number else longest_s(step, cluster)
        before = (latency.load_s if number else 0.0) + sampling + latency.training_s
        total += before
    return max(work, total)


def choose_rehearsals(trace: Trace, cluster: Cluster, *, change: float, seed: int = 0) -> RehearsalPlacement:
    """Return the placement and rehearsals whose first steps take the least simulated time.

    Every candidate runs on the predicted lengths, as if they came true, and on sampled ones. Candidates place rollouts
    as HistoPipe does at staleness 0, or longest first. The best one without rehearsals is replaced only by one that
    is at least as fast on every trace.

    Raises:
        InputError: rollouts wait for an environment.

    Example: with a chance of 1 the result is HistoPipe's, without rehearsals.
    """
    _check(trace)
    known = tuple(step.forecast for step in trace.steps[:NUM_FORECASTS])
    request = AssignmentRequest(step=1, cluster=replace(without_moves(cluster), staleness=0), forecasts=known)
    problem = search_problem(request, CalibratedLengths(), seed=seed)
    small, traces = problem.cluster, [_come_true(problem.traces[0]), *problem.traces[1 : 1 + _NUM_DRAWS]]
    changes = [draw_changes(each, change, seed=seed + number) for number, each in enumerate(traces, 1)]

    def times_s(chosen: RehearsalPlacement) -> Float64Array:
        runs = zip(traces, changes, strict=True)
        return np.array([simulate_rehearsed(each, small, chosen, change, own).makespan_s for each, own in runs])

    placements = dict.fromkeys([search(problem), *plain_placements(small)])
    plain = [RehearsalPlacement(placement=placement) for placement in placements]
    rows = dict.fromkeys([0, *(max(1, round(share * small.num_slots)) for share in _ROW_SHARES)])
    times = {chosen: times_s(chosen) for chosen in plain}
    best = min(times, key=lambda chosen: float(times[chosen].sum()))
    others = {other: times_s(other) for other in (replace(chosen, num_rows=most) for chosen in plain for most in rows)}
    times = {best: times[best], **{chosen: own for chosen, own in others.items() if (own <= times[best]).all()}}
    best = min(times, key=lambda chosen: float(times[chosen].sum()))
    return replace(best, placement=rescaled(best.placement, cluster.num_workers, small.num_workers))


def _check(trace: Trace) -> None:
    if trace.has_waits:
        raise InputError("rollouts that wait for an environment are not rehearsed; simulate them without rehearsals")


def _come_true(trace: Trace) -> Trace:
    steps = (replace(step, lengths=np.maximum(np.rint(step.forecast.lengths), 1)) for step in trace.steps)
    return replace(trace, steps=tuple(steps))


def simulate_rehearsed(
    trace: Trace, cluster: Cluster, chosen: RehearsalPlacement, change: float, changes: Sequence[Int64Array]
) -> RehearsedTimeline:
    """Simulate a synchronous run, at staleness 0, whose idle rows rehearse the next step.

    Rehearsals start with the longest predicted rollout, and end when the weights of their step arrive. The step is then
    placed by expected remaining tokens. Each worker first verifies the rehearsed tokens of its rollouts, without
    decoding, and then starts those with the most remaining tokens. A stolen rollout is prefilled again.

    Args:
        trace: lengths and predictions, without waits.
        cluster: simulated with staleness 0 and without moves of running rollouts.
        chosen: see `choose_rehearsals`.
        change: chance that a token changes, given that those before it stayed; the placement knows it.
        changes: see `draw_changes`; the placement does not know them.

    Raises:
        InputError: rollouts wait for an environment.
    """
    _check(trace)
    cluster = replace(without_moves(cluster), staleness=0)
    latency, token_s = cluster.latency, cluster.latency.token_s(cluster.num_slots)
    done, counts = list[DoneStep](), list[tuple[int, int, int]]()
    opened, rehearsed = 0.0, np.zeros(trace.steps[0].num_rollouts, np.int64)
    following = (*trace.steps[1:], None)
    for number, (step, later, unchanged) in enumerate(zip(trace.steps, following, changes, strict=True), 1):
        kept = np.minimum(rehearsed, unchanged)
        verified = np.minimum(rehearsed, (kept // CHUNK + 1) * CHUNK)
        counts.append((rehearsed.sum(), verified.sum(), kept.sum()))
        work, stealing = _queues(step, kept, expected_kept(change, rehearsed), chosen.placement, number, cluster)
        prefilled = np.where(rehearsed > 0, work.num_prompt_tokens + verified, 0)[work.queued]
        owners = np.repeat(np.arange(cluster.num_workers), np.diff(work.offsets))
        verifying_s = latency.prefill_s * np.bincount(owners, prefilled, cluster.num_workers)
        done.append(
            run_with_rehearsals(
                starts=opened + (latency.load_s if number > 1 else 0.0) + verifying_s,
                work=work._replace(num_prompt_tokens=np.where(rehearsed > 0, 0, work.num_prompt_tokens)),
                contexts=work.num_prompt_tokens + kept,
                early=early_rollouts(None if chosen.num_rows is None else later, chosen.num_rows or 0),
                costs=RehearsalCosts(token_s, latency.prefill_s, latency.training_s, stealing),
            )
        )
        opened, rehearsed = done[-1].sampled + latency.training_s, done[-1].rehearsed
        if later is not None and chosen.num_rows is None:
            rehearsed = np.zeros(later.num_rollouts, np.int64)
    num_rehearsed, num_verified, num_kept = np.array(counts, np.int64).T
    sampled = np.array([each.sampled for each in done])
    return RehearsedTimeline(
        policy="rehearsed",
        workers=np.tile(np.arange(cluster.num_workers, dtype=np.int32), len(done)),
        steps=np.repeat(np.arange(1, len(done) + 1, dtype=np.int32), cluster.num_workers),
        started_s=np.concatenate([each.starts for each in done]),
        ended_s=np.concatenate([each.ends for each in done]),
        num_rollouts=np.concatenate([each.counts for each in done]),
        sampled_s=sampled,
        trained_s=sampled + latency.training_s,
        num_workers=cluster.num_workers,
        num_tokens=sum(int(step.lengths.sum()) for step in trace.steps),
        bound_s=rehearsed_bound_s(trace, cluster, changes),
        staleness_max=0,
        num_stolen=sum(each.num_stolen for each in done),
        num_moved=0,
        choices=(chosen.name,) * len(done),
        num_rehearsed=num_rehearsed,
        num_verified=num_verified,
        num_kept=num_kept,
        num_decoded=np.array([each.decoded for each in done]),
    )


def _queues(
    step: TraceStep, kept: Int64Array, hoped: Float64Array, placement: Placement, number: int, cluster: Cluster
) -> tuple[StepRollouts, bool]:
    """Return the remaining tokens of a step, placed by their expected numbers, and whether idle workers steal."""
    forecast = step.forecast
    expected = np.maximum(forecast.lengths - hoped, 1.0)
    assignment = assign_workers(placement, expected, forecast.prompts, step=number, cluster=cluster)
    predicted = np.where(kept == step.lengths, 1.0, np.maximum(forecast.lengths - kept, 1.0))
    ordered = replace(assignment, order=longest_first(predicted, forecast.prompts), predicted_lengths=predicted)
    queues = queued_rollouts(step, ordered, cluster.num_workers)
    return queues._replace(lengths=step.lengths - kept), assignment.stealing == "queued"
