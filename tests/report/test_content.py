"""The page of a run shows what its folder holds, and names what is missing."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.report.folders import CONFIG, group, row, write_run, write_timeline
from treering.cli.sft_command import write_samples
from treering.errors import InputError
from treering.report.content import page_content
from treering.report.page import as_html
from treering.report.rollout_views import tokens_of
from treering.report.run_data import note_start
from treering.train.loop.batches import TrainingTask


def content_of(folder: Path) -> dict[str, Any]:
    return page_content(folder, lambda run: None)


def data_of(page: str) -> dict[str, Any]:
    _, _, rest = page.partition('<script type="application/json" id="data">')
    found: dict[str, Any] = json.loads(rest.partition("</script>")[0])
    return found


def test_the_page_holds_the_numbers_of_the_metrics_file(tmp_path: Path) -> None:
    rows = write_run(tmp_path / "run")
    data = data_of(as_html(content_of(tmp_path / "run")))
    assert data["runs"][0]["rows"] == rows
    assert data["status"].startswith("4 of 8 steps")
    assert data["runs"][0]["phases"][2] == {"step": 3, "rollout": 2.0, "training": 1.0, "update": 0.25, "other": 0.75}


def test_an_epoch_has_the_ratios_of_its_sums(tmp_path: Path) -> None:
    write_run(tmp_path)
    first = content_of(tmp_path)["runs"][0]["epochs"][0]
    # 60 tokens in 30 rows and 120 in 40; 101 + 102 of 401 + 402 tokens computed.
    assert first["tokens_per_forward"] == pytest.approx(180 / 70)
    assert first["acceptance"] == pytest.approx(0.5)
    assert first["reward"] == pytest.approx(0.09375)
    assert first["sharing"] == pytest.approx(1 - 203 / 803)
    assert first["token_bound"] == pytest.approx(803 / 203)


def test_each_rollout_is_counted_once_in_the_account(tmp_path: Path) -> None:
    write_run(tmp_path)
    left_out = {"reward failed": 4, "not scored": 0, "empty": 4}
    account = content_of(tmp_path)["runs"][0]["account"]
    assert account == {"trained": 16, "equal rewards in the group": 8, **left_out}
    # The trained branches of an environment are counted; a rollout may have many.
    episodes = [row(1, **{"train/num_branches": 40, "reward/num_unscored": 3})]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in episodes))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"task": {"kind": "environment"}}))
    account = content_of(tmp_path)["runs"][0]["account"]
    assert account == {"with a reward": 6, "reward failed": 1, "not scored": 3, "empty": 1}


def test_damaged_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = write_run(tmp_path)
    lines = [json.dumps(each) for each in rows]
    (tmp_path / "metrics.jsonl").write_text("\n".join([lines[0], "{broken", lines[2], lines[3][:20]]))
    found = content_of(tmp_path)
    assert found["runs"][0]["rows"] == [rows[0], rows[2]]
    assert "metrics.jsonl has 2 lines that cannot be read." in found["notes"]
    assert "metrics.jsonl lacks step 2." in found["notes"]


def test_a_run_before_its_first_step_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    found = content_of(tmp_path)
    assert found["runs"][0]["rows"] == []
    assert found["status"] == "0 of 8 steps"
    assert any(note.startswith("metrics.jsonl is missing") for note in found["notes"])
    assert any(note.startswith("There are no rollouts") for note in found["notes"])
    assert "Missing data" in as_html(found)


def test_damaged_settings_and_rollouts_are_notes(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "rollouts" / "epoch-001.jsonl").write_text("nonsense\n{}\n")
    found = content_of(tmp_path)
    assert any(note.startswith("config.json cannot be read") for note in found["notes"])
    assert any(note.startswith("epoch-001.jsonl cannot be read") for note in found["notes"])
    # The previous epoch is drawn instead.
    assert found["epoch"] == 0


def test_numbers_that_are_none_stay_texts(tmp_path: Path) -> None:
    rows = write_run(tmp_path)
    rows[1]["train/loss"] = "nan"
    text = "".join(json.dumps(each) + "\n" for each in rows).replace('"reward/mean": 0.0625', '"reward/mean": NaN')
    (tmp_path / "metrics.jsonl").write_text(text)
    data = data_of(as_html(content_of(tmp_path)))
    assert data["runs"][0]["rows"][1]["train/loss"] == "nan"
    assert data["runs"][0]["rows"][0]["reward/mean"] == "nan"
    assert data["runs"][0]["epochs"][0]["reward"] == pytest.approx(0.125)


def test_the_spans_of_workers_are_shown_but_for_damaged_ones(tmp_path: Path) -> None:
    write_run(tmp_path)
    spans = write_timeline(tmp_path, num_steps=4)
    with (tmp_path / "timeline.jsonl").open("a") as log:
        log.write('{"step": 5, "worker": 0, "started_s": "x"}\n{"step": 5, "wor')
    assert content_of(tmp_path)["runs"][0]["timeline"] == spans
    assert not content_of(tmp_path)["runs"][0]["has_workers"]
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row(1) | {"rollout/bubble": 0.25}) + "\n")
    assert content_of(tmp_path)["runs"][0]["has_workers"]


def test_both_runs_of_a_demo_are_shown_with_ours_last(tmp_path: Path) -> None:
    for side in ("treering", "plain"):
        write_run(tmp_path / side)
    assert [run["name"] for run in content_of(tmp_path)["runs"]] == ["plain", "treering"]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"with metrics\.jsonl or config\.json"):
        content_of(tmp_path)
    with pytest.raises(InputError, match="is not a folder"):
        content_of(tmp_path / "nothing")


def test_no_text_of_a_run_ends_the_script_that_holds_it(tmp_path: Path) -> None:
    write_run(tmp_path)
    page = as_html(page_content(tmp_path, lambda run: lambda token: "</script><!--tiles-->"))
    assert data_of(page)["texts"]["10"] == "</script><!--tiles-->"
    assert page.count("</script>") == 2


def test_nothing_on_the_page_comes_from_a_network(tmp_path: Path) -> None:
    write_run(tmp_path)
    page = as_html(content_of(tmp_path)).replace("http://www.w3.org/2000/svg", "")
    assert "http:" not in page
    assert "https:" not in page
    assert "src=" not in page


def test_a_run_shows_its_settings_its_machine_and_where_it_was_resumed(tmp_path: Path) -> None:
    write_run(tmp_path, config=CONFIG | {"model": {"path": "org/tiny"}})
    for step, machine in ((0, "first"), (3, "second"), (3, "third")):
        note_start(tmp_path, {"step": step, "machine": machine, "versions": {"torch": "2.9"}})
    with (tmp_path / "starts.jsonl").open("a") as log:
        log.write('{"step": 4')
    facts = content_of(tmp_path)["runs"][0]["facts"]
    assert facts["resumed"] == [3]
    assert facts["table"] == {"model": "org/tiny", "machine": "third", "versions": "torch 2.9"}
    assert facts["settings"]["history.max_draft"] == "8"
    # A line that a kill left unfinished hides no later start.
    note_start(tmp_path, {"step": 5})
    assert content_of(tmp_path)["runs"][0]["facts"]["resumed"] == [3, 5]


def test_a_supervised_run_has_the_samples_of_its_data(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"train": {"num_steps": 4}}')
    assert "The run has kept no samples of its data." in content_of(tmp_path)["notes"]
    tasks = [
        TrainingTask(
            task_id=name,
            sequences=tuple(tokens_of(each) for each in group("a", 0)),
            loss_masks=tuple(np.arange(tokens_of(each).size) > 3 for each in group("a", 0)),
        )
        for name in "xy"
    ]
    write_samples(tmp_path, tasks)
    found = content_of(tmp_path)
    assert [prompt["id"] for prompt in found["prompts"]] == ["x", "y"]
    assert found["prompts"][0]["forest"]["num_tokens"] == 16
    assert [each["origins"] for each in found["prompts"][0]["rollouts"]] == ["ggggnnnnn", "ggggnnnn", "ggggnnn"]


def test_only_runs_of_one_kind_are_compared_and_equal_names_get_their_folder(tmp_path: Path) -> None:
    for name in ("x/a", "y/a"):
        write_run(tmp_path / name)
    found = page_content(tmp_path / "x" / "a", lambda run: None, others=[tmp_path / "y" / "a"])
    assert [run["name"] for run in found["runs"]] == ["x/a", "y/a"]
    assert found["prompts"] == []
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "config.json").write_text('{"train": {}}')
    with pytest.raises(InputError, match="a of train, sft of sft"):
        page_content(tmp_path / "x" / "a", lambda run: None, others=[tmp_path / "sft"])
