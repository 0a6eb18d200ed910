"""What is said of data before it is trained."""

import numpy as np

from treering.cli.data_notes import data_notes
from treering.data import Message, Trajectory, render


def ids(*, mask: bool) -> Trajectory:
    tokens = np.array([5, 6], np.int32)
    return Trajectory(task_id=1, tokens=tokens, loss_mask=np.array([False, True]) if mask else None)


def test_token_ids_without_a_mask_are_counted() -> None:
    some = [ids(mask=True), ids(mask=False), ids(mask=False)]
    [note] = data_notes(some, render(some))
    assert note.startswith("2 of 3 trajectories of token ids have no loss_mask, so every token of theirs is trained")


def test_masked_ids_and_messages_are_nothing_to_say() -> None:
    chat = Trajectory(task_id=1, messages=(Message(role="assistant", content="a"),))
    assert data_notes([ids(mask=True), chat], render([ids(mask=True)])) == []
