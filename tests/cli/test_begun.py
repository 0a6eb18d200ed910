"""What a run keeps from its first start: the form of chats and the date that they write."""

from datetime import date

import pytest

from treering.cli.begun import with_chats
from treering.config.rl_task import TaskConfig


@pytest.mark.parametrize(
    ("first", "configured", "expected"),
    [
        ({}, "auto", "auto"),
        ({"template": "plain", "date": None}, "auto", "plain"),
        ({"template": "auto", "date": "2024-07-26"}, "auto", "auto"),
        ({"template": "plain", "date": None}, "hf", "hf"),
        ({"template": "hf", "date": "2024-07-26"}, "plain", "plain"),
    ],
)
def test_a_run_keeps_the_form_and_the_date_of_chats_that_it_began_with(first, configured, expected):
    task = TaskConfig(kind="prompts", file="p.jsonl", template=configured)
    found = with_chats(task, first)
    day = date(2024, 7, 26) if first.get("date") else date.today()
    assert (found.template, found.date) == (expected, None if expected == "plain" else day)
    dated = task.model_copy(update={"date": date(2020, 1, 1)})
    assert with_chats(dated, first).date == date(2020, 1, 1)
