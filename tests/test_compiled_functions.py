"""What numba compiles stays little: few functions, and none that takes long."""

import ast
from pathlib import Path

import pytest
from benchmarks.compile.bench import measure

SOURCE = Path(__file__).parents[1] / "src" / "treering"
MOST_FUNCTIONS = 204
"""As many as there are. Merge or drop some before another is added: each costs every new installation its time."""
MOST_S = 3.0
"""Seconds of a processor for a function without those that it calls."""
DECORATORS = {"compiled_once", "kernel", "lean", "njit"}


def name_of(decorator: ast.expr) -> str | None:
    inner = decorator.func if isinstance(decorator, ast.Call) else decorator
    return inner.id if isinstance(inner, ast.Name) else None


def test_no_compiled_function_is_added_beside_those_that_there_are() -> None:
    found = [
        f"{file.relative_to(SOURCE)}: {node.name}"
        for file in sorted(SOURCE.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and DECORATORS & set(map(name_of, node.decorator_list))
    ]
    assert len(found) <= MOST_FUNCTIONS, f"{len(found)} functions are compiled: {found}"


@pytest.mark.slow
def test_no_function_takes_three_seconds_to_compile() -> None:
    fastest: dict[str, float] = {}
    # Several parts compile the same function, and a busy machine slows some of them down.
    for row in (row for part in measure()["parts"] for row in part["functions"]):
        seconds = row["seconds"] / row["num_types"]
        fastest[row["function"]] = min(seconds, fastest.get(row["function"], seconds))
    assert fastest
    assert {name: seconds for name, seconds in fastest.items() if seconds > MOST_S} == {}
