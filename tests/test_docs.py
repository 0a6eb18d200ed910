"""What the documents show runs: the README's example, and the worked examples of docstrings."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

from tests.models import build

ROOT = Path(__file__).parents[1]
ROOMS = ("tree", "attention", "model", "train", "rl")


def modules_of(room: str) -> list[str]:
    package = importlib.import_module(f"treering.{room}")
    return [f"treering.{room}.{found.name}" for found in pkgutil.iter_modules(package.__path__)]


def test_the_readme_example_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    counts, loss = capsys.readouterr().out.splitlines()
    assert counts == "9 6"
    assert float(loss) > 0


def test_the_loop_of_the_guide_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "rl.md").read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(example, "rl.md", "exec"), {"model": build()})
    assert capsys.readouterr().out.startswith("0.0 1.")


@pytest.mark.parametrize("name", [name for room in ROOMS for name in modules_of(room)])
def test_worked_examples_of_docstrings_hold(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_worked_examples_to_check() -> None:
    names = [name for room in ROOMS for name in modules_of(room)]
    assert sum(doctest.testmod(importlib.import_module(name)).attempted for name in names) >= 8
