"""Our drafter at a rival's number of drafts: with a least acceptance at which it drafts no more than the best rival."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from benchmarks.draft.drafters.ours import make_drafter, replay_rows
from benchmarks.draft.histories import Plan
from benchmarks.draft.replay import OnDone, Row, part
from treering.analysis.recording import Recorded
from treering.history.draft.drafter import MIN_ACCEPTANCE

SHIPPED = "treering_shipped"
"""Ours as shipped, where `treering` is the row at a rival's drafts."""
RIVAL = "arctic"
LEAST, MOST = 0.005, 0.3
"""Greatest acceptance that is tried; up to 1 only if a drafter still drafts too much at `MOST`."""
NUM_TRIES = 8
NUM_REPLAYS = NUM_TRIES + 1
"""Most replays of one search."""
CLOSE = 0.997
"""Share of the allowed drafts at which the search ends."""


def best_rival(rows: Iterable[Row], history: str) -> Row | None:
    """Arctic's row with the most tokens per step on a history, None where it has no row.

    Example: of rows with 4.9 and 5.1 tokens per step the second, however much it drafted.
    """
    found = [row for row in rows if row["drafter"] == RIVAL and row["history"] == history]
    return max(found, key=lambda row: float(row["tokens_per_step"]), default=None)


def ratio(row: Row, rows: Iterable[Row]) -> Row:
    """One of ours with its tokens per step by those of Arctic's best row on the same history; nothing for other rows.

    Example: 5.7 tokens per step where Arctic's best row has 4.9 are `{"ratio_to_best_arctic": 1.163}`, rounded.
    """
    rival = best_rival(rows, row["history"])
    if rival is None or not row["drafter"].startswith("treering"):
        return {}
    return {"ratio_to_best_arctic": row["tokens_per_step"] / rival["tokens_per_step"]}


def replay_ours(recorded: Recorded, plan: Plan, name: str, rows: Sequence[Row], on_done: OnDone) -> list[Row]:
    """One of ours as shipped; `treering` first at no more drafts than Arctic's best of `rows`, if there is one.

    The row as shipped is then called `SHIPPED`; it is alone where every acceptance drafts more.
    """

    def replay(tell: OnDone, acceptance: float | None = None) -> Row:
        return replay_rows(recorded, plan, partial(make_drafter, name, plan, min_acceptance=acceptance), tell)

    rival = best_rival(rows, plan.history) if name == "treering" else None
    if rival is None:
        return [replay(on_done)]
    tells = iter([part(on_done, number, 1, 1 + NUM_REPLAYS) for number in range(1 + NUM_REPLAYS)])
    shipped = replay(next(tells))
    found = at_most(
        rival["drafted_per_step"], MIN_ACCEPTANCE, shipped, lambda acceptance: replay(next(tells), acceptance)
    )
    on_done(1.0)
    return [*([] if found is None else [found]), shipped | {"drafter": SHIPPED}]


def at_most(max_drafted: float, shipped: float, row: Row, replay: Callable[[float], Row]) -> Row | None:
    """The row with the most tokens per step of those that draft no more.

    Bisects by the ratio, a greater acceptance drafting less, until a row drafts as much as it may within 0.3 %.

    Args:
        max_drafted: drafted tokens per step, at most.
        shipped: the drafter's own least acceptance, the first one that is tried.
        row: what it reached with that.
        replay: measures another one.

    Returns:
        The row, with its acceptance in its `config` where that is not the shipped one; None if all that were tried
        draft more.

    Example: with 8 drafted tokens at most and a drafter that drafts 0.1 / acceptance, 0.018 drafts less, so 0.009487 is
    tried, which drafts too much, then 0.01307, until 0.01256 drafts 7.96.
    """
    tried = {shipped: row}

    def drafts_more(acceptance: float) -> bool:
        if acceptance not in tried:
            tried[acceptance] = replay(acceptance)
        return bool(tried[acceptance]["drafted_per_step"] > max_drafted)

    low, high = (shipped, MOST) if drafts_more(shipped) else (LEAST, shipped)
    if drafts_more(high):
        low, high = high, 1.0
    for _ in range(NUM_TRIES):
        if high in tried and tried[high]["drafted_per_step"] >= CLOSE * max_drafted:
            break
        middle = float(f"{(low * high) ** 0.5:.4g}")
        low, high = (middle, high) if drafts_more(middle) else (low, middle)
    fitting = [acceptance for acceptance in tried if not drafts_more(acceptance)]
    if not fitting:
        return None
    best = max(fitting, key=lambda acceptance: float(tried[acceptance]["tokens_per_step"]))
    return tried[best] if best == shipped else tried[best] | {"config": {"min_acceptance": best}}
