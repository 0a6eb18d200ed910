"""`python -m benchmarks`: what is printed, written and refused."""

import json
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from benchmarks.__main__ import main
from benchmarks.common.tables import show
from rich.console import Console

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ALIKE = (
    "tree",
    "distill",
    "data",
    "engine",
    "pipe",
    "loop",
    "ranks",
    "real",
    "rehearsal",
    "faults",
    "tinker",
    "trl",
    "trl_rollouts",
    "vllm",
)
FILES = {name: name for name in (*ALIKE, "images")} | {"draft": "draft_toolbench_dfsdt"}


def test_published_results_have_the_columns_of_their_tables() -> None:
    for name, file in FILES.items():
        tables = import_module(f"benchmarks.{name}.bench").TABLES
        console = Console(width=300, record=True, file=StringIO())
        report = json.loads((RESULTS / f"{file}.json").read_text())
        show(report, tables, console)
        words = console.export_text()
        assert all(key in words for key in tables if report.get(key)), name
        assert "None" not in words


def test_json_is_alone_on_stdout_and_in_the_file_and_options_reach_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given: dict[str, Any] = {}
    report = {"notes": ["one was left out"]}
    monkeypatch.setattr("benchmarks.tree.bench.measure", lambda **options: given.update(options) or report)
    out = tmp_path / "tree.json"
    assert main(["tree", "--json", "--out", str(out), "--runs", "2", "--only", "star, math", "--full"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == report == json.loads(out.read_text())
    assert "one was left out" in printed.err
    del given["on_progress"]
    assert given == {"num_runs": 2, "only": ["star", "math"], "sample_tokens": None}


def test_bad_input_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["tree", "--out", str(tmp_path / "absent" / "tree.json")]) == 2
    assert capsys.readouterr().err.startswith("benchmarks: --out needs an existing folder")
    assert main(["draft", str(tmp_path / "absent.jsonl")]) == 2
    assert "absent.jsonl" in capsys.readouterr().err.splitlines()[-1]
    with pytest.raises(SystemExit, match="2"):
        main(["engine", "--only", "star"])
