"""The timed replay accepts the tokens that the rollout continues with, and no more."""

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.draft import speed as draft_speed

SMALL = {"NUM_PROMPTS": 2, "NUM_ROWS": 4, "NUM_TOKENS": 400, "PROMPT_SIZE": 8, "NUM_NODES": 50, "NUM_WARM": 1}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(draft_speed, name, value)


@pytest.mark.usefixtures("small")
def test_every_figure_is_measured_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "speed.json"
    monkeypatch.setattr("sys.argv", ["draft_speed", "--out", str(file)])
    draft_speed.main()
    report: dict[str, Any] = json.loads(file.read_text())
    assert json.loads(capsys.readouterr().out) == report
    assert report["tokens_per_step"] > 1
    assert report["drafted_per_step"] >= report["tokens_per_step"] - 1
    assert 0 < report["propose_us_per_row_p50"] <= report["propose_us_per_row_p95"]
    assert report["build_tokens_per_s"] > 0
    assert 8 <= report["bytes_per_token"] < 12
