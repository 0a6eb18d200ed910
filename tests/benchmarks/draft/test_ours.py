"""Our drafter's replay: a rollout sees its sources and nothing else, and what was learnt goes on."""

from functools import partial
from typing import Any

import pytest
from benchmarks.draft.drafters.ours import OURS, make_drafter, replay_rows
from benchmarks.draft.histories import plans

from tests.benchmarks.draft.recordings import recording
from tests.benchmarks.draft.watching import random_recording, watch
from treering import Drafter, HistoryStore
from treering.history.types import DraftRows, Drafts


@pytest.mark.parametrize("num_rows", [1, 3, 64])
def test_every_rollout_is_replayed_from_its_prompt_to_its_end_in_waves_of_any_size(num_rows: int) -> None:
    found = random_recording(10)
    steps, row = watch(found, plans(found, num_rows=num_rows)["siblings"], num_rows)
    assert sorted(steps) == list(range(10))
    for rollout, own in steps.items():
        begin, end = found.offsets[rollout : rollout + 2].tolist()
        place = int(found.starts[rollout])
        for size, accepted in own:
            assert begin + size == place
            place = min(place + accepted + 1, int(found.run_ends[place]))
            place = int(found.nexts[place]) if place < end else end
        assert place == end
    num_steps = sum(map(len, steps.values()))
    assert row["tokens_per_step"] == pytest.approx(found.lengths.sum() / num_steps)


def test_a_rollout_sees_its_sources_and_nothing_else() -> None:
    # Each task's samples are equal and no token of one stands in the other, nor twice in a rollout.
    tokens = {"a": list(range(20)), "b": list(range(100, 120))}
    found = recording([(task, tokens[task], "0" + "1" * 19) for task in ("a", "a", "b", "b")])
    for history in ("siblings", "none", "wrong_task"):
        plan = plans(found)[history]  # type: ignore[index]
        row = replay_rows(found, plan, partial(make_drafter, "treering", plan), lambda done: None)
        assert (row["precision"] > 0) == (history == "siblings")
        assert (row["bytes_per_token"] > 0) == (history != "none")
    steps, _ = watch(found, plans(found)["siblings"], 4)
    assert {rollout for rollout, own in steps.items() if any(accepted for _, accepted in own)} == {1, 3}


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


@pytest.mark.parametrize("num_rows", [2, 64])
def test_history_grows_from_wave_to_wave_in_one_store(num_rows: int) -> None:
    found = recording([(task, [0, 10 * i + 1, 10 * i + 2], "011") for i, task in enumerate("aaabbbcc")])
    shelves = Shelves()
    replay_rows(found, plans(found, num_rows=num_rows)["siblings"], shelves.make, lambda done: None)
    first, second = {0: [0], 1: [3], 2: [6]}, {0: [0, 1], 1: [3, 4], 2: [6, 7]}
    expected: list[tuple[list[int], dict[int, list[int]]]] = [([0, 3, 6], {}), ([1, 4, 7], first), ([2, 5], second)]
    if num_rows == 2:
        expected = [([0, 3], {}), ([6], {0: [0], 1: [3]}), ([1, 4], first)]
        expected += [([7], {0: [0, 1], 1: [3, 4], 2: [6]}), ([2, 5], second)]
    assert [rollouts for rollouts, _ in shelves.waves] == [rollouts for rollouts, _ in expected]
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
        ("earlier", [([2], {0: [[1], [2]]}), ([3], {0: [[1], [2]]})]),
    ):
        shelves = Shelves()
        replay_rows(found, plans(found)[history], shelves.make, lambda done: None)  # type: ignore[index]
        assert shelves.waves == expected
    assert len(loaded) == 1


def test_a_wrong_task_is_stored_under_the_rows_own_prompt() -> None:
    found = recording([(task, [0, i + 1], "01") for i, task in enumerate("abab")])
    shelves = Shelves()
    replay_rows(found, plans(found)["wrong_task"], shelves.make, lambda done: None)
    assert shelves.waves == [([0, 1], {}), ([2, 3], {0: [[2]], 1: [[1]]})]


def test_what_was_learnt_is_told_where_nothing_is_stored() -> None:
    found = random_recording(4)
    plan = plans(found)["none"]
    row = replay_rows(found, plan, partial(make_drafter, "treering", plan), lambda done: None)
    assert row["bytes_per_token"] == 0
    assert row["learnt_bytes"] == sum(own.nbytes for own in Drafter(HistoryStore()).state().values())


def test_rollouts_of_other_prompts_are_seen_where_a_run_would_see_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found = recording([(task, [1], "1") for task in "aabbaabb"], epochs=[0] * 4 + [1] * 4)
    given: dict[str, Any] = {}
    monkeypatch.setattr("benchmarks.draft.drafters.ours.Drafter", lambda store, **settings: given.update(settings))
    expected = {"none": ("own",), "siblings": None, "earlier": None, "wrong_task": ("history", "siblings", "own")}
    for history, sources in expected.items():
        given.clear()
        make_drafter("treering_chain", plans(found)[history], HistoryStore(), min_acceptance=0.25)  # type: ignore[index]
        assert given.pop("sources", None) == sources
        assert given == OURS["treering_chain"] | {"min_acceptance": 0.25}
