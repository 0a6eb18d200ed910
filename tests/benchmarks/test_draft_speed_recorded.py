"""Rows of a recording grow by what is emitted and given, and begin again behind their ends; figures are written."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks import draft_speed_recorded
from benchmarks.draft_recording import read_recording

RUN, TOOL = [10, 11, 12, 13], [50, 51]
MASK = [True] * 4 + [False] * 2 + [True] * 4


def write(file: Path, num_tasks: int = 2, num_samples: int = 6) -> Path:
    """Rollouts of 4 sampled tokens, 2 given ones and 4 sampled ones behind prompts of 2, of 6 samples a task."""
    lines = []
    for task in range(num_tasks):
        for trial in range(num_samples):
            tokens = [90, 91, *RUN, *TOOL, *[20 + 4 * task + k for k in range(4)]]
            line = {"task_id": f"q{task}", "trial": trial, "tokens": tokens, "loss_mask": [False] * 2 + MASK}
            lines.append(json.dumps({"format": "chat", **line}))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def test_the_last_samples_of_a_task_run_and_those_before_are_its_history(tmp_path: Path) -> None:
    recording = read_recording(write(tmp_path / "some.jsonl"), None)
    store, rollouts = draft_speed_recorded.split(recording)
    assert rollouts.tolist() == [3, 4, 5, 9, 10, 11]
    assert store.num_tokens == 6 * 10


def test_rows_go_on_behind_what_was_given_and_the_next_rollout_begins_in_a_row_that_ended(tmp_path: Path) -> None:
    recording = read_recording(write(tmp_path / "some.jsonl"), None)
    running = draft_speed_recorded.Running(recording, np.array([3, 10, 11]), 2)
    assert running.rows.num_tokens.tolist() == [2, 2]
    assert running.move(np.array([3, 4]))
    assert running.rows.num_tokens.tolist() == [5, 8]
    before = running.rows
    assert running.move(np.array([1, 4]))
    assert running.rows.num_tokens.tolist() == [8, 2]
    assert running.rows is not before
    assert running.rows.row_ids is not None
    assert running.rows.row_ids.tolist() == [3, 11]
    assert running.rows.tokens[1, :6].tolist() == [90, 91, *RUN]
    assert not running.move(np.array([4, 4]))


def test_every_figure_is_measured_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "speed.json"
    monkeypatch.setattr("sys.argv", ["x", str(write(tmp_path / "some.jsonl")), "--out", str(out)])
    draft_speed_recorded.main()
    report: dict[str, Any] = json.loads(out.read_text())
    assert json.loads(capsys.readouterr().out) == report
    figures = report["files"]["some"]
    assert figures["num_rows"] == 6
    assert 1 < figures["tokens_per_step"] <= 4
    assert figures["drafted_per_step"] > 0
    assert 0 < figures["propose_us_per_row_p50"] <= figures["propose_us_per_row_p95"]
