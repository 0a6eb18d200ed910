"""Law 2 on real trajectories of agents, search trees and samples, tokenized as users tokenize them."""

from pathlib import Path

import numpy as np
import pytest

from tests.models import build_float64
from tests.train.flat import Batch
from tests.train.gradient.test_backward import assert_step_is_exact
from treering.data import RenderedTrajectory, read_trajectories, render

VOCAB = 512
MAX_FLAT_TOKENS = 2_000
FILES = ["hotpotqa_react_reflexion", "qwen25math_maj8", "tot_game24_bfs"]


def first_task(rendered: list[RenderedTrajectory]) -> list[RenderedTrajectory]:
    """Return trajectories of the first task: at least two, and as many as fit a test."""
    task = [trajectory for trajectory in rendered if trajectory.task_id == rendered[0].task_id]
    ends = np.cumsum([trajectory.tokens.size for trajectory in task])
    return task[: max(2, int(np.searchsorted(ends, MAX_FLAT_TOKENS)))]


@pytest.mark.parametrize("name", FILES)
def test_a_real_task_trains_like_its_flat_sequences(name: str, real_data: Path) -> None:
    trajectories = read_trajectories(real_data / "small" / f"{name}.jsonl")
    task = first_task(render(trajectories, real_data / "tokenizer", "plain"))
    batch = Batch(
        groups=[[(trajectory.tokens % VOCAB).tolist() for trajectory in task]],
        masks=[trajectory.loss_mask.astype(int).tolist() for trajectory in task],
        advantages=[1.0 - i for i in range(len(task))],
        old_logprobs=[[-6.0] * trajectory.tokens.size for trajectory in task],
    )
    model = build_float64(vocab_size=VOCAB, max_position_embeddings=16_384)
    assert_step_is_exact(model, batch, "dapo", "token_mean")
