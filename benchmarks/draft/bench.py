"""Claim: on recorded rollouts, history drafts yield more tokens per verification step than any other suffix drafter's.

`python -m benchmarks draft FILE` replays every rollout, teacher-forced, with every drafter and every history that the
file can give: our drafter and the simple baselines in this process, Arctic's in processes of its own.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.timing import cpu_name, versions
from benchmarks.draft.costs import DEFAULT_BATCH, read_costs, speedup
from benchmarks.draft.drafters import arctic as draft_arctic
from benchmarks.draft.drafters.waves import NUM_ROWS
from benchmarks.draft.histories import Siblings
from benchmarks.draft.jobs import jobs
from benchmarks.draft.matched import SHIPPED, Row, ratio
from benchmarks.draft.recording import Recording, read_recording
from benchmarks.draft.settings import DEFAULT, Settings

LIMIT_TOKENS = 60_000
HINT = draft_arctic.HINT

OnProgress = Callable[[str, float | None], None]


def measure(
    *,
    file: Path,
    tokenizer: Path | None = None,
    drafters: Sequence[str] | None = None,
    max_draft: int | None = None,
    limit_tokens: int | None = LIMIT_TOKENS,
    siblings: Siblings = "before",
    cost: Path | None = None,
    batch: int = DEFAULT_BATCH,
    match_drafts: float | None = None,
    on_progress: OnProgress = lambda words, done: None,
) -> dict[str, Any]:
    """The report, ready for JSON: rows under "drafters", "file", "reliability", "notes" and "environment".

    Args:
        file: recorded rollouts, JSON Lines.
        tokenizer: folder to render messages with.
        drafters: some of `draft_settings.DRAFTERS`; None is those of its `DEFAULT`.
        max_draft: tokens per draft at most, for all drafters alike; None leaves each its own.
        limit_tokens: whole tasks, chosen by a seed, until they have as many sampled tokens; None replays all.
        siblings: whether a sample sees those of its task that ran before it, or all others.
        cost: file of costs; rows then have their predicted speedup.
        batch: rows of the pass that the speedup is predicted for.
        match_drafts: drafted tokens per step that the row `treering` may have; None is what Arctic's best row has.
        on_progress: told what is replayed, and the share that is done.

    Raises:
        InputError: an unknown drafter, a number out of range, or a bad file.
    """
    settings = Settings(
        drafters=DEFAULT if drafters is None else tuple(drafters),
        max_draft=max_draft,
        limit_tokens=limit_tokens,
        siblings=siblings,
        costs=None if cost is None else read_costs(cost),
        batch=batch,
        match_drafts=match_drafts,
    )
    recording = read_recording(file, tokenizer, limit_tokens)
    rows = _replay(recording, settings, on_progress)
    tables = _reliability(rows)
    return {
        "file": file.name,
        "drafters": [row | _prediction(row, settings) | ratio(row, rows) for row in rows],
        "reliability": tables,
        "notes": [*_notes(recording, settings), *_notes_of_rows(rows)],
        "environment": _environment(recording, settings),
    }


def _replay(recording: Recording, settings: Settings, on_progress: OnProgress) -> list[Row]:
    rows: list[Row] = []
    todo = list(jobs(recording, settings, rows))
    for number, job in enumerate(todo):
        words = f"{job.drafter} with history {job.plan.history}"

        def tell(done: float, number: int = number, words: str = words) -> None:
            on_progress(words, (number + done) / len(todo))

        tell(0.0)
        rows += job.rows(tell)
    return rows


def _reliability(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """By history, how often estimates of each size came true for the drafter as shipped; taken out of all rows."""
    tables = {(row["drafter"], row["history"]): row.pop("reliability") for row in rows if "reliability" in row}
    return {
        history: tables.get((SHIPPED, history), table)
        for (drafter, history), table in tables.items()
        if drafter == "treering" or (drafter == SHIPPED and ("treering", history) not in tables)
    }


def _prediction(row: Row, settings: Settings) -> Row:
    return {} if settings.costs is None else {"predicted_speedup": speedup(settings.costs, row, settings.batch)}


def _notes(recording: Recording, settings: Settings) -> list[str]:
    """What was left out, and how to have it."""
    notes = list(recording.gaps)
    if recording.num_tasks_left_out:
        notes.append(
            f"{recording.num_tasks_left_out} tasks were left out, {recording.num_sampled:,} sampled tokens stayed; "
            "--limit-tokens N takes more, and 0 all"
        )
    if "arctic" in settings.drafters and not settings.has_rival:
        notes.append(HINT)
    return notes


def _notes_of_rows(rows: Sequence[Row]) -> list[str]:
    """Where ours drafts more than its rival whatever it is set to."""
    found = {(row["drafter"], row["history"]) for row in rows}
    return [
        f"with history {history} no min_acceptance drafts as little as the rival (--match-drafts, else Arctic's best "
        f"row), so the row treering is missing there: mind what {SHIPPED} drafts"
        for drafter, history in sorted(found)
        if drafter == SHIPPED and ("treering", history) not in found
    ]


def _environment(recording: Recording, settings: Settings) -> dict[str, Any]:
    """What the figures depend on besides the code."""
    return {
        "versions": versions(),
        "cpu": cpu_name(),
        "clock": "CPU time of the thread",
        "num_tasks": int(recording.tasks.max()) + 1,
        "num_rollouts": recording.num_rollouts,
        "num_sampled_tokens": recording.num_sampled,
        "num_generations": int(np.unique(recording.generations).size),
        "siblings": settings.siblings,
        "max_draft": settings.max_draft,
        "match_drafts": settings.match_drafts,
        "num_rows": NUM_ROWS,
        "batch": None if settings.costs is None else settings.batch,
    }
