"""The replays of `python -m benchmarks draft`: every drafter on every history of a recording, the quick ones first."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.draft.budgets import replay_ours, replay_shipped
from benchmarks.draft.drafters import arctic as draft_arctic
from benchmarks.draft.drafters.baselines import Naive, Ngram, Rhyme
from benchmarks.draft.drafters.ours import OURS
from benchmarks.draft.histories import Plan, aged_plans, plans
from benchmarks.draft.matched import Row
from benchmarks.draft.recording import Recording
from benchmarks.draft.replay import ChainDrafter, OnDone, Tally, part, replay_chains
from benchmarks.draft.settings import Settings

WITHOUT_HISTORY = ("none", "ngram")
WITHOUT_CONTEXT = ("paper", "released")
"""They look at history alone, so without history they draft nothing."""

Run = Callable[[OnDone], list[Row]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """One drafter on one history: a row of the report, or several, each of another name or configuration."""

    drafter: str
    plan: Plan
    run: Run

    def rows(self, on_done: OnDone) -> list[Row]:
        """The rows, each with its names in front."""
        names: Row = {"drafter": self.drafter, "history": self.plan.history}
        control = {} if self.plan.control is None else {"control": self.plan.control}
        return [names | row | control for row in self.run(on_done)]


def jobs(recording: Recording, settings: Settings, done: Sequence[Row]) -> Iterator[Job]:
    """One job after another; `done` has the rows of those before while one runs."""
    for plan in plans(recording, siblings=settings.siblings).values():
        useless = WITHOUT_CONTEXT if plan.history == "none" else WITHOUT_HISTORY
        for name in settings.drafters:
            if name not in useless and (name != "arctic" or settings.has_rival):
                yield Job(drafter=name, plan=plan, run=_run(recording, plan, name, settings, done))
    for plan in aged_plans(recording) if "treering" in settings.drafters else ():
        yield Job(drafter=f"treering_{plan.control}", plan=plan, run=_run_control(recording, plan, settings))


def _run(recording: Recording, plan: Plan, name: str, settings: Settings, done: Sequence[Row]) -> Run:
    if name == "none":
        # A token a step, whatever was recorded.
        steps = recording.num_sampled
        return lambda on_done: [Tally(num_steps=steps, num_emitted=steps).row()]
    if name == "arctic":
        configs = draft_arctic.grid(plan, settings.max_draft)
        return lambda on_done: draft_arctic.replay_arctic(recording, plan, configs, on_done)
    if name in OURS:
        return lambda on_done: replay_ours(recording, plan, name, settings, done, on_done)
    chains = _chains(recording, name, settings.max_draft)
    return partial(_replay_all, recording, plan, chains)


def _run_control(recording: Recording, plan: Plan, settings: Settings) -> Run:
    return lambda on_done: [replay_shipped(recording, plan, "treering", settings, on_done)]


def _replay_all(
    recording: Recording, plan: Plan, chains: Sequence[tuple[ChainDrafter, Row]], on_done: OnDone
) -> list[Row]:
    return [
        replay_chains(recording, plan, drafter, part(on_done, number, 1, len(chains))).row() | extra
        for number, (drafter, extra) in enumerate(chains)
    ]


def _chains(recording: Recording, name: str, max_draft: int | None) -> list[tuple[ChainDrafter, Row]]:
    """Rivals of a name, with what their rows have beside it."""
    if name == "ngram":
        return [(Ngram(max_draft), {})]
    if name == "naive":
        return [(Naive(max_draft), {})]
    if name == "released":
        return [(Rhyme("released", "frequency", max_draft), {})]
    frequency = Rhyme("paper", "frequency", max_draft)
    if np.isnan(recording.rewards).any():
        return [(frequency, {"config": {"priority": "frequency"}})]
    reward = Rhyme("paper", "reward", max_draft)
    return [(reward, {"config": {"priority": "reward"}}), (frequency, {"drafter": "paper_frequency"})]
