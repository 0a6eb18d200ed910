"""`treering bench`: what is printed, written and refused; what is measured is tested in `tests/benchmarks`."""

import json
from itertools import count
from pathlib import Path

import benchmarks.tree
import pytest
from benchmarks.tree_cases import star

from treering.cli import bench
from treering.errors import InputError, UnsupportedError


def test_the_command_prints_one_json_object_and_writes_the_same_to_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(benchmarks.tree, "published_cases", lambda: [star(prompt=9, response=4, group=3)])
    monkeypatch.setattr(benchmarks.tree, "find_peers", list)
    bench.run(name="tree", json_output=True, out=tmp_path / "tree.json", runs=1)
    printed = capsys.readouterr()
    assert json.loads(printed.out) == json.loads((tmp_path / "tree.json").read_text())
    assert [case["flat_tokens"] for case in json.loads(printed.out)["cases"]] == [39]
    assert "make peers" in " ".join(printed.err.split())


def test_the_table_shows_each_case_with_its_share_of_the_bound(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    numbers = count(1)
    cases = [
        {"case": name, "flat_tokens": 1234, "unique_tokens": 617, "flop_bound": 2.0, "baseline": "one_by_one"}
        | {"baseline_s": 1.5 * next(numbers), "tree_s": 1.0, "speedup": 1.5, "grad_error": 3e-7}
        | {"baselines": {"one_by_one": 1.5}, "peers": {"other": {"speedup": 1.25, "seconds": 1.2}}}
        for name in ("star", "caterpillar")
    ]
    report = {"cases": cases, "environment": {"cpu": "a cpu", "threads": 1, "runs": 5}}
    monkeypatch.setattr(benchmarks.tree, "measure", lambda **_: report)
    bench.run(name="tree", json_output=False, out=None)
    printed = capsys.readouterr()
    row = next(line for line in printed.out.splitlines() if "caterpillar" in line)
    assert row.split()[1:] == ["1,234", "617", "2.00x", "3.000", "1.000", "1.50x", "75%", "3e-07"]
    assert printed.out.count("other: 1.25x in 1.200 s") == 2
    assert printed.err == ""


def test_bad_arguments_are_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(benchmarks.tree, "measure", lambda **_: pytest.fail("measured"))
    with pytest.raises(InputError, match="--runs must be at least 1, got 0"):
        bench.run(name="tree", json_output=True, out=None, runs=0)
    with pytest.raises(InputError, match="--out needs an existing folder"):
        bench.run(name="tree", json_output=True, out=tmp_path / "absent" / "tree.json")


def test_a_package_without_its_repository_says_where_benchmarks_are(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="benchmarks come with the repository"):
        bench.load_benchmark("tree", checkout=tmp_path)
