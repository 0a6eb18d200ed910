"""Tiny tasks, loops and checkpoint folders for tests of training."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from tests.models import VOCAB, build
from treering.config.optim import OptimOptions
from treering.config.sft_config import SftOptions
from treering.data import AgentSpec, generate_trajectories, render
from treering.train.loop.batches import TrainingTask, group_by_task
from treering.train.loop.checkpoint import CheckpointStore
from treering.train.loop.sft_loop import SftLoop

IDENTITY = {"model.hidden_size": 32, "data": "generated", "train.seed": 0}


def tiny_tasks(num_tasks: int = 5) -> list[TrainingTask]:
    """Return generated agent tasks of three short trials each, with trees of 60 to 200 tokens."""
    spec = AgentSpec(
        num_tasks=num_tasks,
        num_trials=3,
        vocab_size=VOCAB,
        num_system_tokens=10,
        num_task_tokens=6,
        num_turns=3,
        num_action_tokens=6,
        num_observation_tokens=6,
    )
    return group_by_task(render(list(generate_trajectories(spec))))


def tiny_loop(model: PreTrainedModel | None = None, optim: OptimOptions | None = None, **options: object) -> SftLoop:
    """Return a loop over `tiny_tasks` with two trees per step unless the options override it."""
    chosen = SftOptions(**({"trees_per_step": 2} | options))  # type: ignore[arg-type]
    return SftLoop(
        build() if model is None else model,
        tiny_tasks(),
        optim=OptimOptions(learning_rate=1e-2, warmup_steps=2, weight_decay=0.1) if optim is None else optim,
        options=chosen,
    )


def store(folder: Path, **options: object) -> CheckpointStore:
    """Return a checkpoint store of the run `IDENTITY`."""
    return CheckpointStore(**({"folder": folder, "identity": IDENTITY} | options))  # type: ignore[arg-type]


def tensors_of(loop: SftLoop) -> dict[str, torch.Tensor]:
    """Copy every tensor that a step depends on: weights, AdamW's moments and counts, torch's random state."""
    state = loop.state()["optimizer"]["state"]
    moments = {f"{i}.{name}": value for i, values in state.items() for name, value in values.items()}
    weights = loop.model.state_dict()
    return {name: value.clone() for name, value in {**weights, **moments, "random": torch.get_rng_state()}.items()}


def assert_bitwise_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name
