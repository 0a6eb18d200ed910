"""Progress without a terminal (a few plain lines), and the note about compiling."""

from importlib import import_module
from pathlib import Path

import pytest
from rich.console import Console

from treering.cli.display import progress


def test_work_off_a_terminal_is_a_line_now_and_then_with_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress.WorkProgress(Console(stderr=True)) as shown:
        for seconds, words, done in (
            (500.0, "a case", None),
            (1000.0, "math", 0.0),
            (1060.0, "math: one_by_one done", 0.1),
            (1120.0, "math: tree done", 0.2),
            (1150.0, "text", 0.25),
            (1300.0, "text: tree done", 0.9),
        ):
            now = seconds
            shown.show(words, done)
        now, count = 2000.0, shown.counting("drafting", 400)
        count(100)
    # The share grew by 0.1 a minute from 1000 s on; from 1300 s on 0.1 is left of what took 300 s for 0.9.
    assert capsys.readouterr().err.splitlines() == [
        "math, 0%",
        "math: tree done, 20%, about 8 min left",
        "text: tree done, 90%, less than a minute left",
        "drafting, 25%",
    ]


def test_compiling_is_announced_while_the_cache_has_no_index(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "jitted.py").write_text("from numba import njit\n@njit(cache=True)\ndef twice(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    twice = import_module("jitted").twice
    progress.note_compiling(Console(stderr=True), twice)
    assert capsys.readouterr().err == (
        "compiling functions with numba, once after installation: twice; this takes some seconds\n"
    )
    assert twice(3) == 6
    progress.note_compiling(Console(stderr=True), twice)
    assert capsys.readouterr().err == ""
