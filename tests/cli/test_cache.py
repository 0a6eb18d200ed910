"""`treering cache`, `--no-cache`, and files given by patterns."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.runs import call
from treering.cli.corpus import load_corpus
from treering.config.sft_config import DataConfig
from treering.data import Trajectory, write_trajectories
from treering.errors import InputError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two shards in the current folder that share one task, and an own cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TREERING_CACHE", str(tmp_path / "cache"))
    for name, tasks in (("part-0.jsonl", ["a", "b", "a"]), ("part-1.jsonl", ["b", "c"])):
        rows = [Trajectory(task_id=task, tokens=np.arange(4 + i, dtype=np.int32)) for i, task in enumerate(tasks)]
        write_trajectories(tmp_path / name, rows)
    return tmp_path


def answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert call(monkeypatch, *arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_the_list_names_the_files_and_sizes_and_clearing_frees_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, capsys, "inspect", "part-0.jsonl", "part-1.jsonl")
    listed = answer(monkeypatch, capsys, "cache")
    assert listed["folder"] == str(folder / "cache" / "tokens")
    assert sorted(one["file"] for one in listed["caches"]) == ["part-0.jsonl", "part-1.jsonl"]
    stored = sum(file.stat().st_size for file in (folder / "cache").rglob("*") if file.is_file())
    assert sum(one["num_bytes"] for one in listed["caches"]) == stored
    assert call(monkeypatch, "cache") == 0
    assert "2 caches in" in capsys.readouterr().out.replace("\n", " ")
    assert answer(monkeypatch, capsys, "cache", "--clear")["num_bytes_freed"] == stored
    assert answer(monkeypatch, capsys, "cache")["caches"] == []


@pytest.mark.parametrize("report", [[], ["--drafts"], ["--show", "1"], ["--why"]])
def test_without_a_cache_the_figures_are_the_same_and_nothing_is_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], report: list[str]
) -> None:
    uncached = answer(monkeypatch, capsys, "inspect", "part-0.jsonl", *report, "--no-cache")
    assert not (folder / "cache").exists()
    for _ in range(2):
        assert answer(monkeypatch, capsys, "inspect", "part-0.jsonl", *report) == uncached
    assert len(list((folder / "cache" / "tokens").iterdir())) == 1


def test_a_pattern_means_its_files_and_a_folder_is_one_set_whose_scattered_tasks_are_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    named = answer(monkeypatch, capsys, "inspect", "part-0.jsonl", "part-1.jsonl")
    assert answer(monkeypatch, capsys, "inspect", "part-*.jsonl") == named
    assert [report["tasks"] for report in named["files"]] == [2, 2]
    [whole] = answer(monkeypatch, capsys, "inspect", str(folder))["files"]
    # Rows of 4, 5 and 6 tokens, then of 4 and 5, all of which begin alike.
    assert (whole["tasks"], whole["flat_tokens"], whole["unique_tokens"]) == (3, 24, 6 + 5 + 5)
    assert call(monkeypatch, "inspect", "none-*.jsonl") == 2
    assert "none-*.jsonl: cannot be read" in capsys.readouterr().err


def test_data_files_of_a_run_may_be_patterns(folder: Path) -> None:
    named = load_corpus(DataConfig(files=("part-0.jsonl", "part-1.jsonl")), config_dir=folder)
    for _ in range(2):
        found = load_corpus(DataConfig(files=("part-*.jsonl",)), config_dir=folder)
        assert list(found.digests.values()) == list(named.digests.values())
        assert [task.task_id for task in found.tasks] == ["a", "b", "b", "c"]
    with pytest.raises(InputError, match="is not in"):
        load_corpus(DataConfig(files=("none-*.jsonl",)), config_dir=folder)
