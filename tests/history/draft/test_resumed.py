"""Law 8 for drafts: a run resumed from a checkpoint drafts bitwise like one that was not interrupted.

The resumed run has another store, another drafter and an engine that numbers rows and groups from 0 again.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.history.reference import Row, draft_rows, walk
from treering.history.budget import VerifyCosts
from treering.history.draft.drafter import Drafter
from treering.history.draft_types import Drafts
from treering.history.store import store as store_module
from treering.history.store.store import HistoryStore

LIMITS = {"max_bytes": 3000, "max_epochs": 2}
NUM_STEPS = 6
STEP_WITHOUT_ROLLOUTS = 3
GROUP_SIZE = 4
NUM_RUNNING = 7
LENGTH = 24
COSTS = VerifyCosts(num_tokens=np.array([1, 8, 64]), seconds=np.array([1.0, 1.02, 1.6]))


@dataclass(kw_only=True)
class Run:
    """Store, its drafter, and the row and group counters of an engine."""

    store: HistoryStore
    drafter: Drafter
    num_rows: int = 0
    num_groups: int = 0

    def step(self, step: int) -> Iterator[Drafts]:
        """Sample three prompts, NUM_RUNNING rollouts at a time; yield the drafts."""
        waiting = [(prompt, sample) for prompt in prompts_of(step) for sample in range(GROUP_SIZE)]
        groups = {prompt: self.num_groups + k for k, prompt in enumerate(prompts_of(step))}
        truths = {key: truth_of(step, *key) for key in waiting}
        self.num_groups += len(groups)
        running: dict[int, tuple[int, int]] = {}
        written: dict[int, int] = {}
        while running or waiting:
            while waiting and len(running) < NUM_RUNNING:
                running[self.num_rows], written[self.num_rows] = waiting.pop(0), 0
                self.num_rows += 1
            rows = [
                Row(prompt_id=f"q{prompt}", group=groups[prompt], rollout=truths[prompt, sample][: written[number]])
                for number, (prompt, sample) in running.items()
            ]
            batch = draft_rows(rows, row_ids=list(running))
            drafts = self.drafter.propose(batch)
            yield drafts
            left = [truths[running[number]][written[number] :] for number in running]
            walked = [walk(drafts, b, truth) for b, truth in enumerate(left)]
            counts, leaves = (np.array(values) for values in zip(*walked, strict=True))
            self.drafter.observe(batch, counts, None, leaves)
            for number, count in zip(list(running), counts.tolist(), strict=True):
                written[number] += count + 1
                if written[number] >= LENGTH:
                    self.finish(step, truths[running[number]], *running.pop(number))
        self.store.publish()
        self.drafter.load_state(self.drafter.state())

    def finish(self, step: int, truth: tuple[int, ...], prompt: int, sample: int) -> None:
        if step == STEP_WITHOUT_ROLLOUTS:
            return
        self.store.add(f"q{prompt}", [np.array(truth, np.int32)], step)
        if step % 2 == 0 and sample == 1:
            self.store.publish()


def prompts_of(step: int) -> list[int]:
    """Return three of five prompts, so that some recur at the next step in another order."""
    return [(3 * step + k) % 5 for k in range(3)]


def truth_of(step: int, prompt: int, sample: int) -> tuple[int, ...]:
    """Return a rollout similar to the prompt's earlier ones; the vocabulary is large enough for hashes to collide."""
    tokens = np.random.default_rng(prompt).integers(1, 400, LENGTH)
    rng = np.random.default_rng([step, prompt, sample])
    return tuple(np.where(rng.random(LENGTH) < 0.25, rng.integers(1, 400, LENGTH), tokens).tolist())


def drafter_of(store: HistoryStore, *, costs: VerifyCosts | None, state: Any = None) -> Drafter:
    drafter = Drafter(store, min_acceptance=0.02, max_live_tokens=32)
    drafter.use_costs(costs)
    if state is not None:
        drafter.load_state(state)
    return drafter


def saved_and_loaded(store: HistoryStore, folder: Path, copy: Path) -> HistoryStore:
    store.save(copy)
    return HistoryStore.load(copy, **LIMITS)


def opened_again(store: HistoryStore, folder: Path, copy: Path) -> HistoryStore:
    shutil.copytree(folder, copy)
    return HistoryStore(copy, **LIMITS)


def left_by_a_killed_writer(store: HistoryStore, folder: Path, copy: Path) -> HistoryStore:
    """Return a store on a copy of the folder in which a publish was killed before it renamed its file."""
    shutil.copytree(folder, copy)
    (copy / ".unfinished-history-00000099.bin").write_bytes(b"half")
    return HistoryStore(copy, **LIMITS)


@pytest.mark.parametrize("has_costs", [False, True])
@pytest.mark.parametrize("come_back", [saved_and_loaded, opened_again, left_by_a_killed_writer])
def test_a_drafter_resumed_at_any_step_drafts_bitwise_like_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, come_back: Any, has_costs: bool
) -> None:
    monkeypatch.setattr(store_module, "_SLACK_BYTES", 700)
    costs = COSTS if has_costs else None
    store = HistoryStore(tmp_path / "history", **LIMITS)
    whole = Run(store=store, drafter=drafter_of(store, costs=costs))
    resumed: list[Run] = []
    num_drafted, kept = 0, []
    for step in range(NUM_STEPS):
        runs = [whole.step(step), *(run.step(step) for run in resumed)]
        for ours, *theirs in zip(*runs, strict=True):
            num_drafted += ours.tokens.size
            for number, drafts in enumerate(theirs):
                assert_same(ours, drafts, f"step {step}, resumed behind step {number}")
        for run in resumed:
            assert_same_state(whole.drafter.state(), run.drafter.state())
        kept.append(sorted(store.snapshot))
        store_again = come_back(store, tmp_path / "history", tmp_path / f"behind-{step}")
        state = whole.drafter.state()
        resumed.append(Run(store=store_again, drafter=drafter_of(store_again, costs=costs, state=state)))
    assert num_drafted > 300
    # Prompts left the budget and came back, so the store's order is not that of names or numbers.
    assert any(set(earlier) - set(later) for earlier, later in pairwise(kept))
    for run in (whole, *resumed):
        run.store.close()


def test_rows_without_ids_find_nothing_of_those_that_stood_in_their_lines_before() -> None:
    store = HistoryStore()
    running = drafter_of(store, costs=None)
    running.propose(draft_rows([Row(rollout=(40,)), Row(rollout=(30, 31, 32, 33, 34, 35))]))
    running.load_state(running.state())
    resumed = drafter_of(store, costs=None, state=running.state())
    for rollout in ((40, 31), (40, 31, 32)):
        rows = draft_rows([Row(rollout=rollout)])
        assert_same(running.propose(rows), resumed.propose(rows), f"behind {rollout}")


def assert_same(ours: Drafts, theirs: Drafts, when: str) -> None:
    for name in ("tokens", "offsets", "parents", "acceptance"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=when, strict=True)


def assert_same_state(ours: Any, theirs: Any) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], strict=True)
