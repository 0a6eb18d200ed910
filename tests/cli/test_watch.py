"""`treering watch` follows the metrics of a run elsewhere to its last step."""

import json
import os
import time
from pathlib import Path

import pytest

from tests.report.folders import row, write_run
from treering.cli import watch
from treering.errors import InputError, StateError
from treering.files.lock import FileLock


def test_off_a_terminal_it_prints_a_line_per_new_step_until_the_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "a", num_steps=6)
    steps = iter((7, 8))

    def train_while_it_waits(_: float) -> None:
        with (tmp_path / "a" / "metrics.jsonl").open("a") as log:
            log.write(json.dumps(row(next(steps))) + "\n")

    monkeypatch.setattr(watch, "sleep", train_while_it_waits)
    watch.run(tmp_path / "a", once=False, json_output=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" reward")[0] for line in lines] == ["a: step 6/8", "a: step 7/8", "a: step 8/8"]


def test_once_shows_what_there_is_and_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", num_steps=2)
    watch.run(tmp_path / "a", once=True, json_output=False)
    assert "a: step 2/8 reward 0.125" in capsys.readouterr().out


def test_json_is_the_newest_row_of_each_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write_run(tmp_path / "plain"), write_run(tmp_path / "treering", num_steps=3)
    watch.run(tmp_path, once=False, json_output=True)
    assert json.loads(capsys.readouterr().out) == {"plain": rows[0][-1], "treering": rows[1][-1]}


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds metrics\.jsonl"):
        watch.run(tmp_path, once=True, json_output=False)


def age(folder: Path, seconds: float) -> None:
    """Makes the files of a run as old as that."""
    for file in folder.iterdir():
        os.utime(file, (time.time() - seconds,) * 2)


def test_a_run_that_no_process_trains_is_said_to_have_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "a", num_steps=6)
    lock, num_looks = FileLock(tmp_path / "a" / "run.lock", str), 0
    age(tmp_path / "a", 100.0)

    def end_while_it_waits(_: float) -> None:
        nonlocal num_looks
        num_looks += 1
        # Held, the lock says that a slow step runs.
        if num_looks == 3:
            lock.release()

    monkeypatch.setattr(watch, "sleep", end_while_it_waits)
    with pytest.raises(StateError, match=r"no process trains in .*a any more: its last step is 6 of 8, 1 min 40 s ago"):
        watch.run(tmp_path / "a", once=False, json_output=False)
    assert num_looks == 3
    capsys.readouterr()
    watch.run(tmp_path / "a", once=True, json_output=False)
    assert "its last step is 6 of 8" in capsys.readouterr().out


@pytest.mark.parametrize("case", ["just begun", "done", "a copy"])
def test_a_run_that_may_go_on_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    write_run(tmp_path / "a", num_steps=8 if case == "done" else 6)
    if case != "a copy":
        (tmp_path / "a" / "run.lock").touch()
    age(tmp_path / "a", 1.0 if case == "just begun" else 100.0)
    watch.run(tmp_path / "a", once=True, json_output=False)
    assert "no process" not in capsys.readouterr().out
