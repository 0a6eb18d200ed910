"""Imports run one way: a room imports only from rooms above its own, and some rooms never import torch."""

import ast
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "treering"

# From the top down; a module's room is the first name below the package. `errors` imports no other room. A facade
# stands below what it exports: `objectives` below `train`, the package itself above `cli`, its only user.
ORDER = (
    "errors",
    "extras",
    "closing",
    "families",
    "types",
    "arrays",
    "files",
    "compiling",
    "metrics",
    "trackers",
    "data",
    "config",
    "tree",
    "history",
    "schedule",
    "attention",
    "ranks",
    "model",
    "train",
    "objectives",
    "engine",
    "analysis",
    "rl",
    "runtime",
    "serving",
    "integrations",
    "report",
    "__init__",
    "cli",
    "__main__",
)
# The core, which is installed without the packages of `treering[train]`.
NO_TORCH = {
    *("errors", "extras", "closing", "families", "types", "arrays", "files", "compiling", "metrics", "config"),
    *("data", "tree", "history", "schedule", "analysis", "trackers", "report"),
}
# Packages that an extra installs, which the core imports only inside functions. Some of them import torch.
OPTIONAL = {
    *("accelerate", "jaxtyping", "peft", "pyarrow", "safetensors", "tokenizers", "transformers"),
}


def room_of(module: str) -> str:
    """Return the room of a dotted module name: "tree" for "treering.tree.radix", "__init__" for the bare package."""
    return [*module.split("."), "__init__"][1]


def imports_of(module: str, source: str, *, is_package: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield each imported dotted name of a module, and whether the import runs when the module is imported."""
    for node, at_load in _walk(ast.parse(source), at_load=True):
        if isinstance(node, ast.Import):
            yield from ((alias.name, at_load) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((name, at_load) for name in _from_names(module, node, is_package=is_package))
        elif isinstance(node, ast.Call) and _is_dynamic_import(node):
            yield node.args[0].value, at_load


def violations(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """Return one sentence for each import of the module that the architecture forbids."""
    room = room_of(module)
    if room not in ORDER:
        return [f"{module}: the room {room!r} has no place in the order"]
    found = []
    for name, at_load in imports_of(module, source, is_package=is_package):
        package = name.split(".")[0]
        if package == "torch" and room in NO_TORCH:
            found.append(f"{module} imports {name}, and {room} has no torch")
        elif package in OPTIONAL and room in NO_TORCH and at_load:
            found.append(f"{module} imports {name} when it loads, and {room} is installed without it")
        elif package == "treering" and not _is_above(room_of(name), room):
            found.append(f"{module} imports {name}, which is not above {room}")
    return found


def _walk(node: ast.AST, *, at_load: bool) -> Iterator[tuple[ast.AST, bool]]:
    yield node, at_load
    is_later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _is_for_types(node)
    inside = at_load and not is_later
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, at_load=inside)


def _from_names(module: str, node: ast.ImportFrom, *, is_package: bool) -> list[str]:
    origin = _origin(module, node, is_package=is_package)
    # `from treering import tree` names a room by its alias; in deeper imports the origin names it.
    return [f"{origin}.{alias.name}" for alias in node.names] if origin == "treering" else [origin]


def _origin(module: str, node: ast.ImportFrom, *, is_package: bool) -> str:
    base = module.split(".") if is_package else module.split(".")[:-1]
    start = base[: len(base) - node.level + 1] if node.level else []
    return ".".join([*start, *([node.module] if node.module else [])])


def _is_dynamic_import(node: ast.Call) -> bool:
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
    return called == "import_module" and bool(node.args) and isinstance(node.args[0], ast.Constant)


def _is_above(target: str, room: str) -> bool:
    if target not in ORDER:
        # A public name of the package comes from the facade, which only `cli` may use.
        target = "__init__"
    return target == room or ORDER.index(target) < ORDER.index(room)


@cache
def _modules() -> list[tuple[str, Path]]:
    named = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        named.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return named


@cache
def _dependencies() -> dict[str, set[str]]:
    """Return the package modules that each module imports, including inside functions, but not for types only."""
    modules = dict(_modules())
    found: dict[str, set[str]] = {}
    for module, path in modules.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        skipped = {id(inner) for node in ast.walk(tree) if _is_for_types(node) for inner in ast.walk(node)}
        found[module] = {
            target
            for node in ast.walk(tree)
            if id(node) not in skipped
            for name in _named_by(module, node, is_package=path.name == "__init__.py")
            if (target := _nearest(name, modules)) and target != module
        }
    return found


def _named_by(module: str, node: ast.AST, *, is_package: bool) -> list[str]:
    """Return the dotted names that an import statement or call names; the last part may be a class of its file."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        origin = _origin(module, node, is_package=is_package)
        return [f"{origin}.{alias.name}" for alias in node.names]
    return [node.args[0].value] if isinstance(node, ast.Call) and _is_dynamic_import(node) else []


def _nearest(name: object, modules: dict[str, Path]) -> str | None:
    """Return the module of a dotted name: the name itself, or its part before the last dot, or None."""
    return next((one for one in (name, str(name).rpartition(".")[0]) if one in modules), None)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Return one circle of a graph, with its first node repeated at the end; empty if there is none."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def units_below(package: str, edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the graph of what a package directly contains: its files and its packages, each package as one node."""
    depth = package.count(".") + 2

    def unit(name: str) -> str:
        return ".".join(name.split(".")[:depth])

    inside = {name: others for name, others in edges.items() if name.startswith(f"{package}.")}
    graph: dict[str, set[str]] = {unit(name): set() for name in inside}
    for name, others in inside.items():
        graph[unit(name)] |= {unit(other) for other in others if other in inside} - {unit(name)}
    return graph


def test_no_files_or_packages_import_each_other_in_a_circle() -> None:
    edges = _dependencies()
    packages = [name for name, path in _modules() if path.name == "__init__.py"]
    assert [
        found for graph in (edges, *(units_below(each, edges) for each in packages)) if (found := circle(graph))
    ] == []


def test_a_planted_circle_is_found() -> None:
    edges = {"t.a.x": {"t.b.y"}, "t.b.z": {"t.a.w"}, "t.a.w": set(), "t.b.y": set()}
    assert circle(edges) == []
    assert set(circle(units_below("t", edges))) == {"t.a", "t.b"}


def test_files_and_public_classes_have_unique_names() -> None:
    files = Counter(path.stem for _, path in _modules() if path.stem not in ("__init__", "__main__"))
    classes = Counter(
        node.name
        for _, path in _modules()
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for names in (files, classes) for name, count in names.items() if count > 1] == []


def test_imports_run_one_way() -> None:
    found = (
        violations(module, path.read_text(encoding="utf-8"), is_package=path.name == "__init__.py")
        for module, path in _modules()
    )
    assert [one for each in found for one in each] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("treering.tree.radix", "import treering.train.step"),
        ("treering.tree.radix", "from treering.model.forward import forward"),
        ("treering.tree.radix", "from treering import history"),
        ("treering.tree.radix", "from treering import Forest"),
        ("treering.tree.radix", "import treering"),
        ("treering.tree.radix", "from ..train import step"),
        ("treering.tree.radix", "from .. import train"),
        ("treering.tree.radix", "def f():\n    from treering.train import step"),
        ("treering.tree.radix", "if TYPE_CHECKING:\n    from treering.train import step"),
        ("treering.tree.radix", "import_module('treering.train')"),
        ("treering.errors", "from treering.types import ModelShape"),
        ("treering.train.step", "from treering.objectives import sft"),
        ("treering.data.trajectory", "from treering.config import load"),
        ("treering.tree.radix", "import torch"),
        ("treering.schedule", "def f():\n    from torch.nn import functional"),
        ("treering.data.rendering.template", "from transformers import AutoTokenizer"),
        ("treering.data.rendering.template", "class A:\n    import transformers"),
        ("treering.data.rendering.encoder", "from tokenizers import Tokenizer"),
        ("treering.utils", "import os"),
    ],
)
def test_a_planted_violation_is_caught(module: str, source: str) -> None:
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("treering.tree.radix", "from treering.tree.forest import Forest"),
        ("treering.tree.radix", "from . import forest"),
        ("treering.tree.radix", "from treering import errors"),
        ("treering.train.step", "from treering.model.forward import forward\nimport torch"),
        ("treering.data.rendering.template", "def f():\n    from transformers import AutoTokenizer"),
        ("treering.data.rendering.encoder", "if TYPE_CHECKING:\n    from tokenizers import Tokenizer"),
        ("treering.cli.main", "import treering.config.sft_config"),
        ("treering", "from treering.train.step import backward"),
    ],
)
def test_an_import_from_above_is_allowed(module: str, source: str) -> None:
    assert violations(module, source) == []


def test_relative_imports_of_a_package_start_at_the_package() -> None:
    assert list(imports_of("treering.tree", "from .forest import Forest", is_package=True)) == [
        ("treering.tree.forest", True)
    ]
    assert violations("treering.tree", "from ..train import step", is_package=True) != []


def test_every_planted_fault_has_its_text_and_tests() -> None:
    root = SOURCE.parents[1]
    faults = tomllib.loads((root / "tools" / "planted_faults.toml").read_text(encoding="utf-8"))["fault"]
    assert [
        fault["name"]
        for fault in faults
        if (SOURCE / fault["file"]).read_text(encoding="utf-8").count(fault["old"]) != 1
        or not all((root / test.split("::")[0]).exists() for test in fault["tests"].split())
    ] == []
