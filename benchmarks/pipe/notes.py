"""What a report of policies on the runtime says in words: what it is about, what disturbed it, what missed.

Knows rows of a report. Knows nothing of how they were measured.
"""

import os
from collections.abc import Sequence
from typing import Any

from benchmarks.pipe.runs import MAX_TRIES, MOST_SLOWNESS

TARGET = 0.15
"""Largest difference between prediction and measurement that the claim allows."""


def notes_of(rows: Sequence[dict[str, Any]], *, num_workers: int, num_disturbed: int) -> list[str]:
    """Sentences about the rows of a report, each a policy at a staleness; `num_disturbed` runs are left out of them."""
    cores = os.cpu_count() or 1
    notes = [
        "each row is predicted from passes, loads and updates as they were timed in the other rows of its group and "
        "round",
        f"{num_workers} workers, a trainer, a judge and a controller share {cores} processors, and a worker keeps one "
        "busy with matrix products whatever the policy: a policy saves only what stood idle, and at staleness 1 "
        "training takes processors from the workers (latency.factors_beside)",
        "running rollouts stay on their workers here; the simulator was told so",
    ]
    if num_disturbed:
        notes.append(
            f"{num_disturbed} runs are left out: the machine's host gave processor time to others, so that they took "
            f"more than {MOST_SLOWNESS:.2f} times as long, and one of up to {MAX_TRIES} tries was disturbed less"
        )
    slowest = max(max(row["slowness_of_runs"]) for row in rows)
    if slowest > 1.0 + TARGET / 5:
        notes.append(
            f"the machine's host gave processor time to others, so that runs took up to {slowest:.2f} times as long; "
            "predictions are of times without that, times what it was in the run that is predicted"
        )
    missed = [row for row in rows if abs(row["ratio"] - 1.0) > TARGET]
    names = ", ".join(f"{_name(row)} ({row['ratio']:.2f})" for row in missed)
    notes.append(
        f"predicted within {TARGET:.0%}: {len(rows) - len(missed)} of {len(rows)}" + (f"; not {names}" if names else "")
    )
    uneven = [
        f"{_name(row)} ({min(row['step_s_of_runs']):.2f} to {max(row['step_s_of_runs']):.2f} s)"
        for row in rows
        if max(row["step_s_of_runs"]) > (1.0 + TARGET) * min(row["step_s_of_runs"])
    ]
    if uneven:
        notes.append(
            f"runs of one row that differ by more than {TARGET:.0%}, so that something else ran on the machine and no "
            f"prediction can be held against them: {', '.join(uneven)}"
        )
    slower = [_name(row) for row in rows if row["speedup"] < 1.0]
    if slower:
        notes.append(f"slower than {rows[0]['policy']} at the same staleness: {', '.join(slower)}")
    differing = [
        f"{_name(row)} {row['num_differing']} of {row['num_rollouts']}" for row in rows if row["num_differing"]
    ]
    if differing:
        notes.append(
            f"rollouts with other tokens than {rows[0]['policy']}'s: {', '.join(differing)}; batches are summed in "
            "another order in float32, so weights differ in the last digit, and a near-tie may fall otherwise"
        )
    return notes


def _name(row: dict[str, Any]) -> str:
    return f"{row['policy']} at staleness {row['staleness']}" + (" with drafts" if row["drafts"] == "on" else "")
