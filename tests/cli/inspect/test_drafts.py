import json
from functools import partial
from inspect import signature
from pathlib import Path
from typing import get_type_hints

import pytest

from tests.cli.inspect import runs
from tests.cli.inspect.runs import call
from tests.history.recordings import Line, trajectories
from treering.cli.inspect import drafts as module
from treering.cli.inspect.drafts import inspect_drafts, run
from treering.cli.inspect.inspect_options import InspectOptions
from treering.config import RlConfig
from treering.data import write_trajectories
from treering.history.draft.drafter import Drafter
from treering.history.features import SOURCES
from treering.report.content import drafter_settings

as_json = partial(runs.as_json, run)


def write_tokens(file: Path, *tasks: tuple[str, int]) -> Path:
    """Write rollouts of a task without epoch, mask or prompt: 21 tokens that begin at a given number."""
    lines = [{"task_id": task, "tokens": list(range(first, first + 21))} for task, first in tasks]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return file


def test_a_run_is_replayed_by_epoch_with_its_own_settings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = as_json(capsys, folder)
    assert (report["order"], report["num_rollouts"], report["num_prompts"], report["num_with_history"]) == (
        "epochs", 48, 8, 32,
    )  # fmt: skip
    _, second, third = (epoch["drafted"] for epoch in report["epochs"])
    assert second["history"]["tokens_per_step"] > 3
    assert second["all"]["tokens_per_step"] > 3
    # At most five drafted tokens, and one sampled.
    assert second["history"]["tokens_per_step"] <= 6
    assert second["other_prompt"]["num_accepted"] == second["own"]["num_accepted"] == 0
    assert third["history"]["num_accepted"] == 0
    assert {look["num_tokens"] for look in second.values()} == {second["own"]["num_steps"]}


def test_what_the_run_logged_stands_with_the_replay(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logged = [epoch["run"] for epoch in as_json(capsys, folder)["epochs"]]
    assert logged == [
        {"tokens_per_forward": 400 / 200, "acceptance": 0.5},
        {"tokens_per_forward": 1.0, "acceptance": None},
        None,
    ]
    files = sorted((folder / "rollouts").glob("*.jsonl"))
    assert [epoch["run"] for epoch in as_json(capsys, *files)["epochs"]] == [None] * 3


def test_without_epochs_the_lines_before_are_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_tokens(tmp_path / "set.jsonl", ("a", 100), ("b", 200), ("a", 100), ("b", 200), ("a", 100))
    report = as_json(capsys, file)
    assert (report["order"], report["num_with_history"], report["num_tokens"]) == ("file", 3, 105)
    assert [epoch["num_rollouts"] for epoch in report["epochs"]] == [2, 2, 1]
    first, second, third = (epoch["drafted"]["history"] for epoch in report["epochs"])
    assert (first["num_steps"], first["num_drafted"]) == (42, 0)
    assert second["num_tokens"] == 42
    assert max(second["tokens_per_step"], third["tokens_per_step"]) > 3
    assert report["later"]["history"]["num_steps"] == second["num_steps"] + third["num_steps"]


def test_the_speedup_counts_steps_and_verified_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_tokens(tmp_path / "set.jsonl", ("a", 100), ("a", 100))
    report = as_json(capsys, file, verify_cost=0.1)
    found = report["drafted"]["all"]
    assert found["num_drafted"] > 0
    assert report["verify_cost"] == 0.1
    assert found["speedup"] == pytest.approx(42 / (found["num_steps"] + 0.1 * found["num_drafted"]))
    assert as_json(capsys, file)["verify_cost"] == signature(Drafter).parameters["min_acceptance"].default


def test_prompts_with_one_rollout_have_nothing_to_draft_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_tokens(tmp_path / "set.jsonl", ("a", 100), ("b", 200))
    report = as_json(capsys, file)
    assert (report["num_with_history"], report["later"], report["drafted"]["all"]["speedup"]) == (0, None, 1.0)
    run(InspectOptions(files=[file]))
    assert "There is nothing to draft from: no prompt has an earlier rollout." in capsys.readouterr().out


def test_every_report_and_the_help_name_that_rehearsals_are_not_replayed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert as_json(capsys, folder)["note"].startswith("Rehearsals are not replayed, because a file does not hold")
    run(InspectOptions(files=[folder]))
    assert capsys.readouterr().out.splitlines()[-1] == module.NOTE
    (option,) = get_type_hints(InspectOptions, include_extras=True)["drafts"].__metadata__
    assert "Rehearsals are not replayed" in option.help


def test_a_sample_is_whole_prompts_and_is_reported(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = as_json(capsys, folder, max_rollouts=12)
    assert (report["num_rollouts"], report["num_recorded"], report["num_prompts"]) == (12, 48, 2)
    monkeypatch.setattr(module, "REPLAY_TOKENS", 100)
    run(InspectOptions(files=[folder]))
    assert "a sample of whole prompts; 48 rollouts are recorded" in capsys.readouterr().out


def test_settings_are_those_of_the_run(folder: Path) -> None:
    config = RlConfig.model_validate({"rl": {"num_steps": 1}, "history": {"drafts": "off", "sources": []}})
    assert inspect_drafts(InspectOptions(files=[folder]))["verify_cost"] == config.history.min_acceptance
    written = config.model_dump(mode="json")
    assert drafter_settings(written)["max_draft"] == config.history.max_draft
    assert drafter_settings(written)["sources"] == SOURCES, "a replay says what drafts would have done"


def test_unreadable_files_of_a_run_are_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = as_json(capsys, folder)
    (folder / "config.json").write_text("{", encoding="utf-8")
    with (folder / "metrics.jsonl").open("a") as log:
        log.write('{"step": 4, "ep')
    run(InspectOptions(files=[folder], json_output=True))
    out, err = capsys.readouterr()
    assert [epoch["run"] for epoch in json.loads(out)["epochs"]] == [epoch["run"] for epoch in whole["epochs"]]
    assert "config.json cannot be read" in err
    assert "metrics.jsonl has 1 line that cannot be read" in err


def test_an_epoch_without_sampled_tokens_does_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [Line(task="a", response=(1, 2, 3, 4)), Line(task="a", epoch=1, response=(1,), mask=(False,))]
    write_trajectories(tmp_path / "set.jsonl", trajectories(lines))
    assert [epoch["epoch"] for epoch in as_json(capsys, tmp_path / "set.jsonl")["epochs"]] == [0]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["a", "--drafts", "--why"], "ask for one"),
        (["a", "--drafts", "--show", "1"], "ask for one"),
        (["a", "--verify-cost", "0.4"], "add --drafts, or remove it"),
        (["a", "--drafts", "--verify-cost", "0"], "Invalid value for '--verify-cost'"),
        (["a", "--max-rollouts", "4"], "add --drafts, or remove it"),
        (["a", "--drafts", "--model-shape", "llama3-8b"], "--model-shape is for the report on sharing"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    arguments: list[str], part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, *arguments) == 2
    assert part in capsys.readouterr().err
