"""Prompts that lie in a file are those that were given, and take no memory."""

import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from treering.errors import StateError
from treering.rl.tasks.stored_prompts import ChosenPrompts, PromptWriter
from treering.rl.tasks.task import Prompt


def prompt_of(number: int) -> Prompt:
    tokens = np.arange(1 + number % 7, dtype=np.int64)
    columns = {"text": f"{number} " + "x" * 1000, "unit": {"factors": [0.5, None]}, "when": b"\xff"}
    return Prompt(prompt_id=number if number % 2 else str(number), tokens=tokens, answer=None, columns=columns)


def fields_of(prompt: Prompt) -> tuple[object, ...]:
    return type(prompt.prompt_id), prompt.prompt_id, prompt.tokens.tolist(), prompt.answer, prompt.columns


def test_prompts_are_those_that_were_given_in_any_order_and_slice() -> None:
    given = [prompt_of(number) for number in range(9)]
    with PromptWriter() as writer:
        for prompt in given:
            writer.add(prompt)
        stored = writer.prompts()
    assert list(map(fields_of, stored)) == list(map(fields_of, given))
    assert fields_of(stored[-2]) == fields_of(given[7])
    assert list(map(fields_of, stored[1:8:3][1:])) == list(map(fields_of, given[4:8:3]))
    chosen = ChosenPrompts(stored, [5, 0, 2])
    assert [prompt.prompt_id for prompt in chosen[::-1]] == ["2", "0", 5]
    assert stored[0].tokens.dtype == np.int32
    assert stored[0].tokens.flags.writeable
    for missing in (9, -10):
        with pytest.raises(IndexError):
            stored[missing]


def test_prompts_take_eight_bytes_each() -> None:
    tracemalloc.start()
    try:
        with PromptWriter() as writer:
            for number in range(2000):
                writer.add(prompt_of(number))
            stored = writer.prompts()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(stored) == 2000
    # An array that grows has up to an eighth more, a file a buffer; a prompt has a kilobyte.
    assert held < 2000 * 9 + 32_000


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(StateError, match=r"cannot be written \(No such file or directory\).*TMPDIR"):
        PromptWriter()
