"""`python -m benchmarks`: what is printed, written and refused."""

import json
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from benchmarks.__main__ import main
from rich.console import Console

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def published(name: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return report


@pytest.mark.parametrize(
    ("name", "file", "words"),
    [
        ("tree", "tree.json", "caterpillar"),
        ("tree", "tree_sets.json", "toolbench"),
        ("tree", "tree_partitions.json", "recompute"),
        ("distill", "distill.json", "TRL's kernel"),
        ("data", "data.json", "inspect again"),
        ("draft", "draft_toolbench_dfsdt.json", "history: siblings"),
        ("engine", "engine.json", "flips per token"),
        ("pipe", "pipe.json", "histopipe"),
        ("loop", "loop.json", "on top"),
        ("ranks", "ranks.json", "toolbench"),
        ("weights", "weights.json", "object store: both"),
        ("faults", "faults.json", "SIGKILL at a random moment"),
        ("trl", "trl.json", "nothing_shared_260"),
    ],
)
def test_the_tables_of_published_results_can_be_shown(name: str, file: str, words: str) -> None:
    console = Console(width=120, record=True, file=StringIO())
    import_module(f"benchmarks.{name}.view").show(published(file), console)
    assert words in console.export_text()


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
