"""Of a recording the last samples run in groups, with those before as history; figures are written."""

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.draft import speed_recorded as draft_speed_recorded
from benchmarks.draft.drafters.lanes import Lanes
from benchmarks.draft.recording import read_recording
from benchmarks.draft.replay import Tally

from treering.history.draft.drafter import Drafter
from treering.history.store.store import HistoryStore
from treering.history.types import DraftRows, Drafts

RUN, TOOL = [10, 11, 12, 13], [50, 51]
MASK = [True] * 4 + [False] * 2 + [True] * 4


class Watched(Drafter):
    """Notes the groups of the rows that it is given."""

    def __init__(self, store: HistoryStore) -> None:
        super().__init__(store)
        self.groups: list[list[int]] = []

    def propose(self, rows: DraftRows) -> Drafts:
        self.groups.append(rows.groups.tolist())
        return super().propose(rows)


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
    store, plan = draft_speed_recorded.split(recording)
    assert plan.order.tolist() == [3, 4, 5, 9, 10, 11]
    assert plan.prompts.tolist() == [0, 0, 0, 1, 1, 1]
    assert store.num_tokens == 6 * 10
    assert plan.sources(0).tolist() == [0, 1, 2]
    assert plan.sources(5).tolist() == [6, 7, 8]


@pytest.mark.parametrize(("has_groups", "expected"), [(True, [0, 0, 0, 1, 1, 1]), (False, [0, 1, 2, 3, 4, 5])])
def test_rows_of_a_task_are_siblings_where_groups_are_told(
    tmp_path: Path, has_groups: bool, expected: list[int]
) -> None:
    recording = read_recording(write(tmp_path / "some.jsonl"), None)
    store, plan = draft_speed_recorded.split(recording)
    drafter = Watched(store)
    groups = plan.prompts if has_groups else None
    Lanes(recording, plan, range(6), 6, groups=groups).run(drafter, Tally(), lambda _: None)
    assert drafter.groups[0] == expected


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
    assert figures["num_calls"] >= 2
    assert 1 < figures["tokens_per_step"] <= 4
    assert figures["drafted_per_step"] > 0
    assert 0 < figures["us_per_row"] <= figures["us_per_row_p95"]
