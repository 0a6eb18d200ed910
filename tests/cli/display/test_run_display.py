"""The steps of a run are a panel on a terminal, and a few plain lines elsewhere."""

import io

import pytest
from rich.console import Console

from tests.report.folders import row
from treering.cli.display.run_display import RunDisplay


def shown(*, is_terminal: bool) -> str:
    """What a run of four steps shows, from its second one on."""
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=100, color_system=None)
    with RunDisplay(title="runs/a", num_steps=4, first_step=1, console=console) as display:
        for step in (2, 3, 4):
            display.show(row(step), f"reward {step}", note="beside it")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_off_a_terminal_each_step_is_its_plain_line() -> None:
    assert shown(is_terminal=False).splitlines() == ["step 2/4 reward 2", "step 3/4 reward 3", "step 4/4 reward 4"]


@pytest.mark.parametrize("part", ["runs/a", "step 4/4", "reward 0.250", "tokens/forward 5.00", "beside it"])
def test_on_a_terminal_the_panel_has_the_newest_step(part: str) -> None:
    text = shown(is_terminal=True)
    assert part in text
    assert "step 4/4 reward 4" not in text
