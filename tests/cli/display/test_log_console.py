"""A log gets a line within half a minute, whatever blocks; a terminal and a command that speaks get none."""

import io
import time

import pytest

from treering.cli.display import log_console
from treering.cli.display.log_console import LogConsole, note_doing


def said(monkeypatch: pytest.MonkeyPatch, every_s: float, *, is_terminal: bool = False) -> list[str]:
    """The lines of a command that loads for a moment without a word, and then trains."""
    monkeypatch.setattr(log_console, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(log_console, "PART_EVERY_S", every_s)
    console = LogConsole(file=io.StringIO(), force_terminal=is_terminal, color_system=None)
    assert isinstance(console.file, io.StringIO)
    with console.telling("loading"):
        deadline_s = time.monotonic() + (60.0 if every_s < 1 and not is_terminal else 0.1)
        for doing in ("loading", "training"):
            note_doing(console, doing)
            while doing not in console.file.getvalue() and time.monotonic() < deadline_s:
                time.sleep(0.01)
    before = console.file.getvalue()
    time.sleep(0.05)
    assert console.file.getvalue() == before, "nothing is said after the block"
    return before.splitlines()


def test_what_blocks_is_named_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(dict.fromkeys(said(monkeypatch, 0.0))) == ["loading, 0 s", "training, 0 s"]


def test_a_terminal_or_a_command_that_has_just_spoken_needs_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(monkeypatch, 0.0, is_terminal=True) == []
    assert said(monkeypatch, 60.0) == []
