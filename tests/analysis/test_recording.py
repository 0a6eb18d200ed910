import numpy as np
import pytest

from tests.history.recordings import Line, recording, trajectories
from treering.analysis.recording import Recorded, record, some_prompts
from treering.data import Renderer, Trajectory
from treering.errors import InputError


def test_runs_and_positions_are_those_of_the_worked_example() -> None:
    recorded = recording(Line(prompt=(5, 6), response=(7, 8, 9, 4), mask=(True, True, False, True)))
    assert (recorded.offsets.tolist(), recorded.starts.tolist(), recorded.lengths.tolist()) == ([0, 6], [2], [3])
    assert recorded.run_ends.tolist() == [0, 1, 4, 4, 4, 6]
    assert recorded.nexts.tolist() == [2, 2, 2, 3, 5, 5, 6]
    assert recorded.response(0).tolist() == [7, 8, 9, 4]


def test_rollouts_stand_by_epoch_and_step_and_those_without_a_sampled_token_are_left_out() -> None:
    recorded = recording(
        Line(epoch=1, step=3, response=(1,)),
        Line(epoch=0, step=2, response=(2,), reward=0.5),
        Line(epoch=0, step=1, response=(3,), task="r"),
        Line(epoch=0, step=1, response=(4,), mask=(False,)),
        Line(epoch=0, step=1, response=(5,)),
    )
    assert [recorded.response(i).tolist() for i in range(4)] == [[3], [5], [2], [1]]
    assert (recorded.epochs.tolist(), recorded.steps.tolist()) == ([0, 0, 0, 1], [1, 1, 2, 3])
    assert [recorded.prompt_ids[i] for i in recorded.prompts] == ["r", "q", "q", "q"]
    assert recorded.rewards.tolist()[2] == 0.5
    assert np.isnan(recorded.rewards[[0, 1, 3]]).all()


def test_steps_count_only_where_every_rollout_has_one() -> None:
    recorded = recording(Line(step=2, response=(1,)), Line(step=None, response=(2,)), Line(step=1, response=(3,)))
    assert recorded.steps.tolist() == [0, 0, 0]
    assert [recorded.response(i).tolist() for i in range(3)] == [[1], [2], [3]]


def test_taking_rollouts_equals_recording_only_these() -> None:
    random = np.random.default_rng(0)
    lines = []
    for number in range(12):
        response = tuple(random.integers(0, 9, random.integers(1, 9)).tolist())
        mask = (True, *(random.random(len(response) - 1) < 0.6).tolist())
        lines.append(Line(task="abc"[number % 3], epoch=number // 6, response=response, mask=mask, reward=number))
    chosen = [0, 3, 4, 7, 11]
    taken = recording(*lines, choose=lambda whole: whole.taking(np.array(chosen)))
    alone = recording(*(lines[i] for i in chosen))
    for name in Recorded.__slots__:
        if name not in ("prompts", "prompt_ids"):
            np.testing.assert_array_equal(getattr(taken, name), getattr(alone, name), strict=True)
    assert [taken.prompt_ids[i] for i in taken.prompts] == [lines[i].task for i in chosen]


def test_a_sample_has_whole_prompts_and_all_their_epochs() -> None:
    lines = [
        Line(task=f"{task}", epoch=epoch, response=(1, 2)) for epoch in range(3) for task in range(20) for _ in "ab"
    ]
    sample = recording(*lines, choose=lambda whole: some_prompts(whole, weights=np.ones(120, np.int64), limit=30))
    assert sample.num_rollouts == 30
    assert np.bincount(sample.epochs).tolist() == [10, 10, 10]
    assert set(np.bincount(sample.prompts).tolist()) == {0, 6}
    for limit, expected in ((30, 18), (240, 120)):
        found = recording(*lines, choose=lambda whole, n=limit: some_prompts(whole, weights=whole.lengths, limit=n))
        assert found.num_rollouts == expected


def test_rollouts_without_an_epoch_are_refused_with_their_number() -> None:
    found = trajectories([Line(response=(1,)), Line(response=(2,))])
    found[1] = Trajectory(task_id="b", tokens=np.array([1], np.int32))
    with pytest.raises(InputError, match=r"trajectory 2 \(task 'b'\) has no \"epoch\"; write"):
        record(found, Renderer(tokenizer=None).render(found))


def test_a_recording_without_sampled_tokens_is_refused() -> None:
    with pytest.raises(InputError, match="none of 1 rollouts has any; mark them"):
        recording(Line(response=(1,), mask=(False,)))


def test_in_file_order_the_rollouts_of_a_prompt_are_its_epochs() -> None:
    lines = [Line(task=task, epoch=3, step=step, response=(1, 2)) for step, task in ((2, "a"), (1, "b"), (0, "a"))]
    found = trajectories(lines)
    recorded = record(found, Renderer(tokenizer=None).render(found), in_file_order=True)
    assert (recorded.epochs.tolist(), recorded.prompts.tolist()) == ([0, 0, 1], [0, 1, 0])
