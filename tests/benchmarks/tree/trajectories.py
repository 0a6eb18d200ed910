"""Generated stand-ins of the bench sets: a folder of generated trajectories, tasks and a small model."""

from pathlib import Path

from benchmarks.tree.cases import build_model
from benchmarks.tree.sets import FILES
from transformers import PreTrainedModel

from treering.data import AgentSpec, Trajectory, generate_trajectories, render, write_trajectories
from treering.train.loop.batches import TrainingTask, group_by_task
from treering.types import ModelShape

TINY = ModelShape(
    name="tiny",
    num_layers=1,
    hidden_size=16,
    num_heads=2,
    num_kv_heads=1,
    head_size=8,
    intermediate_size=24,
    vocab_size=4096,
)
"""Its vocabulary has every folded id."""


def tiny_model() -> PreTrainedModel:
    return build_model(shape=TINY)


def spec(*, seed: int, num_tasks: int = 4) -> AgentSpec:
    return AgentSpec(
        num_tasks=num_tasks,
        num_trials=3,
        vocab_size=9000,
        num_system_tokens=12,
        num_task_tokens=5,
        num_turns=3,
        num_action_tokens=4,
        num_observation_tokens=6,
        seed=seed,
    )


def trajectories(*, seed: int = 0, num_tasks: int = 4) -> list[Trajectory]:
    return list(generate_trajectories(spec(seed=seed, num_tasks=num_tasks)))


def tasks(*, seed: int = 0, num_tasks: int = 4) -> list[TrainingTask]:
    return group_by_task(render(trajectories(seed=seed, num_tasks=num_tasks)))


def write_folder(folder: Path) -> Path:
    """Write a folder like that of real data, with a generated file for each set but tool schemas."""
    (folder / "bench").mkdir()
    for seed, stem in enumerate(sorted(set(FILES.values()))):
        write_trajectories(folder / "bench" / f"{stem}.jsonl.gz", trajectories(seed=seed))
    return folder
