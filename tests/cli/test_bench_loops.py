"""`treering bench pipe` and `treering bench loop`: their tables, and what they refuse."""

import json
from pathlib import Path
from typing import Any

import benchmarks.loop.bench
import benchmarks.pipe.bench
import pytest

from treering.cli import bench
from treering.errors import InputError

SIZE = {"prompts_per_step": 32, "group_size": 16}
FACTS = {"cpu": "a cpu", "num_processors": 2, "workers": 2, "runs": 3, "size": SIZE}


def pipe_report() -> dict[str, Any]:
    def row(policy: str, staleness: int, drafts: str, *figures: float, is_base: bool) -> dict[str, Any]:
        names = ("step_s", "predicted_step_s", "ratio", "speedup", "predicted_speedup", "bubble", "predicted_bubble")
        return {
            "policy": policy,
            "staleness": staleness,
            "drafts": drafts,
            "is_base": is_base,
            "num_differing": 0,
            **dict(zip(names, figures, strict=True)),
        }

    rows = [
        row("fifo", 0, "off", 0.5, 0.475, 0.95, 1.0, 1.0, 0.25, 0.2, is_base=True),
        row("histopipe", 1, "on", 0.625, 0.5, 0.8, 0.8, 0.95, 0.1, 0.05, is_base=False),
    ]
    return {"policies": rows, "notes": ["little to win"], "environment": FACTS}


def loop_report() -> dict[str, Any]:
    shares = {"rollout": 0.75, "train": 0.5, "update": 0.01, "trainer_waits": 0.49, "engines_wait": 0.3}
    rows = [
        {"variant": {"name": "plain"}, "step_s": 2.0, "speedup": 1.0, "shares": shares},
        {"variant": {"name": "runtime"}, "step_s": 2.5, "speedup": 0.8, "shares": shares},
    ]
    product = {
        "factors": {"tree": 2.0, "runtime": 0.8},
        "ladder": {"tree": 2.0, "runtime": 0.9},
        "product": 1.6,
        "whole": 1.8,
    }
    return {"variants": rows, "product": product, "notes": ["exceeds"], "environment": FACTS}


def test_the_pipe_table_shows_measured_beside_predicted_and_a_loss_like_a_win(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(benchmarks.pipe.bench, "measure", lambda **_: pipe_report())
    bench.run(name="pipe", json_output=False, out=None)
    printed = capsys.readouterr()
    rows = [line.split() for line in printed.out.splitlines()]
    assert ["fifo*", "0", "off", "0.500", "0.475", "0.95", "1.00x", "1.00x", "25%", "20%", "0"] in rows
    assert ["histopipe", "1", "on", "0.625", "0.500", "0.80", "0.80x", "0.95x", "10%", "5%", "0"] in rows
    assert "a cpu, 2 processors, 2 workers, median of 3; 32 x 16 rollouts a step" in printed.out
    assert "little to win" in printed.err


def test_the_loop_tables_show_shares_and_factors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(benchmarks.loop.bench, "measure", lambda **_: loop_report())
    bench.run(name="loop", json_output=False, out=None)
    printed = capsys.readouterr()
    rows = [line.split() for line in printed.out.splitlines()]
    assert ["runtime", "2.500", "0.80x", "75%", "50%", "1%", "49%", "30%"] in rows
    assert ["tree", "2.00x", "2.00x"] in rows
    assert ["runtime", "0.80x", "0.90x"] in rows
    assert ["product", "1.60x", "1.80x"] in rows
    assert "exceeds" in printed.err


@pytest.mark.parametrize("name", ["pipe", "loop"])
def test_json_is_alone_on_stdout_and_runs_reach_the_benchmark(
    name: bench.Name, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given: dict[str, Any] = {}
    report = pipe_report() if name == "pipe" else loop_report()
    module = bench.load_benchmark(name)
    monkeypatch.setattr(module, "measure", lambda **options: given.update(options) or report)
    bench.run(name=name, json_output=True, out=tmp_path / "found.json", runs=2)
    printed = capsys.readouterr()
    assert json.loads(printed.out) == report == json.loads((tmp_path / "found.json").read_text())
    assert given.pop("on_progress") is not None
    assert given == {"num_runs": 2}
    assert "minutes" in printed.err


@pytest.mark.parametrize("name", ["pipe", "loop"])
def test_options_of_other_benchmarks_are_refused(name: bench.Name, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.load_benchmark(name), "measure", lambda **_: pytest.fail("measured"))
    others: dict[str, Any] = {"only": "star", "full": True, "batch": 2, "file": Path("a"), "drafters": "naive"}
    for option, value in others.items():
        with pytest.raises(InputError, match=f"belongs to .*, got it for {name}: leave it out"):
            bench.run(name=name, json_output=True, out=None, **{option: value})
    with pytest.raises(InputError, match="--runs must be at least 1, got 0"):
        bench.run(name=name, json_output=True, out=None, runs=0)
