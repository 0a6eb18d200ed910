import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.cli.inspect import runs
from tests.cli.inspect.runs import NUM_PROMPTS, call
from tests.history.recordings import Line, trajectories
from treering.cli.inspect.history import inspect_history, run
from treering.cli.inspect.options import InspectOptions
from treering.cli.inspect.rollouts import rollout_files
from treering.data import Message, Trajectory, write_trajectories
from treering.errors import InputError

as_json = partial(runs.as_json, run, groups=4)


def test_a_run_is_measured_epoch_by_epoch(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = as_json(capsys, folder)
    num_tokens = 2 * sum(10 + 10 * prompt for prompt in range(NUM_PROMPTS))
    assert (report["num_rollouts"], report["num_prompts"], report["num_tokens"]) == (48, NUM_PROMPTS, 3 * num_tokens)
    first, second, third = report["epochs"]
    assert [(one["epoch"], one["before"]) for one in report["epochs"]] == [(0, None), (1, 0), (2, 1)]
    assert first["reuse"]["history"] is first["reuse"]["other_prompt"] is first["ranks"] is first["excess"] is None
    # All but the first three tokens of a rollout return, and in the last epoch nothing does.
    rate = (num_tokens - 3 * 16) / num_tokens
    assert second["reuse"]["history"]["rate"] == second["excess"] == pytest.approx(rate)
    assert second["reuse"]["siblings"]["rate"] == third["reuse"]["siblings"]["rate"] == pytest.approx(rate)
    assert second["reuse"]["other_prompt"]["rate"] == second["reuse"]["own"]["rate"] == 0
    assert third["reuse"]["history"]["rate"] == third["excess"] == 0
    assert second["reuse"]["history"]["num_hits"] == [0, 2, 0, 14]
    assert second["reuse"]["history"]["hit_tokens"] == [0, 14, 0, num_tokens - 3 * 16 - 14]


def test_lengths_that_stay_rank_as_predicted_and_those_of_another_prompt_do_not(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = as_json(capsys, folder)["epochs"][1]["ranks"]
    assert ranks["groups"]["matrix"] == np.eye(4).tolist()
    assert (ranks["groups"]["accurate"], ranks["groups"]["num_groups"]) == (1.0, 4)
    assert (ranks["calibration"]["sigma"], ranks["calibration"]["spearman"]) == (0.0, pytest.approx(1.0))
    assert ranks["other_prompt"]["accurate"] < 1.0


def test_predictions_are_medians_of_the_epoch_before_and_reach_as_far_as_its_longest(tmp_path: Path) -> None:
    lengths = {("a", 0): (4, 5, 12), ("b", 0): (8, 8, 9), ("a", 1): (13, 1, 1), ("b", 1): (2, 2, 2)}
    lines = [
        Line(task=task, epoch=epoch, response=(1,) * count)
        for (task, epoch), counts in lengths.items()
        for count in counts
    ]
    write_trajectories(tmp_path / "set.jsonl", trajectories(lines))
    ranks = inspect_history(InspectOptions(files=[tmp_path / "set.jsonl"], groups=2)).epochs[1].ranks
    assert ranks is not None
    # Medians 5 and 8: the rollouts of a are predicted short. Its 13 is the longest, and within 1.1 times its 12.
    assert ranks.groups.matrix.tolist() == [[2 / 3, 1 / 3], [0, 1]]
    assert (ranks.groups.within_reach, ranks.groups.migrated) == (pytest.approx(1 / 6), 0)
    assert ranks.calibration.bias == pytest.approx(np.log([13 / 5, 1 / 5, 1 / 5, 1 / 4, 1 / 4, 1 / 4]).mean())


def test_a_run_its_rollouts_and_its_files_are_one_recording(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted((folder / "rollouts").glob("*.jsonl"))
    assert rollout_files(folder) == rollout_files(folder / "rollouts") == files
    reports = [as_json(capsys, *paths) for paths in ([folder], [folder / "rollouts"], files)]
    assert reports[0]["epochs"][1]["reuse"] == reports[1]["epochs"][1]["reuse"] == reports[2]["epochs"][1]["reuse"]


def test_a_sample_is_whole_prompts_and_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = as_json(capsys, folder, max_rollouts=12)
    assert (report["num_rollouts"], report["num_recorded"], report["num_prompts"]) == (12, 48, 2)
    assert [epoch["num_rollouts"] for epoch in report["epochs"]] == [4, 4, 4]
    run(InspectOptions(files=[folder], groups=4, max_rollouts=12))
    out = " ".join(capsys.readouterr().out.split())
    assert "a sample of whole prompts, the same ones in every epoch; 48 rollouts are recorded" in out


def test_the_excess_is_over_the_better_control(tmp_path: Path) -> None:
    # Of 16 tokens 13 return from history, 5 6 7 8 repeat twice in the rollout itself, and another prompt has none.
    once = (5, 6, 7, 8) * 4
    lines = [Line(task="a", epoch=epoch, response=once) for epoch in range(2)]
    lines += [Line(task="b", epoch=epoch, response=tuple(range(100, 116))) for epoch in range(2)]
    write_trajectories(tmp_path / "set.jsonl", trajectories(lines))
    second = inspect_history(InspectOptions(files=[tmp_path / "set.jsonl"])).epochs[1]
    # Of its own past: at 7 four tokens from place 3 on, at 11 the five that are left.
    assert second.excess == pytest.approx((26 - (4 + 5)) / 32)


def test_prompts_that_come_and_go_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [Line(task="a", response=(1, 2, 3, 4)), Line(task="a", epoch=1, response=(1, 2, 3, 4))]
    write_trajectories(tmp_path / "set.jsonl", trajectories([*lines, Line(task="b", epoch=1, response=(1,) * 5)]))
    second = as_json(capsys, tmp_path / "set.jsonl")["epochs"][1]
    assert (second["num_rollouts"], second["num_left_out"], second["excess"]) == (1, 1, None)
    assert (second["reuse"]["history"]["rate"], second["reuse"]["other_prompt"]) == (0.25, None)
    assert second["ranks"]["other_prompt"] is None
    run(InspectOptions(files=[tmp_path / "set.jsonl"]))
    assert "1 rollouts are left out of reuse and ranks" in " ".join(capsys.readouterr().out.split())


def test_epochs_without_a_common_prompt_are_shown_without_history(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [Line(task="a", response=(1, 2, 3, 4)), Line(task="b", epoch=1, response=(1, 2, 3, 4))]
    write_trajectories(tmp_path / "set.jsonl", trajectories(lines))
    second = as_json(capsys, tmp_path / "set.jsonl")["epochs"][1]
    assert (second["num_rollouts"], second["num_left_out"], second["ranks"]) == (0, 1, None)
    assert set(second["reuse"].values()) == {None}
    run(InspectOptions(files=[tmp_path / "set.jsonl"]))
    assert "there is nothing to compare" in capsys.readouterr().out


def test_a_folder_without_rollouts_is_refused_with_the_setting_that_writes_them(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r'has none; run it with run.rollouts = "on"'):
        inspect_history(InspectOptions(files=[tmp_path]))


def test_messages_are_rendered_and_need_an_epoch(tmp_path: Path, real_data: Path) -> None:
    messages = (
        Message(role="user", content="2+2="),
        Message(role="assistant", content="It is 4, as two and two are four."),
    )
    epochs = [Trajectory(task_id=1, messages=messages, format="raw", epoch=epoch) for epoch in range(2)]
    write_trajectories(tmp_path / "set.jsonl", epochs)
    options = InspectOptions(files=[tmp_path / "set.jsonl"], tokenizer=str(real_data / "tokenizer"), template="plain")
    report = inspect_history(options)
    reuse = report.epochs[1].reuse["history"]
    assert reuse is not None
    assert reuse.num_copied == reuse.num_tokens - 3 == report.num_tokens // 2 - 3
    write_trajectories(tmp_path / "set.jsonl", [Trajectory(task_id=1, messages=messages, format="raw")])
    with pytest.raises(InputError, match='has no "epoch"'):
        inspect_history(options)


def test_a_torn_last_line_of_a_run_is_left_out_with_one_note(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = folder / "rollouts" / "epoch-002.jsonl"
    whole = as_json(capsys, folder)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines) + lines[0][:40])
    assert call(monkeypatch, str(folder), "--history", "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["num_rollouts"] == whole["num_rollouts"]
    assert err.count("is left out") == 1
    assert f"{file}:{len(lines) + 1}: the last line is torn" in err
    file.write_bytes(lines[0][:40] + b"\n" + b"".join(lines))
    assert call(monkeypatch, str(folder), "--history") == 2
    assert f"{file}:1: " in capsys.readouterr().err
