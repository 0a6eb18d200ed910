"""After a small edit a row follows its old trajectory again at once, at the right position."""

from typing import Any

import numpy as np
import pytest

from tests.history.reference import Row, draft_rows, likeliest_path, store_of
from treering.history.draft.drafter import Drafter

OLD = np.random.default_rng(0).permutation(900)[:40].tolist()
NEW = 5000
"""A token that the old trajectory does not have."""

EDITS = {
    "replaced": ((*OLD[:10], NEW), 11),
    "added": ((*OLD[:10], NEW), 10),
    "left out": (tuple(OLD[:10]), 11),
}
"""The rollout right behind the edit, and the place of the old trajectory at which it goes on."""


def stepped(rollout: tuple[int, ...], store: Any, **options: Any) -> Any:
    """Drafts of a row that has come to its rollout token by token."""
    drafter = Drafter(store, **options)
    for length in range(1, len(rollout)):
        drafter.propose(draft_rows([Row(rollout=rollout[:length])], row_ids=[0]))
    return drafter.propose(draft_rows([Row(rollout=rollout)], row_ids=[0]))


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("num_rollouts", [1, 3])
def test_one_token_behind_an_edit_the_old_trajectory_goes_on(edit: str, num_rollouts: int) -> None:
    rollout, at = EDITS[edit]
    store = store_of({"q": {0: [OLD] * num_rollouts}})
    rollout = (*rollout, OLD[at])
    for drafts in (stepped(rollout, store), Drafter(store).propose(draft_rows([Row(rollout=rollout)]))):
        path = likeliest_path(drafts)
        assert len(path) >= 4
        assert path == OLD[at + 1 : at + 1 + len(path)]


@pytest.mark.parametrize("edit", EDITS)
def test_the_aligned_place_wins_over_more_places_of_the_same_token(edit: str) -> None:
    rollout, at = EDITS[edit]
    # The token behind the edit stands in six more matches, each going on elsewhere.
    elsewhere = [[1000 + k, 1100 + k, OLD[at], 1200 + k, 1300 + k] for k in range(6)]
    store = store_of({"q": {0: [*elsewhere[:3], OLD, *elsewhere[3:]]}})
    rollout = (*rollout, OLD[at])
    for drafts in (stepped(rollout, store), Drafter(store).propose(draft_rows([Row(rollout=rollout)]))):
        assert likeliest_path(drafts)[:3] == OLD[at + 1 : at + 4]
        assert 1200 not in likeliest_path(drafts)


def test_the_edit_may_stand_anywhere() -> None:
    store = store_of({"q": {0: [OLD]}})
    for at in range(4, 30):
        for rollout in ((*OLD[:at], NEW, OLD[at + 1]), (*OLD[: at - 1], OLD[at], OLD[at + 1])):
            assert likeliest_path(stepped(rollout, store))[:2] == OLD[at + 2 : at + 4]
