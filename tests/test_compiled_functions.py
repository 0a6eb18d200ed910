"""The number of functions that numba compiles stays small.

`python -m benchmarks compile` fails where one takes long.
"""

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "treering"
MOST_FUNCTIONS = 196
"""The current number. Merge or drop some before adding another: each makes every new installation slower."""
DECORATORS = {"compiled_once", "kernel", "lean", "njit"}


def name_of(decorator: ast.expr) -> str | None:
    inner = decorator.func if isinstance(decorator, ast.Call) else decorator
    return inner.id if isinstance(inner, ast.Name) else None


def test_no_compiled_function_is_added() -> None:
    found = [
        f"{file.relative_to(SOURCE)}: {node.name}"
        for file in sorted(SOURCE.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and DECORATORS & set(map(name_of, node.decorator_list))
    ]
    assert len(found) <= MOST_FUNCTIONS, f"{len(found)} functions are compiled: {found}"
