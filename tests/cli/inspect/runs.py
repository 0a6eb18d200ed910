"""A small run of `treering train`, written without training, and calls of `treering inspect`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.runs import call as run
from tests.history.recordings import Line, trajectories
from treering import metrics
from treering.cli import run_folder
from treering.cli.inspect.inspect_options import InspectOptions
from treering.config import RlConfig
from treering.report.rollout_views import ROLLOUTS_FOLDER
from treering.rl.step_report import RolloutLog

NUM_PROMPTS = 8


def lines_of(epoch: int) -> list[Line]:
    """Return log lines: prompt p has two rollouts of 10 + 10 p tokens that no other has; epoch 2 has new ones."""
    shift = 10_000 if epoch == 2 else 0
    return [
        Line(
            task=f"p{prompt}",
            epoch=epoch,
            step=2 * epoch + 1 + prompt // 4,
            response=tuple(range(shift + 1000 * prompt, shift + 1000 * prompt + 10 + 10 * prompt)),
            reward=float(sample),
        )
        for prompt in range(NUM_PROMPTS)
        for sample in range(2)
    ]


def write_run(folder: Path) -> Path:
    """Write a run of three epochs of two steps, with metrics of the first two."""
    log = RolloutLog(folder / ROLLOUTS_FOLDER)
    for epoch in range(3):
        log.write(epoch, trajectories(lines_of(epoch)))
    rows = [(1, 0, 300, 3.0, 100, 0.5), (2, 0, 100, 1.0, 0, 0.0), (3, 1, 50, 1.0, 0, 0.0)]
    names = (metrics.EPOCH, metrics.NUM_SAMPLED, metrics.TOKENS_PER_FORWARD, metrics.NUM_DRAFTED, metrics.ACCEPTANCE)
    with metrics.Metrics([metrics.JsonlSink(folder / "metrics.jsonl")]) as sink:
        for step, *values in rows:
            sink.log(step, dict(zip(names, values, strict=True)))
    config = RlConfig.model_validate({"rl": {"num_steps": 6}, "history": {"max_draft": 5, "sources": ["history"]}})
    run_folder.write_settings(config, config.run.model_copy(update={"dir": folder}), 1)
    return folder


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Return the exit code of `treering inspect` with these arguments."""
    return run(monkeypatch, "inspect", *arguments)


def as_json(
    report: Callable[[InspectOptions], None], capsys: pytest.CaptureFixture[str], *files: Path, **options: Any
) -> dict[str, Any]:
    """Return the JSON report on files."""
    report(InspectOptions(files=list(files), json_output=True, **options))
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found
