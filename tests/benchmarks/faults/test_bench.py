"""The fault run: it detects lost data, it covers every kind, and its documents show what it measured."""

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.faults.bench import chosen, measure
from benchmarks.faults.damage import MARKER
from benchmarks.faults.judge import TOLERANCE, judge
from benchmarks.faults.runs import Ended
from benchmarks.faults.task import Task
from benchmarks.faults.tinker import TINKER
from safetensors.torch import save_file

from treering.errors import InputError, MissingExtraError


def finished(folder: Path, *, rows: str = "12", lines: str = "1122", weight: float = 1.0) -> Path:
    """Write a run folder of two steps: the steps of its rows and rollouts, and its weight."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in rows))
    (folder / "rollouts" / "epoch-000.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in lines))
    (folder / "checkpoints" / "step-000002").mkdir(parents=True)
    save_file({"w": torch.tensor([weight])}, folder / "checkpoints" / "step-000002" / "model.safetensors")
    return folder


def ended(code: int = 0, stderr: str = "", **changes: bool) -> Ended:
    return Ended(code=code, stderr=stderr, **{"has_hung": False, "is_left": False, **changes})


@pytest.mark.parametrize(
    ("run", "end", "ending", "words"),
    [
        ({}, ended(), "same weights", ""),
        ({"lines": "112"}, ended(stderr="warning: a: 1 missing line of step 2\n"), "counted warning", "1 missing"),
        ({"rows": "1", "lines": "112"}, ended(stderr="warning: 1 missing line\nwarning: 1 missing line\n"),
         "counted warning", ""),
        ({"rows": ""}, ended(2, "a\ntreering: remove it\n"), "one line", "remove it"),
        ({"lines": "112"}, ended(), "failure", "1 lines of the logs are lost, and 0 are told"),
        ({"lines": "11222"}, ended(), "failure", "1 lines of the logs are there twice"),
        ({"weight": 1.0 + 2e-7}, ended(), "failure", "the weights differ"),
        ({}, ended(1, "treering: a\nTraceback\n"), "failure", "a traceback"),
        ({}, ended(2, "treering: a\nmore\n"), "failure", "without one clear line"),
        ({}, ended(1, ""), "failure", "without one clear line"),
        ({}, ended(-signal.SIGSEGV, ""), "failure", "without one clear line"),
        ({}, ended(-signal.SIGKILL, has_hung=True), "failure", "it hung"),
        ({}, ended(is_left=True), "failure", "processes were left behind"),
    ],
)  # fmt: skip
def test_lost_data_is_a_failure_unless_it_is_reported(
    tmp_path: Path, run: dict[str, Any], end: Ended, ending: str, words: str
) -> None:
    task = Task(config=tmp_path, whole=finished(tmp_path / "whole"), half=tmp_path, num_steps=2)
    verdict = judge(task, finished(tmp_path / "case" / "run", **run), end)
    assert verdict.ending == ending
    assert words in verdict.words


def test_only_a_lost_history_may_change_the_rounding_of_weights(tmp_path: Path) -> None:
    task = Task(config=tmp_path, whole=finished(tmp_path / "whole"), half=tmp_path, num_steps=2)
    for name, weight, ending in (("a", 1 + TOLERANCE / 2, "same weights"), ("b", 1 + 2 * TOLERANCE, "failure")):
        assert judge(task, finished(tmp_path / name / "run", weight=weight), ended(), may_round=True).ending == ending


def test_the_faults_of_tinkers_protocol_run_alone_by_their_name() -> None:
    assert chosen(len(TINKER) + 1, 0, only="tinker") == [*TINKER, TINKER[0]]


@pytest.mark.parametrize("name", ["tinker", TINKER[0].name, str(TINKER[-1])])
def test_the_faults_of_tinkers_protocol_name_what_to_install(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "tinker", None)
    with pytest.raises(MissingExtraError, match="needs tinker: pip install"):
        measure(num_cases=1, only=name)


def test_an_executed_pickle_is_a_failure(tmp_path: Path) -> None:
    task = Task(config=tmp_path, whole=finished(tmp_path / "whole"), half=tmp_path, num_steps=2)
    run = finished(tmp_path / "case" / "run")
    (run.parent / MARKER).touch()
    assert judge(task, run, ended()).ending == "failure"


@pytest.mark.slow
def test_a_fault_ends_as_it_may() -> None:
    report = measure(num_cases=1, seed=3)
    assert report["failures"] == []
    assert sum(row["num_cases"] for row in report["kinds"]) == 1
    with pytest.raises(InputError, match="at least one case, got 0"):
        measure(num_cases=0)
