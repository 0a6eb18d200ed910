"""`treering watch`: shows a run in the folder of another process, by its metrics. Loads no torch."""

import json
from pathlib import Path
from time import sleep

from rich.console import Console, Group
from rich.live import Live

from treering.cli.display.panel import PanelState, as_line, as_panel
from treering.report.run import METRICS_FILE, RunData, read_runs

_EVERY_S = 1.0


def run(folder: Path, once: bool, json_output: bool) -> None:
    """Shows the run until its last step is done; a panel on a terminal, a line per new step elsewhere.

    Args:
        folder: of a run, or of a demo, whose runs are shown below each other.
        once: show what there is, and end.
        json_output: print the newest row of each run as JSON, and end.

    Raises:
        InputError: the folder holds no run.
    """
    if json_output:
        print(json.dumps({each.name: each.rows[-1] if each.rows else None for each in read_runs(folder)}))
        return
    console = Console()
    states = _states(folder)
    if once:
        console.print(_panels(states) if console.is_terminal else "\n".join(map(_titled, states)), soft_wrap=True)
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
        sleep(_EVERY_S)
        states = _states(folder)


def _states(folder: Path) -> list[PanelState]:
    return [_state(each) for each in read_runs(folder)]


def _state(found: RunData) -> PanelState:
    state = PanelState(title=found.name, num_steps=found.num_planned)
    for row in found.rows:
        state.add(row)
    return state


def _is_done(states: list[PanelState]) -> bool:
    return all(state.num_steps is not None and state.step >= state.num_steps for state in states)


def _panels(states: list[PanelState]) -> Group:
    return Group(*map(as_panel, states))


def _titled(state: PanelState) -> str:
    return f"{state.title}: {as_line(state)}"


def _stamp(folder: Path) -> list[tuple[int, int]]:
    """Sizes and times of the metrics files, which change with each step and when a run resumes."""
    files = [folder / METRICS_FILE, *sorted(folder.glob(f"*/{METRICS_FILE}"))]
    return [(found.st_size, found.st_mtime_ns) for file in files if file.exists() for found in [file.stat()]]
