"""Claim: on recorded rollouts, history drafts yield more tokens per verification step than any other suffix drafter's.

`python -m benchmarks draft FILE` replays every rollout, teacher-forced, with every drafter and every history that the
file can give: our drafter and the simple baselines in this process, Arctic's in processes of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.progress import OnProgress, silent
from benchmarks.common.timing import environment
from benchmarks.draft.drafters import arctic
from benchmarks.draft.drafters.baselines import Naive, Ngram, Rhyme
from benchmarks.draft.drafters.ours import OURS
from benchmarks.draft.histories import Plan, plans
from benchmarks.draft.matched import SHIPPED, ratio, replay_ours
from benchmarks.draft.recording import read_recording
from benchmarks.draft.replay import ChainDrafter, OnDone, Row, Tally, replay_chains
from treering.analysis.recording import Recorded
from treering.analysis.replay import NUM_ROWS
from treering.errors import InputError

NOTE = "up to a few minutes, most of them for the grid of Arctic's configurations where it is installed"
TABLES = {
    "drafters": (
        *("history", "drafter", "config", "tokens_per_step", "drafted_per_step", "precision", "us_per_row"),
        *("bytes_per_token", "ratio_to_best_arctic"),
    ),
    "reliability": ("name", "estimate", "accepted", "num_drafted"),
}

LIMIT_TOKENS = 60_000

BASELINES: dict[str, Callable[[], ChainDrafter]] = {
    "ngram": Ngram,
    "naive": lambda: Naive("frequency"),
    "naive_reward": lambda: Naive("reward"),
    "paper": lambda: Rhyme("paper", "reward"),
    "paper_frequency": lambda: Rhyme("paper", "frequency"),
    "released": lambda: Rhyme("released", "frequency"),
}
DRAFTERS = ("none", *BASELINES, "arctic", *OURS)
DEFAULT = tuple(name for name in DRAFTERS if name != "naive_reward")
"""What is replayed unless drafters are named."""

WITHOUT_HISTORY = ("none", "ngram")
WITHOUT_CONTEXT = ("paper", "paper_frequency", "released")
"""They look at history alone, so without history they draft nothing."""
BY_REWARD = ("naive_reward", "paper")

Run = Callable[[OnDone], list[Row]]
"""One drafter on one history: rows of the report, without their names."""


def measure(
    *,
    file: Path,
    tokenizer: Path | None = None,
    drafters: Sequence[str] = DEFAULT,
    limit_tokens: int | None = LIMIT_TOKENS,
    on_progress: OnProgress = silent,
) -> dict[str, Any]:
    """Replays recorded rollouts of a JSON Lines file with each drafter and history.

    Args:
        file: recorded rollouts, whose messages are rendered by the folder `tokenizer`.
        tokenizer: see `file`.
        drafters: some of `DRAFTERS`.
        limit_tokens: whole tasks, chosen by a seed, until they have as many sampled tokens; None replays all.
        on_progress: told what is replayed, and the share that is done.
    """
    _check(drafters, limit_tokens)
    recorded, notes = read_recording(file, tokenizer, limit_tokens)
    rows: list[Row] = []
    todo = list(_jobs(recorded, drafters, rows))
    for number, (name, history, run) in enumerate(todo):
        words = f"{name} with history {history}"

        def tell(done: float, number: int = number, words: str = words) -> None:
            on_progress(words, (number + done) / len(todo))

        tell(0.0)
        rows += [{"drafter": name, "history": history} | row for row in run(tell)]
    if "arctic" in drafters and not arctic.is_installed():
        notes.append(arctic.HINT)
    tables = _reliability(rows)
    return {
        "file": file.name,
        "drafters": [row | ratio(row, rows) for row in rows],
        "reliability": tables,
        "notes": notes + _notes(rows),
        "environment": environment(
            clock="CPU time of the thread",
            num_tasks=int(np.unique(recorded.prompts).size),
            num_rollouts=recorded.num_rollouts,
            num_sampled_tokens=int(recorded.lengths.sum()),
            num_generations=int(np.unique(recorded.epochs).size),
            num_rows=NUM_ROWS,
        ),
    }


def _check(drafters: Sequence[str], limit_tokens: int | None) -> None:
    unknown = [name for name in drafters if name not in DRAFTERS]
    if unknown or not drafters:
        got = ", ".join(unknown) or "none"
        raise InputError(f"--drafters are some of {', '.join(DRAFTERS)}, got {got}: correct them")
    if set(drafters) == {"arctic"} and not arctic.is_installed():
        raise InputError("--drafters got arctic alone, which is not installed: run `make peers` or name others")
    if limit_tokens is not None and limit_tokens < 1:
        raise InputError(f"--limit-tokens must be at least 1, got {limit_tokens}: correct it or leave it out")


def _jobs(recorded: Recorded, drafters: Sequence[str], done: Sequence[Row]) -> Iterator[tuple[str, str, Run]]:
    """Drafter, history and run, one after another; `done` has the rows of those before while one runs."""
    useless = set() if arctic.is_installed() else {"arctic"}
    if np.isnan(recorded.rewards).any():
        useless |= set(BY_REWARD)
    for plan in plans(recorded).values():
        idle = WITHOUT_CONTEXT if plan.history == "none" else WITHOUT_HISTORY
        for name in DRAFTERS:
            if name in drafters and name not in useless and name not in idle:
                yield name, plan.history, _run(recorded, plan, name, done)


def _run(recorded: Recorded, plan: Plan, name: str, done: Sequence[Row]) -> Run:
    if name == "none":
        tally = Tally()
        # A token a step, whatever was recorded.
        tally.drafted.num_steps = tally.drafted.num_tokens = int(recorded.lengths.sum())
        return lambda on_done: [tally.row()]
    if name == "arctic":
        return partial(arctic.replay_arctic, recorded, plan, arctic.grid(plan))
    if name in OURS:
        return partial(replay_ours, recorded, plan, name, done)
    return lambda on_done: [replay_chains(recorded, plan, BASELINES[name](), on_done)]


def _reliability(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """By history, how often estimates of each size came true for the drafter as shipped; taken out of all rows."""
    tables = {(row["drafter"], row["history"]): row.pop("reliability") for row in rows if "reliability" in row}
    return {
        history: tables.get((SHIPPED, history), table)
        for (drafter, history), table in tables.items()
        if drafter == "treering" or (drafter == SHIPPED and ("treering", history) not in tables)
    }


def _notes(rows: Sequence[Row]) -> list[str]:
    """Histories with which ours drafts more than its rival at every setting."""
    found = {(row["drafter"], row["history"]) for row in rows}
    return [
        f"with history {history} no min_acceptance drafts as little as Arctic's best row, so the row treering is "
        f"missing there: mind what {SHIPPED} drafts"
        for drafter, history in sorted(found)
        if drafter == SHIPPED and ("treering", history) not in found
    ]
