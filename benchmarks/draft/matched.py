"""Our drafter at a rival's expense: with a least acceptance at which it drafts no more tokens than the best rival.

Knows rows of a report, and how to search. Knows nothing of how a row is measured.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Row = dict[str, Any]

SHIPPED = "treering_shipped"
"""Ours as shipped, where `treering` is the row at a rival's drafts."""
RIVAL = "arctic"
LEAST, MOST = 0.005, 0.3
"""Of the acceptances that are tried; beyond it only if a drafter still drafts too much there."""
NUM_TRIES = 8
NUM_REPLAYS = NUM_TRIES + 1
"""Of one search at most."""
CLOSE = 0.997
"""Of what may be drafted: whoever drafts as much is not tried further."""


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
    if rival is None or not row["drafter"].startswith("treering") or "control" in row:
        return {}
    return {"ratio_to_best_arctic": row["tokens_per_step"] / rival["tokens_per_step"]}


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
    return _best(max_drafted, shipped, tried)


def _best(max_drafted: float, shipped: float, tried: Mapping[float, Row]) -> Row | None:
    fitting = [acceptance for acceptance, one in tried.items() if one["drafted_per_step"] <= max_drafted]
    if not fitting:
        return None
    best = max(fitting, key=lambda acceptance: float(tried[acceptance]["tokens_per_step"]))
    return tried[best] if best == shipped else tried[best] | {"config": {"min_acceptance": best}}
