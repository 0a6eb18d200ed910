import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.cache.datasets import dataset_of
from treering.cli.inspect.file_report import FileReport, measure
from treering.cli.inspect.inspect_options import InspectOptions
from treering.cli.inspect.run_inspect import inspect_files, run
from treering.data import Message, RenderedTrajectory, Trajectory, write_trajectories
from treering.errors import ConfigError, InputError
from treering.types import NAMED_SHAPES

PUBLISHED = {
    # sharing, token bound, bound by sharing only prompts. The figures are for whole public sets; the files here are
    # halves of them. The published bound by prompts only, 2.22, is for arguments written compactly. As the model wrote
    # them, calls have more tokens, 6 % of the trained ones, which lowers the bound by 1.1 %.
    "toolbench_dfsdt": (0.77, 4.26, 2.195),
    "qwen25math_maj8": (0.35, 1.55, 1.22),
}


def trajectory(task: str, tokens: list[int], mask: list[int]) -> Trajectory:
    return Trajectory(task_id=task, tokens=np.array(tokens, np.int32), loss_mask=np.array(mask, np.bool_))


def report_of(file: Path, **options: Any) -> FileReport:
    [report] = inspect_files(InspectOptions(files=[file], **options))
    return report


@pytest.fixture
def two_tasks(tmp_path: Path) -> Path:
    """Task a: prompt 1 2, then 3 or 4 5. Task b: prompt 1 2 again. A cut last turn leaves token 8 outside any turn."""
    file = tmp_path / "set.jsonl"
    trajectories = [
        trajectory("a", [1, 2, 3, 6, 7, 8], [0, 0, 1, 0, 1, 0]),
        trajectory("a", [1, 2, 3, 5], [0, 0, 1, 1]),
        trajectory("b", [1, 2, 9], [0, 0, 1]),
    ]
    write_trajectories(file, trajectories)
    return file


def flops(num_tokens: int, num_pairs: int) -> int:
    shape = NAMED_SHAPES["qwen3-8b"]
    return 2 * shape.params_per_token * num_tokens + 4 * 36 * 4096 * num_pairs


def test_figures_are_one_tree_per_task_summed(two_tasks):
    report = report_of(two_tasks)
    assert (report.trajectories, report.tasks, report.flat_tokens, report.unique_tokens) == (3, 2, 13, 7 + 3)
    assert report.sharing == pytest.approx(3 / 13)
    assert report.token_bound == 1.3
    # Paths of task a: 1 2 3 at depths 1-3, then 6 7 8 at 4-6 and 5 at 4; of task b: depths 1-3.
    assert report.flop_bound == pytest.approx(flops(13, 21 + 10 + 6) / flops(10, 6 + 15 + 4 + 6))


def test_the_branches_of_a_chat_are_rows_of_one_trajectory():
    def row(index: int, *tokens: int) -> RenderedTrajectory:
        return RenderedTrajectory(
            task_id="a", tokens=np.array(tokens, np.int32), loss_mask=np.ones(len(tokens), np.bool_),
            turn_ends=np.array([len(tokens)], np.int32), index=index, reward=1.0,
        )  # fmt: skip

    report = measure(dataset_of([row(0, 1, 2), row(0, 1, 3, 4), row(1, 5)]), NAMED_SHAPES["qwen3-8b"])
    assert (report.trajectories, report.rows, report.rewards.num_rewards) == (2, 3, 2)


def test_prompt_only_sharing_merges_prompts_and_computes_every_response(two_tasks):
    report = report_of(two_tasks)
    assert report.prompt_only_bound == 13 / (2 + 4 + 2 + 2 + 1)


def test_the_whole_set_is_one_tree_for_all_tasks(two_tasks):
    report = report_of(two_tasks)
    assert (report.whole_set.unique_tokens, report.whole_set.token_bound) == (8, 13 / 8)
    assert report.whole_set.sharing == pytest.approx(5 / 13)
    assert report.whole_set.flop_bound == pytest.approx(flops(13, 37) / flops(8, 6 + 15 + 4 + 3))


def test_each_turn_is_a_sample_that_ends_with_it(two_tasks):
    report = report_of(two_tasks)
    # Turns end at 3 and 5, at 4, and at 3; token 8 is not trained.
    assert (report.turns.samples, report.turns.flat_tokens, report.turns.unique_tokens) == (4, 3 + 5 + 4 + 3, 9)
    assert report.turns.token_bound == 15 / 9
    assert report.turns.flop_bound == pytest.approx(flops(15, 6 + 15 + 10 + 6) / flops(9, 6 + 9 + 4 + 6))


def test_branching_describes_the_trees_of_the_tasks(two_tasks):
    report = report_of(two_tasks)
    shape = report.branching
    assert (shape.num_leaves, shape.num_branch_points, shape.max_depth, shape.num_segments) == (3, 1, 6, 4)


def test_a_set_without_any_turn_reports_no_samples(tmp_path):
    write_trajectories(tmp_path / "set.jsonl", [trajectory("a", [1, 2], [0, 0])])
    report = report_of(tmp_path / "set.jsonl")
    assert (report.turns.samples, report.turns.unique_tokens, report.turns.token_bound) == (0, 0, 1.0)
    assert report.prompt_only_bound == 1.0


def test_json_has_the_promised_keys(two_tasks, capsys):
    run(InspectOptions(files=[two_tasks] * 2, json_output=True))
    files = json.loads(capsys.readouterr().out)["files"]
    assert [file["file"] for file in files] == [str(two_tasks)] * 2
    counts = {"trajectories", "flat_tokens", "unique_tokens"}
    ratios = {"sharing", "token_bound", "flop_bound", "prompt_only_bound"}
    assert counts | ratios | {"file", "whole_set", "turns", "branching"} <= files[0].keys()
    cut = {"samples", "flat_tokens", "unique_tokens", "sharing", "token_bound", "flop_bound"}
    assert files[0]["whole_set"].keys() == files[0]["turns"].keys() == cut


def test_the_figures_of_experts_are_shown_when_asked_for_and_a_verdict_ends_the_output(two_tasks, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    run(InspectOptions(files=[two_tasks]))
    out = capsys.readouterr().out
    assert "bound" not in out
    *_, verdict, following = out.splitlines()
    assert verdict.startswith("set: trees can train it at most 1.30x as fast (qwen3-8b)")
    assert following == f"Next: treering init {two_tasks} --model MODEL"
    run(InspectOptions(files=[two_tasks], more=True))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    # Columns: rows, tokens, sharing and bounds, of the whole set and of its turns.
    assert ["set", "3", "13", "10", "0.23", "1.30", "1.30", "1.18"] in rows
    assert any(row[:3] == ["set", "0.38", "1.62"] and row[4] == "4" for row in rows)


def test_messages_without_a_tokenizer_are_refused_with_the_option_to_pass(tmp_path):
    write_trajectories(tmp_path / "set.jsonl", [Trajectory(task_id=1, messages=(Message(role="user", content="x"),))])
    with pytest.raises(InputError, match="pass tokenizer=DIR"):
        report_of(tmp_path / "set.jsonl")


def test_the_folder_of_a_run_is_refused_with_its_rollouts_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=f"is the folder of a run.* name .*{tmp_path / 'rollouts'}"):
        report_of(tmp_path)


def test_an_unknown_model_shape_is_refused_before_any_file_is_read(tmp_path):
    with pytest.raises(ConfigError, match="qwen3-8b"):
        report_of(tmp_path / "absent.jsonl", model_shape="qwen3-9b")


@pytest.mark.parametrize("name", PUBLISHED)
def test_real_sets_share_what_was_measured_of_the_whole_of_them(real_data, name):
    file, tokenizer = real_data / "bench" / f"{name}.jsonl.gz", str(real_data / "tokenizer")
    report = report_of(file, tokenizer=tokenizer, template="plain")
    sharing, token_bound, prompt_only_bound = PUBLISHED[name]
    # Halves of a set of tens of tasks differ from the whole by a few per cent.
    assert report.sharing == pytest.approx(sharing, abs=0.03)
    assert report.token_bound == pytest.approx(token_bound, rel=0.07)
    assert report.prompt_only_bound == pytest.approx(prompt_only_bound, rel=0.06)


@pytest.fixture
def edited(tmp_path: Path) -> Path:
    """Build three rows: row 3 is row 1 of the same task with its second token changed; row 2 is of another task."""
    run_of_equal = list(range(100, 140))
    rows = [("a", [1, 2, *run_of_equal]), ("b", [9] * 5), ("a", [1, 3, *run_of_equal])]
    file = tmp_path / "edited.jsonl"
    write_trajectories(file, [trajectory(task, tokens, [1] * len(tokens)) for task, tokens in rows])
    return file


def test_why_names_the_rows_the_fork_and_the_tokens(edited):
    report = report_of(edited, why=True)
    assert (report.why.repeated_tokens, report.why.forks) == (40, 1)
    assert report.why.repeated_share == pytest.approx(40 / report.unique_tokens)
    [cause] = report.why.causes
    assert (cause.row, cause.other_row, cause.same_task, cause.position) == (3, 1, True, 1)
    assert (cause.token, cause.other_token, cause.text, cause.other_text) == (3, 2, None, None)
    assert (cause.tokens, cause.shift) == (40, 0)


def test_why_is_json_and_a_table_and_is_left_out_unasked(edited, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    run(InspectOptions(files=[edited], why=True, json_output=True))
    [file] = json.loads(capsys.readouterr().out)["files"]
    assert file["why"]["causes"][0]["row"] == 3
    run(InspectOptions(files=[edited], why=True))
    out = capsys.readouterr().out
    assert "40 unique tokens (45%) repeat another trajectory; the costliest of 1 fork where" in " ".join(out.split())
    assert ["3", "1", "1", "3", "2", "1", "40", "45.5%", "+0"] in [line.split() for line in out.splitlines()]
    run(InspectOptions(files=[edited]))
    assert "repeat another trajectory" not in capsys.readouterr().out


def test_why_reads_tokens_and_never_reads_them_as_markup(tmp_path, real_data, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    tail = " and then the same words follow for a good long while, so that many tokens of them are there to be lost"
    write_trajectories(
        tmp_path / "set.jsonl",
        [
            Trajectory(task_id=1, messages=(Message(role="user", content=f"It is {time}{tail}"),), format="raw")
            for time in ("noon", "[bold]")
        ],
    )
    run(InspectOptions(files=[tmp_path / "set.jsonl"], tokenizer=str(real_data / "tokenizer"), why=True))
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("2 ")]
    assert "[bold]" in line
    assert "noon" in line


def test_why_counts_forks_that_read_the_same_in_one_row(tmp_path):
    rows = []
    for task in range(4):
        run_of_equal = list(range(1000 * (task + 1), 1000 * (task + 1) + 40 + task))
        rows += [(task, [task + 10, 2, *run_of_equal]), (task, [task + 10, 3, *run_of_equal])]
    file = tmp_path / "set.jsonl"
    write_trajectories(file, [trajectory(task, tokens, [1] * len(tokens)) for task, tokens in rows])
    [cause] = report_of(file, why=True).why.causes
    assert (cause.forks, cause.tokens, cause.row) == (4, 40 + 41 + 42 + 43, 8)


def test_routed_experts_say_how_much_sharing_they_leave(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    routes = [[[[0, 1]], [[1, 2]], [[0, 1]]], [[[0, 1]], [[1, 3]], [[0, 1]]]]
    rows = [{"task_id": "a", "tokens": [5, 6, 7 + i], "routed_experts": own} for i, own in enumerate(routes)]
    file = tmp_path / "routes.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = report_of(file)
    assert (found.unique_tokens, found.unique_tokens_without_routes) == (5, 4)
    assert found.whole_set.unique_tokens == 5
    run(InspectOptions(files=[file]))
    printed = " ".join(capsys.readouterr().out.split())
    assert "sharing is 0.17 with the routed experts that training replays, and 0.33 without them" in printed
