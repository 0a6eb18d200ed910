"""Small recordings on file, a rival without a process, and the rows of a report, for `python -m benchmarks draft`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.draft.drafters import arctic as draft_arctic

from treering.data import Trajectory, write_trajectories

RATES = {"tokens_per_step", "drafted_per_step", "precision", "us_per_row", "us_per_row_p95", "bytes_per_token"}
NUM_SAMPLES = 6


def write(folder: Path, *, epochs: int | None = None, rewards: bool = False) -> Path:
    """Write two tasks with six samples each (in each epoch) that resemble one another."""
    generator = np.random.default_rng(0)
    given = []
    for task in ("a", "b"):
        pattern = generator.integers(0, 500, 40).astype(np.int32)
        for epoch in range(epochs or 1):
            for sample in range(NUM_SAMPLES):
                tokens = np.where(generator.random(40) < 0.1, generator.integers(0, 500, 40), pattern).astype(np.int32)
                reward = float(sample) if rewards else None
                mask = np.arange(40) >= 4
                given.append(
                    Trajectory(
                        task_id=task, tokens=tokens, loss_mask=mask, reward=reward, epoch=epoch if epochs else None
                    )
                )
    file = folder / "rollouts.jsonl.gz"
    write_trajectories(file, given)
    return file


def rival(monkeypatch: pytest.MonkeyPatch, rates: list[tuple[float, float]]) -> None:
    """Pretend that Arctic is installed and has rows of these tokens and drafted tokens per step, on every history."""
    rows = [{"tokens_per_step": tokens, "drafted_per_step": drafted} for tokens, drafted in rates]
    given = [dict.fromkeys(RATES, 1.0) | row | {"config": {"number": i}} for i, row in enumerate(rows)]
    monkeypatch.setattr(draft_arctic, "is_installed", lambda: True)
    monkeypatch.setattr(draft_arctic, "replay_arctic", lambda *_: given)


def rows_of(report: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["drafter"], row["history"]): row for row in report["drafters"]}
