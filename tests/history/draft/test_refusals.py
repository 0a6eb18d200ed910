"""What a drafter refuses, by message; a refused call changes nothing."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.history.reference import Row, draft_rows, store_of
from treering.errors import ConfigError, InputError, StateError
from treering.history.draft.drafter import Drafter
from treering.history.store.store import HistoryStore
from treering.history.types import DraftRows

LINE, FORK = [[1, 2, 3]], [[1, 2, 3], [1, 4]]


def drafter_of(rollouts: list[list[int]]) -> Drafter:
    return Drafter(store_of({"q": {0: rollouts}}), min_acceptance=1e-6, sources=("history",))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_draft": 0}, "max_draft of a drafter is a whole number from 1 to 64, got 0; correct it"),
        ({"max_live_tokens": 15}, "max_live_tokens of a drafter is a whole number from 16 .* got 15"),
        ({"max_other_tokens": -1}, "max_other_tokens of a drafter is a whole number from 0 .* got -1"),
        ({"min_acceptance": 0.0}, r"min_acceptance is a probability in \(0, 1\], got 0.0"),
        ({"min_acceptance": "0.1"}, r"in \(0, 1\], got '0.1'"),
        ({"shape": "bush"}, "shape is one of tree, chain, got 'bush'; choose one"),
        ({"sources": ("histroy",)}, "got .'histroy'"),
    ],
)
def test_a_setting_out_of_range_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Drafter(HistoryStore(), **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": np.zeros((1, 4), np.int64)}, r"int32 of shape \(1, L\), got int64"),
        ({"tokens": np.zeros(4, np.int32)}, r"got int32 of shape \(4,\)"),
        ({"groups": np.zeros(2, np.int64)}, r"groups is int64 of shape \(1,\).*\(2,\)"),
        ({"max_drafts": np.zeros(1, np.int32)}, r"max_drafts is int64 .* got int32"),
        ({"row_ids": [7]}, r"row_ids is int64 .* got list .* convert it"),
        ({"tokens": [[1]]}, r"int32 of shape \(1, L\), got list"),
        ({"prompt_ids": [["a"]]}, r"prompt_ids are strings or integers, got \[\['a'\]\]; convert them"),
    ],
)
def test_rows_of_other_shapes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(draft_rows([Row()]), **changes)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_tokens", 6), ("num_tokens", 1), ("num_prompt_tokens", -1), ("num_prompt_tokens", 3), ("max_drafts", -1)],
)
def test_counts_that_contradict_are_refused_before_anything_is_read(name: str, value: int) -> None:
    rows: DraftRows = draft_rows([Row(), Row()], num_spare=3)
    getattr(rows, name)[1] = value
    drafter = drafter_of(LINE)
    with pytest.raises(InputError, match="in row 1; correct the counts"):
        drafter.propose(rows)
    assert drafter.propose(draft_rows([Row(rollout=(1,))])).tokens.tolist() == [2, 3]


def test_observe_belongs_to_the_latest_propose() -> None:
    drafter = drafter_of(LINE)
    first, second = (draft_rows([Row(rollout=(1,))]) for _ in range(2))
    none = np.zeros(1, np.int64)
    with pytest.raises(StateError, match="propose first"):
        drafter.observe(first, none)
    drafter.propose(first)
    drafter.propose(second)
    with pytest.raises(StateError, match="the latest propose"):
        drafter.observe(first, none)
    drafter.observe(second, none)
    with pytest.raises(StateError, match="once"):
        drafter.observe(second, none)


@pytest.mark.parametrize(
    ("accepted", "ended", "leaves", "message"),
    [
        (np.array([4]), None, None, r"got \[4\] of \[3\]; count drafted tokens only"),
        (np.array([1, 1]), None, None, r"all of shape \(1,\), got int64 of shape \(2,\)"),
        (np.array([1.0]), None, None, "got float64"),
        (np.array([1]), np.array([True, False]), None, r"bool of shape \(2,\)"),
        (np.array([1]), None, np.array([0, 0]), r"int64 of shape \(2,\)"),
        # Numbers 0 and 1 are the path 2 3, number 2 is 4.
        (np.array([1]), None, np.array([1]), r"as deep as the row's accepted tokens.*got \[1\] for \[1\] of \[3\]"),
        (np.array([0]), None, np.array([0]), r"got \[0\] for \[0\]"),
        (np.array([1]), None, np.array([-2]), r"got \[-2\] for \[1\]"),
    ],
)
def test_a_wrong_observation_is_refused_and_nothing_is_learnt(
    accepted: Any, ended: Any, leaves: Any, message: str
) -> None:
    drafter, rows = drafter_of(FORK), draft_rows([Row(rollout=(1,))])
    before = drafter.state()
    assert drafter.propose(rows).parents.tolist() == [-1, 0, -1]
    with pytest.raises(InputError, match=message):
        drafter.observe(rows, accepted, ended, leaves)
    assert all((drafter.state()[name] == values).all() for name, values in before.items())
    drafter.observe(rows, np.array([1]), None, np.array([0]))
    assert (drafter.state()["weights"] != before["weights"]).any()
