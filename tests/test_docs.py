"""Documents run as shown: the examples of README and docs with their output, the examples in docstrings, and links."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

from tests.models import build

ROOT = Path(__file__).parents[1]
ROOMS = ("tree", "history", "schedule", "attention", "model", "train", "engine", "rl", "ranks")
DOCUMENTS = (
    "README.md",
    "docs/tree.md",
    "docs/objectives.md",
    "docs/data.md",
    "docs/history.md",
    "docs/schedule.md",
    "docs/engine.md",
    "docs/rl.md",
    "docs/models.md",
    "docs/kernels.md",
    "docs/environments.md",
)
# An example and the next block where that is its output: documents show what an example prints after it.
EXAMPLE = re.compile(r"^```python\n(.*?)^```\n(?:[^`]|`(?!``))*?^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = sorted(page for where in ("", "docs/", "benchmarks/", "examples/*/") for page in ROOT.glob(f"{where}*.md"))
# A link without a scheme, up to its section: a path from the root, the sources or the page.
LINK = re.compile(r"\]\((?!\w+:)([^)#]+)")
FILE = re.compile(r"`((?:\w+/)+\w+\.(?:py|md|toml))`")


def modules_of(room: str) -> list[str]:
    package = importlib.import_module(f"treering.{room}")
    names = [found.name for found in pkgutil.walk_packages(package.__path__, f"treering.{room}.")]
    # Kernels import triton or flash-attn-4, which may not be installed.
    return [
        name
        for name in names
        if not any(part in name for part in (".triton", ".cuda", ".flash_kernel", ".head_kernels"))
    ]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_examples_of_a_document_print_the_shown_output(
    document: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / document).read_text(encoding="utf-8")
    examples = EXAMPLE.findall(text)
    assert len(examples) == text.count("```python\n") > 0
    # Examples run in reading order. Models that belong to the reader may be any supported ones.
    names: dict[str, object] = {"model": build(), "teacher": build(seed=1)}
    for example, output in examples:
        exec(compile(example, document, "exec"), names)
        assert capsys.readouterr().out == output


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_points_to_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [page.parent / link for link in LINK.findall(text)]
    homes = (ROOT, ROOT / "src", ROOT / "src" / "treering", page.parent)
    assert [link for link in links if not link.exists()] == []
    assert [file for file in FILE.findall(text) if not any((home / file).is_file() for home in homes)] == []


def test_an_install_by_name_is_shown_once_and_as_what_comes_after_publication() -> None:
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "src").rglob("*.md"), *(ROOT / "examples").rglob("*.py"), *PAGES]
    lines = [line for page in sources for line in page.read_text(encoding="utf-8").splitlines()]
    found = [line for line in lines if re.search(r"pip install [^#]*\btreering\b", line)]
    assert found == ["# once published: pip install 'treering[train]'"]


def test_there_are_pages_with_links_and_files() -> None:
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    assert sum(len(LINK.findall(text)) for text in texts) >= 10
    assert sum(len(FILE.findall(text)) for text in texts) >= 30


@pytest.mark.parametrize("name", [name for room in ROOMS for name in modules_of(room)])
def test_worked_examples_of_docstrings_hold(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_worked_examples_to_check() -> None:
    modules = [importlib.import_module(name) for room in ROOMS for name in modules_of(room)]
    found = [test for module in modules for test in doctest.DocTestFinder().find(module)]
    assert sum(len(test.examples) for test in found) >= 30
