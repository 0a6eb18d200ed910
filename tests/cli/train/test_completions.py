"""What `metrics.log_completions` shows of a step: rollouts from the worst reward to the best, as bounded texts."""

from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.cli.runs import Commands
from treering.cli.train_report import MAX_CHARACTERS, completions_of
from treering.cli.train_task import TaskSource
from treering.data import Trajectory
from treering.rl.tasks.sums import ChainedSums

SOURCE = TaskSource(task=ChainedSums(2))


def rollout(text: str, reward: float, num_prompt: int = 2) -> Trajectory:
    tokens = ChainedSums.encode(text)
    return Trajectory(task_id="a", tokens=tokens, loss_mask=np.arange(tokens.size) >= num_prompt, reward=reward)


@pytest.mark.parametrize(("num_rows", "expected"), [(1, [0.1]), (3, [0.1, 0.3, 0.5]), (9, [0.1, 0.2, 0.3, 0.4, 0.5])])
def test_rows_are_spread_from_the_worst_reward_to_the_best(num_rows: int, expected: list[float]) -> None:
    group = [rollout("1+2=", reward) for reward in (0.4, 0.1, 0.5, 0.3, 0.2)]
    rows = completions_of(group, num_rows, SOURCE)
    assert [row.reward for row in rows] == expected
    assert {(row.prompt, row.completion) for row in rows} == {("1+", "2=")}


def test_texts_are_bounded() -> None:
    (row,) = completions_of([rollout("1+" + "2" * 9000 + "=", 1.0)], 1, SOURCE)
    assert len(row.completion) == MAX_CHARACTERS + len(" […] ")
    assert row.completion.endswith("2=")


def test_a_run_logs_them_in_its_first_step_and_every_tenth(commands: Commands) -> None:
    sinks = 'metrics.sinks=["jsonl", "tensorboard"]'
    commands.done("train", sinks, "metrics.log_completions=2", "rl.num_steps=11")
    events = EventAccumulator(str(Path("out") / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Tensors("completions/text_summary")] == [1, 10]
    assert "metrics.log_completions" in commands.refused("sft", "metrics.log_completions=2")
