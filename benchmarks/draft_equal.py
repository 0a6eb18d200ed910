"""Our drafter at a rival's expense: with a least acceptance at which it drafts no more tokens than the best rival.

Knows rows of a report, and how to search. Knows nothing of how a row is measured.
"""

from collections.abc import Callable, Iterable
from typing import Any

Row = dict[str, Any]

SAME_DRAFTS = "treering_same_drafts"
RIVAL = "arctic"
LEAST, MOST = 0.005, 0.3
"""Of the acceptances that are tried; beyond it only if a drafter still drafts too much there."""
NUM_TRIES = 6


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
    """The row with the most tokens per step of those that draft no more, its acceptance in its `config`.

    Bisects by the ratio: a greater acceptance drafts less.

    Args:
        max_drafted: drafted tokens per step, at most.
        shipped: the drafter's own least acceptance, the first one that is tried.
        row: what it reached with that.
        replay: measures another one.

    Returns:
        None if all that were tried draft more.

    Example: with 8 drafted tokens at most and a drafter that drafts 0.1 / acceptance, 0.018 drafts less, so 0.00949 is
    tried, which drafts too much, then 0.0131, until 0.0126 drafts 7.9.
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
        middle = float(f"{(low * high) ** 0.5:.3g}")
        low, high = (middle, high) if drafts_more(middle) else (low, middle)
    fitting = [key for key, one in tried.items() if one["drafted_per_step"] <= max_drafted]
    if not fitting:
        return None
    best = max(fitting, key=lambda key: float(tried[key]["tokens_per_step"]))
    return tried[best] | {"config": {"min_acceptance": best}}
