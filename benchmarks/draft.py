"""Claim: on recorded rollouts, history drafts yield more tokens per verification step than any other suffix drafter's.

`treering bench draft FILE` runs this: a teacher-forced replay of every rollout with every drafter and every history
that the file can give, in one process for ours and the simple rivals, and in processes of its own for Arctic's.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import draft_arctic
from benchmarks.draft_baselines import Naive, Ngram, Rhyme
from benchmarks.draft_costs import DEFAULT_BATCH, read_costs, speedup
from benchmarks.draft_equal import SAME_DRAFTS, at_most, best_rival, ratio
from benchmarks.draft_histories import Plan, Siblings, aged_plans, plans
from benchmarks.draft_ours import OURS, make_drafter, replay_rows
from benchmarks.draft_recording import Recording, read_recording
from benchmarks.draft_replay import ChainDrafter, OnDone, Tally, replay_chains
from benchmarks.draft_waves import NUM_ROWS
from benchmarks.timing import cpu_name, versions
from treering import Drafter, HistoryStore
from treering.errors import InputError
from treering.history.costs import VerifyCosts

DRAFTERS = ("none", "ngram", "naive", "paper", "released", "arctic", *OURS)
DEFAULT = DRAFTERS[: DRAFTERS.index("treering_chain") + 1]
"""Without the ablation."""
WITHOUT_HISTORY = ("none", "ngram")
WITHOUT_CONTEXT = ("paper", "released")
"""They look at history alone, so without history they draft nothing."""

LIMIT_TOKENS = 60_000
HINT = draft_arctic.HINT

OnProgress = Callable[[str, float | None], None]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Settings:
    """What holds for all drafters alike; see `measure`."""

    max_draft: int | None
    siblings: Siblings
    costs: VerifyCosts | None
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """One drafter on one history: a row of the report, or one for each of its configurations."""

    drafter: str
    plan: Plan
    run: Callable[[OnDone], list[Row]]

    def rows(self, on_done: OnDone) -> list[Row]:
        """The rows, each with its names in front."""
        names: Row = {"drafter": self.drafter, "history": self.plan.history}
        control = {} if self.plan.control is None else {"control": self.plan.control}
        return [names | row | control for row in self.run(on_done)]


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
    on_progress: OnProgress = lambda words, done: None,
) -> dict[str, Any]:
    """The report, ready for JSON: rows under "drafters", "file", "notes" and "environment".

    Args:
        file: recorded rollouts, JSON Lines.
        tokenizer: folder to render messages with.
        drafters: some of `DRAFTERS`; None is those of `DEFAULT`.
        max_draft: tokens per draft at most, for all drafters alike; None leaves each its own.
        limit_tokens: whole tasks, chosen by a seed, until they have as many sampled tokens; None replays all.
        siblings: whether a sample sees those of its task that ran before it, or all others.
        cost: file of costs; rows then have their predicted speedup.
        batch: rows of the pass that the speedup is predicted for.
        on_progress: told what is replayed, and the share that is done.

    Raises:
        InputError: an unknown drafter, a number below 1, or a bad file.
    """
    _check(drafters, max_draft, limit_tokens, batch)
    costs = None if cost is None else read_costs(cost)
    settings = Settings(max_draft=max_draft, siblings=siblings, costs=costs, batch=batch)
    recording = read_recording(file, tokenizer, limit_tokens)
    chosen = [name for name in DRAFTERS if name in (DEFAULT if drafters is None else drafters)]
    rows: list[Row] = []
    jobs = list(_jobs(recording, chosen, settings, rows))
    for number, job in enumerate(jobs):

        def tell(done: float, number: int = number, job: Job = job) -> None:
            on_progress(f"{job.drafter} with history {job.plan.history}", (number + done) / len(jobs))

        tell(0.0)
        rows += job.rows(tell)
    return {
        "file": file.name,
        "drafters": [row | _prediction(row, settings) | ratio(row, rows) for row in rows],
        "notes": _notes(recording, chosen),
        "environment": _environment(recording, settings),
    }


def _jobs(recording: Recording, chosen: Sequence[str], settings: Settings, done: Sequence[Row]) -> Iterator[Job]:
    """What is replayed, the quick ones first; `done` has the rows of the jobs before while one runs."""
    has_rival = "arctic" in chosen and draft_arctic.is_installed()
    for plan in plans(recording, siblings=settings.siblings).values():
        for name in chosen:
            useless = WITHOUT_CONTEXT if plan.history == "none" else WITHOUT_HISTORY
            if name not in useless and (name != "arctic" or has_rival):
                yield Job(drafter=name, plan=plan, run=_runner(recording, plan, name, settings))
            if name == "treering" and has_rival:
                run = partial(_replay_same_drafts, recording, plan, settings, done)
                yield Job(drafter=SAME_DRAFTS, plan=plan, run=run)
    for plan in aged_plans(recording) if "treering" in chosen else ():
        yield Job(drafter="treering", plan=plan, run=_runner(recording, plan, "treering", settings))


def _runner(recording: Recording, plan: Plan, name: str, settings: Settings) -> Callable[[OnDone], list[Row]]:
    if name == "none":
        # A token a step, whatever was recorded.
        steps = recording.num_sampled
        return lambda on_done: [Tally(num_steps=steps, num_emitted=steps).row()]
    if name == "arctic":
        configs = draft_arctic.grid(plan, settings.max_draft)
        return lambda on_done: draft_arctic.replay_arctic(recording, plan, configs, on_done)
    if name in OURS:
        return partial(_replay_ours, recording, plan, name, settings)
    return lambda on_done: [
        replay_chains(recording, plan, drafter, on_done).row() | extra
        for drafter, extra in _chains(recording, name, settings.max_draft)
    ]


def _replay_ours(recording: Recording, plan: Plan, name: str, settings: Settings, on_done: OnDone) -> list[Row]:
    """As shipped; and where costs are given, once more knowing them, in batches of the size that they are asked for."""
    shipped = partial(make_drafter, name, settings.max_draft, plan)
    costs = settings.costs
    if costs is None:
        return [replay_rows(recording, plan, shipped, on_done).row()]

    def informed(store: HistoryStore) -> Drafter:
        drafter = shipped(store)
        drafter.use_costs(costs)
        return drafter

    first = replay_rows(recording, plan, shipped, lambda done: on_done(done / 2)).row()
    second = replay_rows(recording, plan, informed, lambda done: on_done((1 + done) / 2), settings.batch).row()
    return [first, second | {"config": {"costs": "known"}}]


def _replay_same_drafts(
    recording: Recording, plan: Plan, settings: Settings, done: Sequence[Row], on_done: OnDone
) -> list[Row]:
    """Ours once more, drafting no more than the best of Arctic's rows; none if it cannot."""
    rival = best_rival(done, plan.history)
    shipped = next(row for row in done if row["drafter"] == "treering" and row["history"] == plan.history)
    assert rival is not None, "rivals are replayed before"

    def replay(acceptance: float) -> Row:
        make = partial(make_drafter, "treering", settings.max_draft, plan, min_acceptance=acceptance)
        return replay_rows(recording, plan, make, lambda share: None).row()

    default = signature(Drafter).parameters["min_acceptance"].default
    found = at_most(rival["drafted_per_step"], default, shipped, replay)
    on_done(1.0)
    return [] if found is None else [found | {"drafter": SAME_DRAFTS}]


def _chains(recording: Recording, name: str, max_draft: int | None) -> list[tuple[ChainDrafter, Row]]:
    """Rivals of a name, with what tells their rows apart."""
    if name == "ngram":
        return [(Ngram(max_draft), {})]
    if name == "naive":
        return [(Naive(max_draft), {})]
    if name == "released":
        return [(Rhyme("released", "frequency", max_draft), {})]
    frequency: tuple[ChainDrafter, Row] = Rhyme("paper", "frequency", max_draft), {"config": {"priority": "frequency"}}
    if np.isnan(recording.rewards).any():
        return [frequency]
    return [(Rhyme("paper", "reward", max_draft), {"config": {"priority": "reward"}}), frequency]


def _prediction(row: Row, settings: Settings) -> Row:
    return {} if settings.costs is None else {"predicted_speedup": speedup(settings.costs, row, settings.batch)}


def _notes(recording: Recording, chosen: Sequence[str]) -> list[str]:
    notes = []
    if recording.num_tasks_left_out:
        notes.append(
            f"{recording.num_tasks_left_out} tasks were left out, {recording.num_sampled:,} sampled tokens stayed; "
            "--limit-tokens N takes more, and 0 all"
        )
    if "arctic" in chosen and not draft_arctic.is_installed():
        notes.append(HINT)
    return notes


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
        "num_rows": NUM_ROWS,
        "batch": None if settings.costs is None else settings.batch,
    }


def _check(drafters: Sequence[str] | None, max_draft: int | None, limit_tokens: int | None, batch: int) -> None:
    for name, value in (("--max-draft", max_draft), ("--limit-tokens", limit_tokens), ("--batch", batch)):
        if value is not None and value < 1:
            raise InputError(f"{name} must be at least 1, got {value}: correct it or leave it out")
    unknown = [name for name in drafters or [] if name not in DRAFTERS]
    if unknown or drafters == []:
        got = ", ".join(unknown) or "none"
        raise InputError(f"--drafters are some of {', '.join(DRAFTERS)}, got {got}: correct them")
