"""`treering watch`: shows a run in the folder of another process, by its metrics. Loads no torch."""

import json
import time
from pathlib import Path
from time import sleep

from rich.console import Console, Group
from rich.live import Live

from treering.cli.display.panel import PanelState, as_line, as_panel, in_words
from treering.errors import StateError
from treering.files.lock import is_locked
from treering.report.run import LOCK_FILE, METRICS_FILE, RunData, read_runs

_EVERY_S = 1.0

_QUIET_S = 10.0
"""A run whose lock is free is over if its metrics have not changed for so long: another process may be resuming it."""


def run(folder: Path, once: bool, json_output: bool) -> None:
    """Shows the run until its last step is done or no process trains it; a panel on a terminal, else a line per step.

    Args:
        folder: of a run, or of a demo, whose runs are shown below each other.
        once: show what there is, and end.
        json_output: print the newest row of each run as JSON, and end.

    Raises:
        InputError: the folder holds no run.
        StateError: no process trains the run any more, and its last step is not done.
    """
    if json_output:
        print(
            json.dumps(
                {each.name: each.rows[-1] if each.rows else None for each in read_runs(folder, "treering watch")}
            )
        )
        return
    console = Console()
    states = _states(folder)
    if once:
        console.print(_panels(states) if console.is_terminal else "\n".join(map(_titled, states)), soft_wrap=True)
        if ended := _ended(folder, states):
            console.print(ended, soft_wrap=True, highlight=False)
        return
    (_follow if console.is_terminal else _print_lines)(folder, states, console)


def _follow(folder: Path, states: list[PanelState], console: Console) -> None:
    with Live(_panels(states), console=console, auto_refresh=False) as live:
        seen = _stamp(folder)
        while not _is_done(states):
            sleep(_EVERY_S)
            if (stamp := _stamp(folder)) != seen:
                seen, states = stamp, _states(folder)
                live.update(_panels(states), refresh=True)
            _check_runs(folder, states)


def _print_lines(folder: Path, states: list[PanelState], console: Console) -> None:
    shown: list[str] = []
    while True:
        lines = [_titled(state) for state in states if state.step]
        for line in lines:
            if line not in shown:
                console.print(line, soft_wrap=True, markup=False, highlight=False)
        shown = lines
        if _is_done(states):
            return
        _check_runs(folder, states)
        sleep(_EVERY_S)
        states = _states(folder)


def _states(folder: Path) -> list[PanelState]:
    return [_state(each) for each in read_runs(folder, "treering watch")]


def _state(found: RunData) -> PanelState:
    state = PanelState(title=found.name, num_steps=found.num_planned)
    for row in found.rows:
        state.add(row)
    return state


def _is_done(states: list[PanelState]) -> bool:
    return all(state.num_steps is not None and state.step >= state.num_steps for state in states)


def _check_runs(folder: Path, states: list[PanelState]) -> None:
    ended = _ended(folder, states)
    if ended is not None:
        raise StateError(ended)


def _ended(folder: Path, states: list[PanelState]) -> str | None:
    """Says so if no process trains a run whose last step is not done; a copy without locks may be trained elsewhere."""
    locks = _files(folder, LOCK_FILE)
    if _is_done(states) or not locks or any(map(is_locked, locks)):
        return None
    quiet_s = time.time() - max(file.stat().st_mtime for file in [*locks, *_files(folder, METRICS_FILE)])
    if quiet_s < _QUIET_S:
        return None
    state = min(states, key=lambda each: each.step)
    total = "" if state.num_steps is None else f" of {state.num_steps}"
    return (
        f"no process trains in {folder} any more: its last step is {state.step}{total}, {in_words(quiet_s)} ago; the "
        "command that began it resumes it"
    )


def _panels(states: list[PanelState]) -> Group:
    return Group(*map(as_panel, states))


def _titled(state: PanelState) -> str:
    return f"{state.title}: {as_line(state)}"


def _stamp(folder: Path) -> list[tuple[int, int]]:
    """Sizes and times of the metrics files, which change with each step and when a run resumes."""
    return [(found.st_size, found.st_mtime_ns) for file in _files(folder, METRICS_FILE) for found in [file.stat()]]


def _files(folder: Path, name: str) -> list[Path]:
    """The files of that name of a run, or of both runs of a demo."""
    return [file for file in (folder / name, *sorted(folder.glob(f"*/{name}"))) if file.is_file()]
