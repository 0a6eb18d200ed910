import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from treering.data import RenderedTrajectory, Trajectory, render
from treering.data.cache.build_dataset import DataNotes, num_distinct
from treering.tree.forest import Forest


def ids(*, mask: bool) -> Trajectory:
    tokens = np.array([5, 6], np.int32)
    return Trajectory(task_id=1, tokens=tokens, loss_mask=np.array([False, True]) if mask else None)


def notes_of(trajectories: list[Trajectory], rendered: list[RenderedTrajectory] | None = None) -> list[str]:
    notes = DataNotes()
    notes.add(trajectories, render(trajectories) if rendered is None else rendered)
    return notes.sentences()


def test_token_ids_without_a_mask_are_counted() -> None:
    some = [ids(mask=True), ids(mask=False), ids(mask=False)]
    [note] = notes_of(some)
    assert note.startswith("2 of 3 trajectories of token ids have no loss_mask, so every token of theirs is trained")


@given(st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=8), min_size=1, max_size=8))
def test_distinct_tokens_are_those_of_a_forest(branches: list[list[int]]) -> None:
    arrays = [np.array(branch, np.int32) for branch in branches]
    assert num_distinct(arrays) == Forest.from_sequences(arrays).num_tokens
