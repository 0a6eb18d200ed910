"""The examples of environments train, and their episodes have the expected trees."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from treering.cli.main import main
from treering.rl.environments.environment import find_environment

FOLDER = Path(__file__).parents[2] / "examples" / "environments"


@pytest.mark.parametrize(("name", "num_branches"), [("two_seats", 2), ("notes", 3)])
def test_an_example_trains(name: str, num_branches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["treering", "train", str(FOLDER / f"{name}.toml"), "rl.num_steps=2", "rl.group_size=4"]
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "rewards/branches" in row]
    assert [row["rewards/branches"] for row in rows] == [num_branches] * 2


def test_the_calculator_writes_solved_sums_and_offers_a_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(FOLDER / "calculator.py"))["write_solved"]()
    solved = [json.loads(line) for line in (tmp_path / "runs/calculator_data/solved.jsonl").read_text().splitlines()]
    environment = find_environment("calculator.py:environment", [FOLDER])
    assert [tool["function"]["name"] for tool in environment.tools] == ["add"]
    assert not {line["task_id"] for line in solved} & {task.id for task in environment.tasks}
    shutil.rmtree(tmp_path / "runs")
