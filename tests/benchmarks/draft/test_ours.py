from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from benchmarks.draft.drafters import ours as draft_ours
from benchmarks.draft.drafters.ours import OURS, make_drafter, replay_rows
from benchmarks.draft.histories import Plan, Siblings, aged_plans, plans

from tests.benchmarks.draft.recordings import recording
from tests.benchmarks.draft.watching import random_recording, watch
from treering import Drafter, HistoryStore
from treering.history.types import DraftRows, Drafts

SIBLINGS: tuple[Siblings, ...] = ("before", "others")


@pytest.mark.parametrize("siblings", SIBLINGS)
@pytest.mark.parametrize("num_lanes", [1, 3, 64])
def test_every_rollout_is_replayed_from_its_prompt_to_its_end_in_any_number_of_lanes(
    num_lanes: int, siblings: Siblings
) -> None:
    found = random_recording(10)
    steps, tally = watch(found, plans(found, siblings=siblings)["siblings"], num_lanes)
    assert sorted(steps) == list(range(10))
    for rollout, own in steps.items():
        begin, end = found.offsets[rollout : rollout + 2].tolist()
        place = int(found.starts[rollout])
        for size, accepted in own:
            assert begin + size == place
            place = min(place + accepted + 1, int(found.run_ends[place]))
            place = next((p for p in range(place, end) if found.is_sampled[p]), end)
        assert place == end
    assert tally.num_emitted == found.num_sampled
    assert tally.num_steps == sum(map(len, steps.values()))
    assert tally.num_accepted == sum(accepted for own in steps.values() for _, accepted in own)
    assert sum(tally.call_rows) == tally.num_steps


@pytest.mark.parametrize("siblings", SIBLINGS)
def test_a_rollout_sees_its_sources_and_nothing_else(siblings: Siblings) -> None:
    # Each task's samples are equal and no token of one stands in the other, nor twice in a rollout.
    tokens = {"a": list(range(20)), "b": list(range(100, 120))}
    found = recording([(task, tokens[task], "0" + "1" * 19) for task in ("a", "a", "b", "b")])
    all_plans = plans(found, siblings=siblings)
    for history in ("siblings", "none", "wrong_task"):
        plan = all_plans[history]  # type: ignore[index]
        make = partial(make_drafter, "treering", None, plan)
        tally = replay_rows(found, plan, make, lambda done: None)
        assert (tally.num_accepted > 0) == (history == "siblings")
        assert (tally.bytes_per_token > 0) == (history != "none")
    steps, _ = watch(found, all_plans["siblings"], 4)
    with_sources = {0, 1, 2, 3} if siblings == "others" else {1, 3}
    assert {rollout for rollout, own in steps.items() if any(accepted for _, accepted in own)} == with_sources


class Shelves:
    """Makes drafters and notes what each store holds when one proposes for rows that it has not seen."""

    def __init__(self) -> None:
        self.stores: list[HistoryStore] = []
        self.waves: list[tuple[list[int], dict[int, list[list[int]]]]] = []

    def make(self, store: HistoryStore) -> Drafter:
        self.stores.append(store)
        drafter = Drafter(store)
        seen: set[int] = set()
        propose = drafter.propose

        def watched(rows: DraftRows) -> Drafts:
            assert rows.row_ids is not None
            new = [number for number in rows.row_ids.tolist() if number not in seen]
            if new:
                assert len(new) == len(rows.row_ids)  # a wave begins together
                seen.update(new)
                self.waves.append((new, contents(store)))
            return propose(rows)

        drafter.propose = watched  # type: ignore[method-assign]
        return drafter


def contents(store: HistoryStore) -> dict[int, list[list[int]]]:
    """By prompt the rollouts that a store has published."""
    held = {}
    for prompt, index in store.snapshot.items():
        parts = "".join(f" {token}" if token >= 0 else "|" for token in index.text.tolist()).split("|")
        held[int(prompt)] = [[int(token) for token in part.split()] for part in parts if part]
    return held


@pytest.mark.parametrize("num_lanes", [2, 64])
def test_history_grows_from_wave_to_wave_in_one_store(num_lanes: int) -> None:
    found = recording([(task, [0, 10 * i + 1, 10 * i + 2], "011") for i, task in enumerate("aaabbbcc")])
    plan = plans(found)["siblings"]
    shelves = Shelves()
    replay_rows(found, plan, shelves.make, lambda done: None, num_lanes)
    first, second = {0: [0], 1: [3], 2: [6]}, {0: [0, 1], 1: [3, 4], 2: [6, 7]}
    expected = [([0, 1, 2], {}), ([3, 4, 5], first), ([6, 7], second)]
    if num_lanes == 2:
        expected = [([0, 1], {}), ([2], {}), ([3, 4], first), ([5], first), ([6, 7], second)]
    assert [numbers for numbers, _ in shelves.waves] == [numbers for numbers, _ in expected]
    for (_, held), (_, rollouts) in zip(shelves.waves, expected, strict=True):
        responses = {task: [found.response(i).tolist() for i in own] for task, own in rollouts.items()}
        assert {task: sorted(own) for task, own in held.items()} == responses
    assert len(shelves.stores) == 1


def test_a_new_generation_begins_with_an_empty_store_and_what_was_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    found = recording([("a", [0, i + 1], "01") for i in range(4)], epochs=[0, 0, 1, 1])
    loaded: list[Any] = []
    load_state = Drafter.load_state
    monkeypatch.setattr(Drafter, "load_state", lambda drafter, state: loaded.append(0) or load_state(drafter, state))
    for history, expected in (
        ("siblings", [([0], {}), ([1], {0: [[1]]}), ([2], {}), ([3], {0: [[3]]})]),
        ("earlier", [([0], {0: [[1], [2]]}), ([1], {0: [[1], [2]]})]),
    ):
        shelves = Shelves()
        replay_rows(found, plans(found)[history], shelves.make, lambda done: None)  # type: ignore[index]
        assert shelves.waves == expected
    assert len(loaded) == 1


def test_a_wrong_task_is_stored_under_the_rows_own_prompt() -> None:
    found = recording([(task, [0, i + 1], "01") for i, task in enumerate("abab")])
    shelves = Shelves()
    plan = plans(found)["wrong_task"]
    replay_rows(found, plan, shelves.make, lambda done: None)
    assert shelves.waves == [([0, 1], {}), ([2, 3], {0: [[2]], 1: [[1]]})]
    assert plan.prompts.tolist() == [0, 1, 0, 1]


def test_bytes_are_those_of_store_and_drafter_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    # In the last wave of each epoch two rollouts are stored, and one: with responses of three tokens.
    found = recording([("a", [0, 1, 2, 3], "0111")] * 5, epochs=[0, 0, 0, 1, 1])
    plan = plans(found)["siblings"]
    stores: list[HistoryStore] = []
    monkeypatch.setattr(Drafter, "num_bytes", 600)
    tally = replay_rows(found, plan, lambda store: stores.append(store) or Drafter(store), lambda done: None)
    assert len(stores) == 2
    assert tally.bytes_per_token == pytest.approx(sum(store.num_bytes + 600 for store in stores) / 9)


def test_what_was_learnt_is_told_where_nothing_is_stored() -> None:
    found = random_recording(4)
    plan = plans(found)["none"]
    tally = replay_rows(found, plan, partial(make_drafter, "treering", None, plan), lambda done: None)
    assert tally.bytes_per_token == 0
    assert tally.row()["learnt_bytes"] == sum(own.nbytes for own in Drafter(HistoryStore()).state().values())


def test_what_was_learnt_goes_on_from_block_to_block(monkeypatch: pytest.MonkeyPatch) -> None:
    found = random_recording(12, given=False)
    plan = plans(found, siblings="others")["siblings"]
    whole, _ = watch(found, plan, 1)
    made: list[Any] = []
    load_state = Drafter.load_state
    monkeypatch.setattr(draft_ours, "BLOCK_TOKENS", 100)
    monkeypatch.setattr(Drafter, "load_state", lambda drafter, state: made.append(state) or load_state(drafter, state))
    blocks, _ = watch(found, plan, 1)
    assert len(made) >= 2
    assert blocks == whole


def test_versions_and_rewards_of_the_sources_reach_the_store() -> None:
    found = recording(
        [("a", [1, 2], "01"), ("a", [3, 4], "01"), ("a", [5, 6], "01")], epochs=[3, 4, 9], rewards=[1, 2, 3]
    )
    true, _ = aged_plans(found)
    plan = replace(true, versions=(true.versions[0], np.array([8, 7])))
    shelves = Shelves()
    replay_rows(found, plan, shelves.make, lambda done: None)
    (index,) = shelves.stores[-1].snapshot.values()
    assert dict(zip(index.versions.tolist(), index.rewards.tolist(), strict=True)) == {8: 1.0, 7: 2.0}
    assert sorted(index.text[index.text >= 0].tolist()) == [2, 4]


def settings_of(
    monkeypatch: pytest.MonkeyPatch, name: str, plan: Plan, max_draft: int | None = None, **more: Any
) -> dict[str, Any]:
    given: dict[str, Any] = {}
    monkeypatch.setattr(draft_ours, "Drafter", lambda store, **settings: given.update(settings))
    make_drafter(name, max_draft, plan, HistoryStore(), **more)
    return given


def test_each_name_has_its_policy_and_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plans(random_recording(10))["siblings"]
    assert {name: settings_of(monkeypatch, name, plan) for name in OURS} == {
        "treering": {"policy": "calibrated", "shape": "tree"},
        "treering_chain": {"policy": "calibrated", "shape": "chain"},
        "treering_frequency": {"policy": "frequency", "shape": "tree"},
        "treering_reward": {"policy": "reward", "shape": "tree"},
        "treering_recency": {"policy": "recency", "shape": "tree"},
    }
    assert settings_of(monkeypatch, "treering_chain", plan, 3)["max_draft"] == 3
    changed = settings_of(monkeypatch, "treering_reward", plan, min_acceptance=0.25, shape="chain")
    assert changed == {"policy": "reward", "shape": "chain", "min_acceptance": 0.25}


def test_rollouts_of_other_prompts_are_seen_where_a_run_would_see_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found = recording([(task, [1], "1") for task in "aabbaabb"], epochs=[0] * 4 + [1] * 4)
    alone = ("history", "siblings", "own")
    for siblings in SIBLINGS:
        all_plans = plans(found, siblings=siblings)
        is_shared = siblings == "before"
        expected = {"none": ("own",), "siblings": None if is_shared else alone, "earlier": None, "wrong_task": alone}
        for history, sources in expected.items():
            given = settings_of(monkeypatch, "treering", all_plans[history])  # type: ignore[index]
            assert given.get("sources") == sources


@pytest.mark.parametrize("name", OURS)
def test_a_longest_draft_is_kept_to(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = recording([("a", list(range(30)), "0" + "1" * 29)] * 2)
    sizes: list[int] = []
    propose = Drafter.propose

    def watched(drafter: Drafter, rows: DraftRows) -> Drafts:
        drafts = propose(drafter, rows)
        sizes.append(int(np.diff(drafts.offsets).max()))
        return drafts

    monkeypatch.setattr(Drafter, "propose", watched)
    plan = plans(found)["siblings"]
    replay_rows(found, plan, partial(make_drafter, name, 2, plan), lambda done: None)
    assert max(sizes) == 2
    sizes.clear()
    replay_rows(found, plan, partial(make_drafter, name, None, plan), lambda done: None)
    assert max(sizes) > 2
