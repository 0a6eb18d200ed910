"""Folders of runs as they are on disk, written by hand."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from treering.data import Trajectory, write_trajectories

CONFIG = {
    "num_steps": 8,
    "rl": {},
    "task": {"kind": "prompts"},
    "history": {"drafts": "on", "sources": ["history", "siblings", "own", "others"], "max_draft": 8},
}


def row(step: int, **values: float | str) -> dict[str, Any]:
    """Return a metrics row, two steps an epoch, with figures that differ from step to step."""
    return {
        "step": step,
        "train/epoch": (step - 1) // 2,
        "train/loss": 0.125 * step,
        "train/num_tokens": 100 + step,
        "train/num_branch_tokens": 400 + step,
        "train/num_branches": 4,
        "reward/mean": 0.0625 * step,
        "reward/num_errors": 1,
        "rollout/num_rollouts": 6,
        "rollout/num_empty": 1,
        "rollout/length_mean": 10.5 + step,
        "rollout/num_sampled": 60 * step,
        "rollout/tokens_per_forward": 1.0 + step,
        "rollout/num_drafted": 40 * step,
        "rollout/acceptance": 0.5,
        "time/step_s": 4.0,
        "time/rollout_s": 2.0,
        "time/train_s": 1.0,
        "time/update_s": 0.25,
        "time/sampled_per_s": 30.0 * step,
        **values,
    }


def rollout(prompt: str, epoch: int, tokens: list[int], **given: Any) -> Trajectory:
    """Return a rollout after a prompt of two tokens."""
    mask = np.arange(len(tokens)) >= 2
    return Trajectory(
        task_id=prompt, epoch=epoch, step=2 * epoch + 1, tokens=np.array(tokens, np.int32), loss_mask=mask, **given
    )


def write_run(folder: Path, num_steps: int = 4, config: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Write the folder of a run of that many steps, with two prompts of three rollouts an epoch; return its rows."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row(step) for step in range(1, num_steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    (folder / "rollouts").mkdir()
    for epoch in range((num_steps + 1) // 2):
        write_trajectories(folder / "rollouts" / f"epoch-{epoch:03d}.jsonl", group("a", epoch) + group("b", epoch))
    return rows


def write_timeline(folder: Path, num_steps: int) -> list[dict[str, Any]]:
    """Write the spans of a run with two workers, of which the second is idle half of the time, and a trainer."""
    spans = [
        {"step": step, "worker": worker, "started_s": at, "ended_s": at + size, "busy_s": size, "num_rollouts": 3}
        for step in range(1, num_steps + 1)
        for at in [1_000.0 + 4 * step]
        for worker, size in ((0, 3.0), (1, 1.5), (None, 0.5))
    ]
    (folder / "timeline.jsonl").write_text("".join(json.dumps(span) + "\n" for span in spans))
    return spans


def group(prompt: str, epoch: int) -> list[Trajectory]:
    """Return three rollouts that share their prompt, and two of them four tokens more; the same in every epoch."""
    start = [1, 2] if prompt == "a" else [3, 4]
    ends = [[10, 11, 12, 13, 20, 21, 22], [10, 11, 12, 13, 30, 31], [40, 41, 42, 43, 44]]
    rewards, advantages = (1.0, 0.5, 0.0), (1.25, 0.0, -1.25)
    return [
        rollout(prompt, epoch, [*start, *end], reward=reward, advantage=advantage)
        for end, reward, advantage in zip(ends, rewards, advantages, strict=True)
    ]
