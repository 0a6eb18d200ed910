"""Rows of our own drafters on one history: at a rival's drafts, as shipped, and knowing what passes cost.

Knows which row gets which name. Knows nothing of other drafters, but for what Arctic's best row drafts.
"""

from collections.abc import Sequence
from functools import partial

from benchmarks.draft.drafters.ours import SHIPPED_ACCEPTANCE, make_drafter, replay_rows
from benchmarks.draft.histories import Plan
from benchmarks.draft.matched import NUM_REPLAYS, SHIPPED, Row, at_most, best_rival
from benchmarks.draft.recording import Recording
from benchmarks.draft.replay import OnDone, part
from benchmarks.draft.settings import Settings
from treering import Drafter, HistoryStore
from treering.history.budget.costs import VerifyCosts


def replay_ours(
    recording: Recording, plan: Plan, name: str, settings: Settings, done: Sequence[Row], on_done: OnDone
) -> list[Row]:
    """As shipped; `treering` at no more drafts than a rival, if there is one; and knowing costs where they are given.

    Args:
        recording: what was sampled.
        plan: the history.
        name: one of `OURS`.
        settings: what holds for all.
        done: rows of the drafters before, Arctic's on this history among them.
        on_done: told the share that is done.

    Returns:
        Rows, those with another name than `name` with their `drafter`.

    Example: `treering` beside Arctic's rows, with costs, has the rows `treering`, `treering_shipped` and
    `treering_known_costs`.
    """
    limit, costs = _limit(name, plan, settings, done), settings.costs
    matched = 0 if limit is None else NUM_REPLAYS
    total = 1 + matched + (costs is not None)
    first = replay_shipped(recording, plan, name, settings, part(on_done, 0, 1, total))
    rows = [first]
    if limit is not None:
        tell = part(on_done, 1, matched, total)
        rows = [*_replay_matched(recording, plan, name, settings, limit, first, tell), first | {"drafter": SHIPPED}]
    if costs is not None:
        tell = part(on_done, 1 + matched, 1, total)
        rows.append(_replay_informed(recording, plan, name, settings, costs, tell))
    return rows


def replay_shipped(recording: Recording, plan: Plan, name: str, settings: Settings, on_done: OnDone) -> Row:
    """One of ours as it is shipped."""
    return replay_rows(recording, plan, partial(make_drafter, name, settings.max_draft, plan), on_done).row()


def _limit(name: str, plan: Plan, settings: Settings, done: Sequence[Row]) -> float | None:
    """Drafted tokens per step that the row may have."""
    if name != "treering":
        return None
    if settings.match_drafts is not None:
        return settings.match_drafts
    rival = best_rival(done, plan.history)
    return None if rival is None else float(rival["drafted_per_step"])


def _replay_matched(
    recording: Recording, plan: Plan, name: str, settings: Settings, limit: float, shipped: Row, on_done: OnDone
) -> list[Row]:
    """At no more drafted tokens per step than the limit; no row if that cannot be."""
    tells = iter([part(on_done, number, 1, NUM_REPLAYS) for number in range(NUM_REPLAYS)])

    def replay(acceptance: float) -> Row:
        make = partial(make_drafter, name, settings.max_draft, plan, min_acceptance=acceptance)
        return replay_rows(recording, plan, make, next(tells)).row()

    found = at_most(limit, SHIPPED_ACCEPTANCE, shipped, replay)
    on_done(1.0)
    return [] if found is None else [found]


def _replay_informed(
    recording: Recording, plan: Plan, name: str, settings: Settings, costs: VerifyCosts, on_done: OnDone
) -> Row:
    """Knowing what passes cost, in batches of the size that speedups are predicted for."""

    def make(store: HistoryStore) -> Drafter:
        drafter = make_drafter(name, settings.max_draft, plan, store)
        drafter.use_costs(costs)
        return drafter

    row = replay_rows(recording, plan, make, on_done, settings.batch).row()
    return row | {"drafter": f"{name}_known_costs"}
